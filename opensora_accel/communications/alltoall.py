"""All-to-all: every rank gives up a part of one dimension and gets the whole of another.

With P = 3 ranks, S = 6 tokens and H = 3 heads, each rank holds 2 tokens of all heads. After an all-to-all that
scatters heads and gathers tokens, rank r holds all 6 tokens of head r:

    before   rank 0: tokens 0 1, heads a b c     rank 1: tokens 2 3, heads a b c     rank 2: tokens 4 5, heads a b c
    sent     rank 0 → rank 1: head b of tokens 0 1;   rank 1 → rank 0: head a of tokens 2 3;   and so on
    after    rank 0: tokens 0…5, head a          rank 1: tokens 0…5, head b          rank 2: tokens 0…5, head c

Two thirds of what a rank holds leave it. The way back scatters tokens and gathers heads: the same operation with its
dims exchanged. It is also the gradient, because an all-to-all only moves numbers.

On the wire there is one `all_to_all_single` for any number of tensors. Equal shares take one permutation on one side
of it and a view on the other, or a second permutation where a view cannot give the order; tensors may then differ in
the scattered dim, as query heads and key heads do. Shares that differ between ranks are cut into a piece for each rank
and joined again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.checks import check_agreement, check_dim, check_group
from opensora_accel.communications.sizes import Sizes, splits_of_locals, splits_of_total
from opensora_accel.communications.transport import exchange


def all_to_all(
    input_: Tensor,
    process_group: dist.ProcessGroup | None,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    *,
    splits: Sequence[int] | None = None,
) -> Tensor:
    """This rank's share of `scatter_dim` and all of `gather_dim`.

    Args:
        input_: [..., G/P at gather_dim, ..., N at scatter_dim, ...].
        process_group: the P ranks; None is the world, as in torch.
        scatter_dim: cut by the rule of `torch.tensor_split`.
        gather_dim: its parts may differ in size between ranks.
        splits: every rank's size of `gather_dim`, where the caller knows them. Otherwise they are exchanged, one
            integer a rank.

    Returns:
        [..., G at gather_dim, ..., N/P at scatter_dim, ...], contiguous, because code written for Open-Sora calls
        `view` on it. `all_to_all_packed` gives the same numbers without that last copy.

    Raises:
        ValueError: the dims are out of range or equal, or the splits do not fit.

    Communication: one `all_to_all_single`, (P−1)/P of the input's bytes sent. Gradient: the inverse all-to-all,
    unscaled.
    """
    (output,) = all_to_all_packed([input_], process_group, scatter_dim, gather_dim, splits=[splits])
    return output.contiguous()


def all_to_all_packed(
    tensors: Sequence[Tensor],
    process_group: dist.ProcessGroup | None,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    *,
    splits: Sequence[Sequence[int] | None] | None = None,
    scatter_splits: Sequence[Sequence[int] | None] | None = None,
) -> tuple[Tensor, ...]:
    """`all_to_all` of several tensors of one dtype in a single collective.

    Args:
        tensors: each [..., G/P at gather_dim, ..., N at scatter_dim, ...]; they may differ in every size.
        process_group: the P ranks; None is the world.
        splits: for each tensor, every rank's size of `gather_dim`, or None.
        scatter_splits: for each tensor, every rank's share of `scatter_dim`, or None for the default rule.

    Returns:
        The tensors as `all_to_all` gives them, not always contiguous: they may lie side by side in what was received.

    Raises:
        ValueError: the tensors' dtypes differ, a negative dim is another one in each, or as `all_to_all`.
    """
    group = check_group(process_group)
    # What can be refused is refused before any data is sent: a rank that raised later would leave the others waiting.
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"tensors packed into one all-to-all must share one dtype; got {[str(t.dtype) for t in tensors]}"
            )
        scatter_at = check_dim("scatter_dim", scatter_dim, tensor)
        gather_at = check_dim("gather_dim", gather_dim, tensor)
        if min(scatter_dim, gather_dim) < 0 and tensor.dim() != tensors[0].dim():
            raise ValueError(
                f"scatter_dim={scatter_dim} and gather_dim={gather_dim} count from the end, and the tensors have "
                f"{[t.dim() for t in tensors]} dims; count them from 0, or exchange the tensors one by one"
            )
        if scatter_at == gather_at:
            raise ValueError(f"scatter_dim and gather_dim must differ; both are dim {scatter_at}")
        check_agreement("all_to_all", tensor, group, gather_at, scatter_dim=scatter_at, gather_dim=gather_at)
    default = [None] * len(tensors)
    # Shares of the dim that is whole here follow from a rule; those of the other one only the ranks know.
    scattered = [
        splits_of_total(tensor.size(scatter_at), given, group, scatter_at)
        for tensor, given in zip(tensors, scatter_splits or default, strict=True)
    ]
    gathered = splits_of_locals(tensors, splits or default, group, gather_at)
    return all_to_all_unchecked(
        tensors, group, Cut(scatter_at, tuple(scattered)), Cut(gather_at, tuple(gathered))
    )


class Cut(NamedTuple):
    """How a dim is shared: for each tensor, every rank's size of it."""

    dim: int
    splits: tuple[Sizes, ...]

    @property
    def is_even(self) -> bool:
        """Whether every rank has as much as the others, of each tensor."""
        return all(map(_are_equal, self.splits))


