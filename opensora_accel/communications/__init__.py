"""Differentiable communication: all-to-all, split and gather, the Megatron pairs, ring exchange.

The names and the argument order are Open-Sora's; the sizes are any. `P` is the number of ranks of the group, and
shapes are those of one rank. A dimension that does not divide is shared by the rule of `torch.tensor_split`: the
first `size % P` ranks hold one more.

Each collective is one autograd Function over `transport`, which is the only file that calls torch.distributed. What a
rank can know is checked before it communicates, so that all ranks fail together. With OPENSORA_ACCEL_DEBUG=1 the
ranks compare shapes, dtypes and options first as well.
"""

from __future__ import annotations

from opensora_accel.communications.alltoall import Cut, all_to_all, all_to_all_packed, all_to_all_unchecked
from opensora_accel.communications.along_dim import (
    copy_forward_reduce_backward,
    gather_forward_reduce_scatter_backward,
    gather_forward_split_backward,
    reduce_forward_copy_backward,
    reduce_scatter_forward_gather_backward,
    split_forward_gather_backward,
)
from opensora_accel.communications.checks import (
    check_group,
    compare_facts,
    compare_next_forwards,
    debug_enabled,
    every_forward_is_compared,
    exact_collectives,
    gather_objects,
    inputs_are_compared,
    wants_exact,
    without_comparing_inputs,
)
from opensora_accel.communications.missing_ranks import MissingRankError, report_failure, waiting
from opensora_accel.communications.neighbours import exchange_halo, ring_exchange
from opensora_accel.communications.sizes import Sizes, exchange_integers, share_sizes
from opensora_accel.communications.transport import finish, start_all_to_all, start_shift

__all__ = [
    "Cut",
    "MissingRankError",
    "Sizes",
    "all_to_all",
    "all_to_all_packed",
    "all_to_all_unchecked",
    "check_group",
    "compare_facts",
    "compare_next_forwards",
    "copy_forward_reduce_backward",
    "debug_enabled",
    "every_forward_is_compared",
    "exact_collectives",
    "exchange_halo",
    "exchange_integers",
    "finish",
    "gather_forward_reduce_scatter_backward",
    "gather_forward_split_backward",
    "gather_objects",
    "inputs_are_compared",
    "reduce_forward_copy_backward",
    "reduce_scatter_forward_gather_backward",
    "report_failure",
    "ring_exchange",
    "share_sizes",
    "split_forward_gather_backward",
    "start_all_to_all",
    "start_shift",
    "transport",
    "waiting",
    "wants_exact",
    "without_comparing_inputs",
]
