"""What a step takes: memory by kind and by block, counted on any device, also on fake tensors."""

from opensora_accel.profiler.live_bytes import LimitedBytes, LiveBytes
from opensora_accel.profiler.memory import MemoryPeak, MemoryTimeline
from opensora_accel.profiler.out_of_memory import tell_of_out_of_memory

__all__ = ["LimitedBytes", "LiveBytes", "MemoryPeak", "MemoryTimeline", "tell_of_out_of_memory"]
