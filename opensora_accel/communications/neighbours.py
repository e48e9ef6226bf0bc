"""What neighbouring ranks give each other: a whole tensor to the next one, or the rows at the border to both.

Three ranks, each with two rows of six:

    ring_exchange       rank 0 gets rows 4 5, rank 1 gets rows 0 1, rank 2 gets rows 2 3
    exchange_halo, 1    rank 0 gets rows 0 1 2, rank 1 gets rows 1 2 3 4, rank 2 gets rows 3 4 5

Ring attention sends its keys by the same `transport.start_shift`, but computes while they are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.checks import check_agreement, check_dim, check_group
from opensora_accel.communications.sizes import Sizes, splits_of_locals
from opensora_accel.communications.transport import all_to_all_single, finish, start_shift


def ring_exchange(
    input_: Tensor,
    process_group: dist.ProcessGroup | None,
    *,
    shift: int = 1,
    dim: int | None = None,
    splits: Sequence[int] | None = None,
) -> Tensor:
    """The tensor of the rank `shift` places before this one, while this one's goes `shift` places on.

    Args:
        input_: one shape on every rank, but for `dim`.
        shift: 1 is the next rank; negative shifts go the other way.
        dim: the dimension whose size differs between ranks; None when none does.
        splits: every rank's size of `dim`, where the caller knows them; otherwise they are exchanged.

    Returns:
        As `input_`, with the other rank's size of `dim`.

    Raises:
        ValueError: splits without a dim, a tensor without dims, or splits that do not fit.

    Communication: one send and one receive of the tensor's bytes. Gradient: the exchange by −shift, unscaled.
    """
    group = check_group(process_group)
    if dim is None and splits is not None:
        raise ValueError(f"splits={tuple(splits)} need the dim that they belong to; pass dim=")
    if input_.dim() == 0:
        raise ValueError("ring_exchange needs a tensor of at least one dim; use input_.reshape(1)")
    at = 0 if dim is None else check_dim("dim", dim, input_)
    check_agreement("ring_exchange", input_, group, None if dim is None else at, shift=shift)
    if dim is None:
        sizes: Sizes = (input_.size(0),) * group.size()
    else:
        (sizes,) = splits_of_locals([input_], [splits], group, at)
    if shift % group.size() == 0:
        return input_
    return _RingExchange.apply(input_, group, shift, at, sizes)


class _RingExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, group: dist.ProcessGroup, shift: int, dim: int, sizes: Sizes
    ) -> Tensor:
        """input_: [..., N/P at dim, ...] → [..., the other rank's N/P at dim, ...]."""
        # What this rank holds afterwards are the sizes of the ranks before.
        moved = tuple(sizes[(rank - shift) % len(sizes)] for rank in range(len(sizes)))
        ctx.options = group, -shift, dim, moved
        shape = list(input_.shape)
        shape[dim] = moved[group.rank()]
        received = input_.new_empty(shape)
        works = start_shift(input_.contiguous(), received, group, shift=shift, operation="ring_exchange")
        finish(works, group, input_.device, operation="ring_exchange")
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """grad: [..., the other rank's N/P at dim, ...]."""
        return _RingExchange.apply(grad, *ctx.options), None, None, None, None


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
        input_: [..., S/P at dim, ...].
        reach: how many rows on each side; they may lie on several ranks, where shares are small or empty.
        splits: every rank's number of rows, where the caller knows them; otherwise they are exchanged.

    Returns:
        The rows [..., before + S/P + after, ...] and `before`: fewer than `reach` at the ends of the sequence.
        A rank without rows of its own gets none.

    Raises:
        ValueError: a negative reach, a dim out of range, or splits that do not fit.

    Communication: one all-to-all of `reach` rows to each side. Gradient: each row's parts are summed where it lives.
    """
    group = check_group(process_group)
    dim = check_dim("dim", dim, input_)
    if reach < 0:
        raise ValueError(f"reach is a number of rows, at least 0; got {reach}")
    (sizes,) = splits_of_locals([input_], [splits], group, dim)
    rank = group.rank()
    rows = input_.movedim(dim, 0)
    # Halo rows may lie on several ranks, where shares are small: an all-to-all serves all cases alike.
    received_from = [_halo_rows(of, rank, sizes, reach) for of in range(len(sizes))]
    given_to = [_halo_rows(rank, to, sizes, reach) for to in range(len(sizes))]
    start = sum(sizes[:rank])
    # Ranges count in the whole sequence, and rows of this rank from its own first one.
    given = torch.cat([rows[r.start - start : r.stop - start] if len(r) else rows[:0] for r in given_to])
    received = _ExchangeRows.apply(given, group, [*map(len, received_from)], [*map(len, given_to)])
    before = sum(len(r) for r in received_from[:rank])  # rows that stand before this rank's own
    # Lower ranks hold earlier rows: what arrived is in the order of the sequence on either side.
    return torch.cat([received[:before], rows, received[before:]]).movedim(0, dim), before


def _halo_rows(of: int, by: int, sizes: Sizes, reach: int) -> range:
    """Which rows of rank `of`, by their place in the sequence, are in the halo of rank `by`."""
    if of == by or not sizes[by]:
        return range(0)
    start, stop = sum(sizes[:by]), sum(sizes[: by + 1])
    first, last = sum(sizes[:of]), sum(sizes[: of + 1])
    low, high = max(start - reach, first), min(stop + reach, last)
    return range(low, high) if low < high else range(0)


class _ExchangeRows(torch.autograd.Function):
    """Sends runs of rows [n, ...] to the ranks, of the lengths `send_sizes`, and receives `receive_sizes`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, receive_sizes: list[int], send_sizes: list[int]
    ) -> Tensor:
        """rows: [N, ...], N the sum of send_sizes → [M, ...], M the sum of receive_sizes."""
        ctx.options = group, send_sizes, receive_sizes
        received = rows.new_empty(sum(receive_sizes), *rows.shape[1:])
        all_to_all_single(received, rows.contiguous(), group, receive_sizes, send_sizes)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """grad: [M, ...] → [N, ...], by the same exchange the other way."""
        return _ExchangeRows.apply(grad, *ctx.options), None, None, None
