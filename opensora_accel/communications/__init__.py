"""Differentiable communication: all-to-all, split and gather, the Megatron pairs, ring exchange.

Open-Sora's names and argument order, for any sizes. Shapes are given with P the ranks of the group. A dimension
that does not divide is shared by the rule of `torch.tensor_split`: the first `size % P` ranks hold one more.

The facts that a rank can know are checked before it communicates, so that all ranks fail together. With
OPENSORA_ACCEL_DEBUG=1 shapes and dtypes are compared across the group first as well.
"""

from opensora_accel.communications.alltoall import all_to_all, all_to_all_async, all_to_all_packed
from opensora_accel.communications.along_dim import (
    gather_forward_reduce_scatter_backward,
    gather_forward_split_backward,
    reduce_scatter_forward_gather_backward,
    split_forward_gather_backward,
)
from opensora_accel.communications.reduce import copy_forward_reduce_backward, reduce_forward_copy_backward
from opensora_accel.communications.ring import ring_exchange, ring_exchange_async
from opensora_accel.communications.sizes import cached_sizes, share_sizes
from opensora_accel.communications.transfer import Handle

__all__ = [
    "Handle",
    "all_to_all",
    "all_to_all_async",
    "all_to_all_packed",
    "cached_sizes",
    "copy_forward_reduce_backward",
    "gather_forward_reduce_scatter_backward",
    "gather_forward_split_backward",
    "reduce_forward_copy_backward",
    "reduce_scatter_forward_gather_backward",
    "ring_exchange",
    "ring_exchange_async",
    "share_sizes",
    "split_forward_gather_backward",
]
