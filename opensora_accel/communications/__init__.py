"""Differentiable communication: all-to-all, split and gather, the Megatron pairs, ring exchange.

The names and the argument order are Open-Sora's; the sizes are any. `P` is the number of ranks of the group, and
shapes are those of one rank. A dimension that does not divide is shared by the rule of `torch.tensor_split`: the
first `size % P` ranks hold one more.

Each collective is one autograd Function over `transport`, which is the only file that calls torch.distributed. What a
rank can know is checked before it communicates, so that all ranks fail together. With OPENSORA_ACCEL_DEBUG=1 the
ranks compare shapes, dtypes and options first as well.
"""

from opensora_accel.communications.alltoall import all_to_all, all_to_all_packed
from opensora_accel.communications.along_dim import (
    copy_forward_reduce_backward,
    gather_forward_reduce_scatter_backward,
    gather_forward_split_backward,
    reduce_forward_copy_backward,
    reduce_scatter_forward_gather_backward,
    split_forward_gather_backward,
)
from opensora_accel.communications.neighbours import exchange_halo, ring_exchange
from opensora_accel.communications.sizes import share_sizes

__all__ = [
    "all_to_all",
    "all_to_all_packed",
    "copy_forward_reduce_backward",
    "exchange_halo",
    "gather_forward_reduce_scatter_backward",
    "gather_forward_split_backward",
    "reduce_forward_copy_backward",
    "reduce_scatter_forward_gather_backward",
    "ring_exchange",
    "share_sizes",
    "split_forward_gather_backward",
]
