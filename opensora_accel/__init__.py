"""Train longer videos on the GPUs you have: parallelism, offload and sharding for video DiTs, proven exact.

Importing this package starts nothing: no process group, no device query, no environment write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opensora_accel import lazy
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

# `init_parallel` brings torch, a second that commands which need none should not wait for.
__getattr__, __dir__ = lazy.attach(__name__)
