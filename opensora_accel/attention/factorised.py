"""Factorised attention (Open-Sora's STDiT): frames attend along space, places attend along time.

A layer needs one dimension whole and may have the other one spread over the ranks. So the dimension that is spread
is switched between the two, by one all-to-all of one tensor. Ulysses would send four (q, k, v and the output) around
the attention along the dimension that is spread: a switch there and one back are half of that.

Source: dynamic sequence parallelism, arXiv:2403.10266.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications import all_to_all_packed
from opensora_accel.parallel_states import get_parallel_group


def switch_sharded_dim(
    input_: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    from_dim: int,
    to_dim: int,
    splits: Sequence[int] | None = None,
) -> Tensor:
    """The same tokens with `to_dim` spread over the ranks instead of `from_dim`.

    Args:
        input_: [B, T/P, S, C] with from_dim=1 (frames are spread), to_dim=2: of any dims.
        group: the P ranks; by default the registered sequence group.
        splits: every rank's size of `from_dim`, where the caller knows them; otherwise they are exchanged.

    Returns:
        [B, T, S/P, C]; shares by the rule of `torch.tensor_split`, of sizes that need not divide.

    Communication: one `all_to_all_single` of (P−1)/P of the input. Gradient: the switch back, unscaled.
    """
    group = get_parallel_group("sequence") if group is None else group
    (switched,) = all_to_all_packed([input_], group, to_dim, from_dim, splits=[splits])
    return switched
