"""Split, gather and reduce along one dimension: pairs of which one is the other's gradient.

A sequence of S = 7 tokens on P = 3 ranks. `split_forward_gather_backward` leaves the shares (3, 2, 2); the model runs
on them; `gather_forward_split_backward` joins the outputs to all 7 on every rank, where the loss is computed.

Why a factor. Each of the 3 ranks computes the same loss from the same whole output, and gradients are averaged over
the ranks in the end. In backward of the gather, a rank keeps its own 2 or 3 rows of the loss's gradient and drops the
others. A weight's gradient on a rank then comes from that rank's rows alone: the average over ranks is a third of the
sum that a single device has. The gather therefore takes "up" and multiplies by exactly P, also where shares differ:
the rows' gradients are parts of one sum, and every part needs the same factor. Before the split, the weights see all
7 rows on every rank, and their gradient, gathered from all ranks, now is P times too large: the split takes "down".

Shares that differ in size travel padded to the largest one, because gloo has no all-gather of uneven sizes. By the
rule of `torch.tensor_split` that is at most one row a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.checks import check_agreement, check_dim, check_group
from opensora_accel.communications.sizes import Sizes, splits_of_locals, splits_of_total
from opensora_accel.communications.transport import all_gather, all_reduce_, reduce_scatter

GradScale = float | str | None


def split_forward_gather_backward(
    input_: Tensor,
    process_group: dist.ProcessGroup | None,
    dim: int,
    grad_scale: GradScale = 1.0,
    *,
    splits: Sequence[int] | None = None,
) -> Tensor:
    """This rank's share of `dim`; the gradient is gathered from all ranks.

    Args:
        input_: [..., N at dim, ...], equal on every rank.
        grad_scale: multiplies the gradient: "up" by exactly P, "down" by exactly 1/P (also when shares are
            uneven), None or 1.0 by nothing, or a number. Entering a sequence-parallel region takes "down".
        splits: every rank's share; by default those of `torch.tensor_split`.

    Returns:
        [..., N/P at dim, ...].

    Raises:
        ValueError: the dim is out of range, the splits do not add up, or grad_scale is none of these.

    Communication: none in forward; in backward one all-gather of the share.
    """
    return _along_dim("split", "gather", input_, process_group, dim, splits, grad_scale)


def gather_forward_split_backward(
    input_: Tensor,
    process_group: dist.ProcessGroup | None,
    dim: int,
    grad_scale: GradScale = None,
    *,
    splits: Sequence[int] | None = None,
) -> Tensor:
    """All ranks' shares joined along `dim`; the gradient is this rank's share of it.

    Args:
        input_: [..., N/P at dim, ...].
        grad_scale: as in `split_forward_gather_backward`. Leaving a sequence-parallel region takes "up".
        splits: every rank's size of `dim`; otherwise they are exchanged.

    Returns:
        [..., N at dim, ...].

    Raises:
        ValueError: the dim is out of range, the splits do not fit, or grad_scale is none of these.

    Communication: one all-gather of the share in forward; none in backward.
    """
    return _along_dim("gather", "split", input_, process_group, dim, splits, grad_scale)


def gather_forward_reduce_scatter_backward(
    input_: Tensor, process_group: dist.ProcessGroup | None, dim: int, *, splits: Sequence[int] | None = None
) -> Tensor:
    """All ranks' shares joined along `dim`; the gradient is summed over ranks, and each keeps its share.

    The way into a layer whose ranks each compute a part of every output (Megatron, arXiv:2205.05198, g-bar).
    [..., N/P at dim, ...] → [..., N at dim, ...]. One all-gather in forward, one reduce-scatter in backward.

    Raises:
        ValueError: the dim is out of range, or the splits do not fit.
    """
    return _along_dim("gather", "reduce_scatter", input_, process_group, dim, splits)


def reduce_scatter_forward_gather_backward(
    input_: Tensor, process_group: dist.ProcessGroup | None, dim: int, *, splits: Sequence[int] | None = None
) -> Tensor:
    """This rank's share of the sum over ranks; the gradient is gathered from all ranks.

    The way out of a row-parallel layer under sequence parallelism (Megatron, arXiv:2205.05198, g).
    [..., N at dim, ...] → [..., N/P at dim, ...]. One reduce-scatter in forward, one all-gather in backward.

    Raises:
        ValueError: the dim is out of range, or the splits do not add up.
    """
    return _along_dim("reduce_scatter", "gather", input_, process_group, dim, splits)


def copy_forward_reduce_backward(input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """The input; its gradient is summed over ranks.

    A tensor of any shape, equal on all ranks. One all-reduce in backward. The way into a column-parallel layer
    (Megatron, arXiv:1909.08053, f).
    """
    group = check_group(process_group)
    check_agreement("copy_forward_reduce_backward", input_, group)
    return _CopyReduce.apply(input_, group, False)


def reduce_forward_copy_backward(input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """The sum over ranks of the input; its gradient is passed on.

    A tensor of any shape. One all-reduce in forward. The way out of a row-parallel layer (Megatron,
    arXiv:1909.08053, g).
    """
    group = check_group(process_group)
    check_agreement("reduce_forward_copy_backward", input_, group)
    return _CopyReduce.apply(input_, group, True)


def _along_dim(
    forward_name: str,
    backward_name: str,
    input_: Tensor,
    process_group: dist.ProcessGroup | None,
    dim: int,
    splits: Sequence[int] | None,
    grad_scale: GradScale = None,
) -> Tensor:
    """input_: [..., N or N/P at dim, ...], as the operation of forward takes it."""
    group = check_group(process_group)
    dim = check_dim("dim", dim, input_)
    is_number = isinstance(grad_scale, (int, float)) and not isinstance(grad_scale, bool)
    if grad_scale not in ("up", "down", None) and not is_number:
        raise ValueError(f'grad_scale must be "up", "down", None or a number; got {grad_scale!r}')
    operation = f"{forward_name}_forward_{backward_name}_backward"
    # What a gather needs to know lies with the others: agreement is checked before sizes are exchanged. Sizes
    # of a split follow from what each rank holds, and a wrong one is found without asking.
    if forward_name == "gather":
        check_agreement(operation, input_, group, dim, dim=dim, grad_scale=grad_scale)
        (sizes,) = splits_of_locals([input_], [splits], group, dim)
    else:
        sizes = splits_of_total(input_.size(dim), splits, group, dim)
        check_agreement(operation, input_, group, None, dim=dim, grad_scale=grad_scale)
    # A factor that was given as a number counts on one rank too; "up" and "down" are 1 there.
    if group.size() == 1 and not is_number:
        return input_
    return _AlongDim.apply(input_, group, dim, sizes, forward_name, backward_name, grad_scale)


class _AlongDim(torch.autograd.Function):
    """One operation along a dimension in forward, another in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: dist.ProcessGroup,
        dim: int,
        sizes: Sizes,
        forward_name: str,
        backward_name: str,
        grad_scale: GradScale,
    ) -> Tensor:
        """input_: [..., N or N/P at dim, ...], as the operation takes it."""
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        # No tensor is saved: what backward does depends on sizes alone.
        ctx.backward_name, ctx.grad_scale = backward_name, grad_scale
        return _ALONG_DIM[forward_name](input_, group, dim, sizes)

    @staticmethod
    # What backward sends is not recorded, so a second derivative would be wrong without a word.
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """grad: [..., N/P or N at dim, ...], as forward left it."""
        # The operation below is linear: the factor may stand before it.
        if ctx.grad_scale == "up":
            grad = grad * ctx.group.size()
        elif ctx.grad_scale == "down":
            grad = grad / ctx.group.size()
        elif ctx.grad_scale is not None and ctx.grad_scale != 1:
            grad = grad * float(ctx.grad_scale)
        grad = _ALONG_DIM[ctx.backward_name](grad, ctx.group, ctx.dim, ctx.sizes)
        return grad, None, None, None, None, None, None


