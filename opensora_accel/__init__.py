"""Train longer videos on the GPUs you have: parallelism, offload and sharding for video DiTs, proven exact.

Importing this package starts nothing: no process group, no device query, no environment write.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from opensora_accel.plan import Plan

if TYPE_CHECKING:
    from opensora_accel.aliases import install_as
    from opensora_accel.deferred import deferred_init, materialize
    from opensora_accel.parallel_states import init_parallel
    from opensora_accel.weights import load_weights

__all__ = [
    "Plan",
    "__version__",
    "deferred_init",
    "init_parallel",
    "install_as",
    "load_weights",
    "materialize",
]

__version__ = "0.2.0"


_LAZY = {
    "init_parallel": "opensora_accel.parallel_states",
    "install_as": "opensora_accel.aliases",
    "deferred_init": "opensora_accel.deferred",
    "load_weights": "opensora_accel.weights",
    "materialize": "opensora_accel.deferred",
}


def __getattr__(name: str) -> Any:
    """`init_parallel` brings torch, a second that commands which need none should not wait for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
