"""Where the time, the memory and the bytes of a step go.

with profile(model, plan, "profile") as run:
    for batch in loader:
        loss = train_step(batch)
        run.step(loss=loss)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opensora_accel import lazy

if TYPE_CHECKING:
    from opensora_accel.observe import LimitedBytes, LiveBytes
    from opensora_accel.profiler.intervals import exposed_seconds
    from opensora_accel.profiler.memory import MemoryPeak, MemoryTimeline
    from opensora_accel.profiler.out_of_memory import explain_out_of_memory
    from opensora_accel.profiler.run_page import CONFIG, METRICS, PAGE, SAMPLES, write_run_page
    from opensora_accel.profiler.time import profile
    from opensora_accel.regions import region

__all__ = [
    "CONFIG",
    "METRICS",
    "PAGE",
    "SAMPLES",
    "LimitedBytes",
    "LiveBytes",
    "MemoryPeak",
    "MemoryTimeline",
    "explain_out_of_memory",
    "exposed_seconds",
    "profile",
    "region",
    "report",
    "write_run_page",
]

# A report, and each process that reads records for it, need no torch, which all that runs beside a model brings.
__getattr__, __dir__ = lazy.attach(__name__)