def _split(input_: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> Tensor:
    """[..., N at dim, ...] → [..., N/P at dim, ...]."""
    rank = group.rank()
    # A copy even where the share is contiguous: a view would keep the whole tensor's memory alive.
    return input_.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)


def _gather(input_: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> Tensor:
    """[..., N/P at dim, ...] → [..., N at dim, ...]."""
    # Rows of `dim` outermost: shares of several ranks are then one run of memory each.
    rows = input_.movedim(dim, 0)
    largest = max(sizes)
    # No backend gathers uneven sizes alike: shares travel padded to the largest.
    if rows.size(0) < largest:
        rows = torch.cat([rows, rows.new_zeros(largest - rows.size(0), *rows.shape[1:])])
    gathered = rows.new_empty(largest * len(sizes), *rows.shape[1:])
    all_gather(gathered, rows.contiguous(), group)
    # Without padding the buffer is the whole, but for the order of its dims.
    if min(sizes) == largest:
        return gathered.movedim(0, dim).contiguous()
    parts = zip(gathered.split(largest), sizes, strict=True)  # without the padding
    return torch.cat([part[:size].movedim(0, dim) for part, size in parts], dim)


def _reduce_scatter(input_: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> Tensor:
    """[..., N at dim, ...] → this rank's [..., N/P at dim, ...] of the sum over ranks."""
    rows = input_.movedim(dim, 0)
    largest = max(sizes)
    if min(sizes) < largest:
        # Every rank's part of the sum travels padded to the largest share.
        padded = rows.new_zeros(len(sizes), largest, *rows.shape[1:])  # [P, largest, ...]
        for slot, part in zip(padded, rows.split(sizes), strict=True):
            slot[: part.size(0)] = part
        rows = padded.flatten(0, 1)
    reduced = rows.new_empty(largest, *rows.shape[1:])
    reduce_scatter(reduced, rows.contiguous(), group)
    # Rows behind this rank's share were padding.
    return reduced[: sizes[group.rank()]].movedim(0, dim).contiguous()


_ALONG_DIM: dict[str, Callable[[Tensor, dist.ProcessGroup, int, Sizes], Tensor]] = {
    "split": _split,
    "gather": _gather,
    "reduce_scatter": _reduce_scatter,
}


class _CopyReduce(torch.autograd.Function):
    """Identity one way, all-reduce (sum) the other."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: dist.ProcessGroup, reduce_forward: bool) -> Tensor:
        """input_: of any shape."""
        ctx.group, ctx.reduce_backward = group, not reduce_forward
        # A view where nothing is reduced, because autograd needs an output that is not the input itself.
        return _reduce(input_, group) if reduce_forward else input_.view_as(input_)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """grad: as the output."""
        return (_reduce(grad, ctx.group) if ctx.reduce_backward else grad), None, None


def _reduce(input_: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a tensor over ranks, in memory of its own."""
    reduced = input_.clone(memory_format=torch.contiguous_format)  # the collective works in place
    all_reduce_(reduced, group)
    return reduced