def _are_equal(sizes: Sizes) -> bool:
    return sizes.count(sizes[0]) == len(sizes)


def all_to_all_unchecked(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, scatter: Cut, gather: Cut
) -> tuple[Tensor, ...]:
    """`all_to_all_packed` for callers that know all sizes and have checked them.

    Args:
        tensors: each [..., G/P at gather.dim, ..., N at scatter.dim, ...], of one dtype.
    """
    return tuple(tensors) if group.size() == 1 else _AllToAll.apply(group, scatter, gather, *tensors)


# Autograd forbids changing views of one buffer in place, as a rotary embedding may do. What an exchange returns does
# not overlap, and is made by views that autograd does not treat as such, here and by `torch.unsafe_split_with_sizes`.
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        # Not by name: torch.compile (2.13) counts the parameters, and takes two tensors after three names for no ctx.
        group, scatter, gather, *tensors = arguments
        ctx.group, ctx.scatter, ctx.gather = group, scatter, gather
        return tuple(_exchange(group, scatter, gather, *tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """grads: each [..., G at gather.dim, ..., N/P at scatter.dim, ...], as forward left it."""
        # A node of its own is needed for second derivatives only.
        # The inverse is the same exchange with its cuts swapped: what was scattered is gathered.
        exchange = _AllToAll.apply if torch.is_grad_enabled() else _exchange
        return None, None, None, *exchange(ctx.group, ctx.gather, ctx.scatter, *grads)


def _exchange(group: dist.ProcessGroup, scatter: Cut, gather: Cut, *tensors: Tensor) -> Sequence[Tensor]:
    """Each [..., G/P at gather.dim, ..., N at scatter.dim, ...] → [..., G, ..., N/P, ...]."""
    if scatter.is_even and gather.is_even:
        # Tensors that differ in the dim that is scattered, as query heads and key heads do, still lie side by side.
        if gather.dim < scatter.dim and _agree(tensors, scatter.dim):
            return _exchange_to_rows(tensors, group, scatter.dim, gather.dim)
        if gather.dim > scatter.dim and all(tensor.shape == tensors[0].shape for tensor in tensors):
            return _exchange_to_columns(tensors, group, scatter.dim, gather.dim)
    return _exchange_uneven(tensors, group, scatter, gather)


def _agree(tensors: Sequence[Tensor], dim: int) -> bool:
    """Whether tensors are of one shape but for this dim."""
    first = tensors[0].shape
    for tensor in tensors[1:]:
        shape = tensor.shape
        if shape != first and (shape[:dim] != first[:dim] or shape[dim + 1 :] != first[dim + 1 :]):
            return False
    return True


def _cut(tensor: Tensor, dim: int, num_ranks: int) -> Tensor:
    """[..., N at dim, ...] → [..., P, N/P, ...]: which rank gets a piece, and the place within it."""
    return tensor.unflatten(dim, (num_ranks, tensor.size(dim) // num_ranks))


def _exchange_to_rows(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, scatter_dim: int, gather_dim: int
) -> Sequence[Tensor]:
    """Tensors [..., G/P, ..., N, ...] of any N, gathered along a dim before the one that is scattered."""
    num_ranks = group.size()
    # With the rows of gather_dim outermost, what arrives from all ranks is in order: [P, G/P, ..., N/P, ...].
    pieces = [
        _cut(tensor, scatter_dim, num_ranks).movedim((scatter_dim, gather_dim), (0, 1)) for tensor in tensors
    ]
    # The one copy; a single tensor that lies so already is not copied.
    sent = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, scatter_dim + 1)).contiguous()
    received = exchange(sent, group)
    # [P, G/P, ..., ΣN/P, ...] → [..., G, ..., ΣN/P, ...] → [..., G, ..., N/P, ...] side by side in one buffer.
    rows = received.flatten(0, 1).movedim(0, gather_dim)
    return torch.unsafe_split_with_sizes(rows, [piece.size(scatter_dim + 1) for piece in pieces], scatter_dim)


def _exchange_to_columns(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, scatter_dim: int, gather_dim: int
) -> Sequence[Tensor]:
    """n tensors [..., N, ..., G/P, ...], gathered along a dim behind the one that is scattered."""
    # A piece lies in longer runs of memory as it is, [P, n, ..., N/P, ..., G/P, ...]: a single tensor of a batch of one
    # is not copied before it is sent. What arrives takes a permutation.
    pieces = [_cut(tensor, scatter_dim, group.size()).movedim(scatter_dim, 0) for tensor in tensors]
    sent = (pieces[0].unsqueeze(1) if len(pieces) == 1 else torch.stack(pieces, 1)).contiguous()
    received = exchange(sent, group)
    # [P, n, ..., G/P, ...] → [n, ..., P, G/P, ...] → [n, ..., G, ...], where joining two dims makes the copy.
    columns = received.movedim(0, gather_dim + 1).flatten(gather_dim + 1, gather_dim + 2)
    # With the tensors one after the other along the first dim, one operator parts them.
    return torch.unsafe_split_with_sizes(columns.flatten(0, 1), [columns.size(1)] * len(pieces))


def _exchange_uneven(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, scatter: Cut, gather: Cut
) -> list[Tensor]:
    """Every rank's message is a flat piece of each tensor [..., G/P, ..., N, ...], one after the other."""
    rank, ranks = group.rank(), range(group.size())
    pieces = [t.split(sizes, scatter.dim) for t, sizes in zip(tensors, scatter.splits, strict=True)]
    # The pieces of a single tensor with a batch of one lie in order along the first dim behind the batch.
    if _lie_in_order(tensors, scatter.dim):
        # The gradient of a sum is one number expanded, and stays so when reshaped.
        sent = tensors[0].reshape(-1).contiguous()
    else:
        # Each piece is copied once, to its place in what is sent.
        in_order = [piece[to] for to in ranks for piece in pieces]
        lengths = [piece.numel() for piece in in_order]
        sent = tensors[0].new_empty(sum(lengths))
        for place, piece in zip(sent.split(lengths), in_order, strict=True):
            place.view(piece.shape).copy_(piece)
    # For each tensor and each rank: the shape of the piece that comes from there. And what a piece has beside the two
    # dims that are cut.
    shapes, others = [], []
    for tensor, scattered, gathered in zip(tensors, scatter.splits, gather.splits, strict=True):
        shape = list(tensor.shape)
        # Cut along one dim as this rank's share is, and along the other as the sender's.
        shape[scatter.dim] = scattered[rank]
        shapes.append([(*shape[: gather.dim], size, *shape[gather.dim + 1 :]) for size in gathered])
        # A list, because torch.compile (2.13) takes no generator here.
        others.append(
            math.prod([shape[dim] for dim in range(len(shape)) if dim not in (scatter.dim, gather.dim)])
        )

    def piece_size(source: int, target: int) -> int:
        """Elements that one rank has for another, those of all tensors together."""
        cuts = zip(others, gather.splits, scatter.splits, strict=True)
        return sum(other * gathered[source] * scattered[target] for other, gathered, scattered in cuts)

    received = exchange(sent, group, piece_size)  # by rank, then by tensor
    # Behind dims of size 1 the pieces are the whole tensor already, in the order in which they arrive.
    if _lie_in_order(tensors, gather.dim):
        whole = list(shapes[0][0])
        whole[gather.dim] = sum(gather.splits[0])
        return [_UNSAFE_VIEW(received, whole)]
    # Pieces lie by rank and then by tensor, so that every len(tensors)-th one belongs to the same tensor.
    parts = received.split([math.prod(of_tensor[of]) for of in ranks for of_tensor in shapes])
    return [
        torch.cat(
            [p.view(s) for p, s in zip(parts[index :: len(tensors)], shapes[index], strict=True)], gather.dim
        )
        for index in range(len(tensors))
    ]


def _lie_in_order(tensors: Sequence[Tensor], dim: int) -> bool:
    """Whether pieces of a tensor along the dim, one after the other, are the tensor itself."""
    return len(tensors) == 1 and math.prod(tensors[0].shape[:dim]) == 1
