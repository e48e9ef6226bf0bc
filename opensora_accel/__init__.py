"""Train longer videos on the GPUs you have: parallelism, offload and sharding for video DiTs, proven exact.

Importing this package starts nothing: no process group, no device query, no environment write.
"""

from opensora_accel.parallel_states import init_parallel
from opensora_accel.plan import Plan

__all__ = ["Plan", "__version__", "init_parallel"]

__version__ = "0.1.0"
