"""Where the time, the memory and the bytes of a step go.

with profile(model, plan, "profile") as run:
    for batch in loader:
        loss = train_step(batch)
        run.step(loss=loss)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opensora_accel.observe.live_bytes import LimitedBytes, LiveBytes
    from opensora_accel.profiler.intervals import exposed_seconds
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

_HOMES = {
    "LimitedBytes": "opensora_accel.observe.live_bytes",
    "LiveBytes": "opensora_accel.observe.live_bytes",
    "MemoryPeak": "opensora_accel.profiler.memory",
    "MemoryTimeline": "opensora_accel.profiler.memory",
    "exposed_seconds": "opensora_accel.profiler.intervals",
    "profile": "opensora_accel.profiler.time",
    "region": "opensora_accel.regions",
    "tell_of_out_of_memory": "opensora_accel.profiler.out_of_memory",
    "watch": "opensora_accel.profiler.watching",
}


def __getattr__(name: str) -> Any:
    """What runs beside a model brings torch, which a report, and each process that reads records for it, need not."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
