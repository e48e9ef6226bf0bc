"""Steps of a stack of DiT blocks under every offload scheme, side by side: time, memory, bytes moved."""

from opensora_accel.profiler.bench_offload.command import main

__all__ = ["main"]
