"""Where the time, the memory and the bytes of a step go.

with profile(model, plan, "profile") as run:
    for batch in loader:
        loss = train_step(batch)
        run.step(loss=loss)
"""

from opensora_accel.profiler.communication import exposed_seconds
from opensora_accel.profiler.memory import LiveBytes
from opensora_accel.profiler.time import profile
from opensora_accel.regions import region

__all__ = ["LiveBytes", "exposed_seconds", "profile", "region"]
