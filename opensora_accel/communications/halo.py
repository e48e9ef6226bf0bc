"""The rows next to this rank's own: what a convolution along a dimension that is spread reads of its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from opensora_accel.communications.checks import check_dim, check_group
from opensora_accel.communications.sizes import Sizes, splits_of_local
from opensora_accel.communications.waiting import waiting


def exchange_halo(
    input_: Tensor,
    process_group: dist.ProcessGroup | None,
    dim: int,
    reach: int,
    *,
    splits: Sequence[int] | None = None,
) -> tuple[Tensor, int]:
    """This rank's rows with up to `reach` rows of its neighbours on either side.

    Args:
        input_: [..., S/P, ...], rows along `dim`.
        reach: how many rows on each side; they may lie on several ranks, where shares are small or empty.
        splits: every rank's number of rows, where the caller knows them; otherwise they are exchanged.

    Returns:
        The rows [..., before + S/P + after, ...] and `before`: fewer than `reach` at the ends of the sequence.
        A rank without rows of its own gets none.

    Communication: one all-to-all of `reach` rows to each side. Gradient: each row's parts are summed where it lives.
    """
    group = check_group(process_group)
    dim = check_dim("dim", dim, input_)
    if reach < 0:
        raise ValueError(f"reach is a number of rows, at least 0; got {reach}")
    sizes = splits_of_local(input_, splits, group, dim)
    rank = group.rank()
    rows = input_.movedim(dim, 0)
    wanted = [_wanted(of, rank, sizes, reach) for of in range(len(sizes))]
    given = [_wanted(rank, to, sizes, reach) for to in range(len(sizes))]
    start = sum(sizes[:rank])
    sent = torch.cat([rows[r.start - start : r.stop - start] if len(r) else rows[:0] for r in given])
    length = rows.shape[1:].numel()
    with waiting("exchange_halo", group):
        received = all_to_all_single_autograd(
            sent.reshape(-1), [len(r) * length for r in wanted], [len(r) * length for r in given], group
        )
        received = received.reshape(-1, *rows.shape[1:])
    before = sum(len(r) for r in wanted[:rank])
    out = torch.cat([received[:before], rows, received[before:]])
    return out.movedim(0, dim), before


def _wanted(of: int, by: int, sizes: Sizes, reach: int) -> range:
    """Which rows of rank `of`, by their place in the sequence, rank `by` wants in its halo."""
    if of == by or not sizes[by]:
        return range(0)
    start, stop = sum(sizes[:by]), sum(sizes[: by + 1])
    first, last = sum(sizes[:of]), sum(sizes[: of + 1])
    low, high = max(start - reach, first), min(stop + reach, last)
    return range(low, high) if low < high else range(0)
