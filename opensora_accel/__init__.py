"""Train longer videos on the GPUs you have: parallelism, offload and sharding for video DiTs, proven exact.

Importing this package starts nothing: no process group, no device query, no environment write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opensora_accel.plan import Plan

if TYPE_CHECKING:
    from opensora_accel.parallel_states import init_parallel

__all__ = ["Plan", "__version__", "init_parallel"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`init_parallel` brings torch, a second that commands which need none should not wait for."""
    if name != "init_parallel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from opensora_accel.parallel_states import init_parallel

    return init_parallel
