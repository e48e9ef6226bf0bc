"""Where the time, the memory and the bytes of a step go.

with profile(model, plan, "profile") as run:
    for batch in loader:
        loss = train_step(batch)
        run.step(loss=loss)
"""

from opensora_accel.profiler.intervals import exposed_seconds
from opensora_accel.profiler.live_bytes import LimitedBytes, LiveBytes
from opensora_accel.profiler.memory import MemoryPeak, MemoryTimeline
from opensora_accel.profiler.out_of_memory import tell_of_out_of_memory
from opensora_accel.profiler.time import profile
from opensora_accel.profiler.watching import watch
from opensora_accel.regions import region

__all__ = [
    "LimitedBytes",
    "LiveBytes",
    "MemoryPeak",
    "MemoryTimeline",
    "exposed_seconds",
    "profile",
    "region",
    "tell_of_out_of_memory",
    "watch",
]
