"""What a step takes: memory now, by counting storages on any device, also on fake tensors."""

from opensora_accel.profiler.memory import LiveBytes

__all__ = ["LiveBytes"]
