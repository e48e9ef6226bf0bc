"""What a step takes: memory by kind and by block, counted on any device, also on fake tensors."""

from opensora_accel.profiler.live_bytes import LimitedBytes, LiveBytes
from opensora_accel.profiler.memory import MemoryPeak, MemoryTimeline

__all__ = ["LimitedBytes", "LiveBytes", "MemoryPeak", "MemoryTimeline"]
