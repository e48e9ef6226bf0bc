"""What offload did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class OffloadCounters:
    """What happened to the marked tensors since the last `reset_counters()`."""

    moved: int = 0
    moved_bytes: int = 0
    shared: int = 0
    """Marked again while already in the arena: one copy serves all."""
    kept: int = 0
    """Stayed on the device: the arena was full, or the tensor is of a kind that cannot move."""
    kept_bytes: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    prefetched: int = 0
    """Calls whose copies in started while another block computed."""
    overflows: int = 0
    """Calls fetched into memory of their own, because both slots were in use."""
    in_use_bytes: int = 0
    peak_bytes: int = 0
