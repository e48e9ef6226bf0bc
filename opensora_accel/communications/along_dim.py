"""Split, gather and reduce-scatter along one dimension, paired forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.checks import check_agreement, check_dim, check_group
from opensora_accel.communications.renamed import all_gather_single, reduce_scatter_single
from opensora_accel.communications.sizes import splits_of_local, splits_of_total

GradScale = float | str | None


def _split(input_: Tensor, group: dist.ProcessGroup, dim: int, splits: tuple[int, ...]) -> Tensor:
    rank = group.rank()
    # A copy even where the share is contiguous: a view would keep the whole tensor's memory alive.
    return input_.narrow(dim, sum(splits[:rank]), splits[rank]).clone(memory_format=torch.contiguous_format)


def _gather(input_: Tensor, group: dist.ProcessGroup, dim: int, splits: tuple[int, ...]) -> Tensor:
    rows = input_.movedim(dim, 0)
    largest = max(splits)
    # gloo has no uneven all_gather: shares travel padded to the largest, at most one row each by the default rule.
    if rows.size(0) < largest:
        padding = rows.new_zeros(largest - rows.size(0), *rows.shape[1:])
        rows = torch.cat([rows, padding])
    gathered = rows.new_empty(largest * len(splits), *rows.shape[1:])
    all_gather_single(gathered, rows.contiguous(), group)
    if min(splits) == largest:
        return gathered.movedim(0, dim).contiguous()
    parts = zip(gathered.split(largest), splits, strict=True)
    return torch.cat([part[:size].movedim(0, dim) for part, size in parts], dim)


def _reduce_scatter(input_: Tensor, group: dist.ProcessGroup, dim: int, splits: tuple[int, ...]) -> Tensor:
    rows = input_.movedim(dim, 0)
    largest, size = max(splits), splits[group.rank()]
    if min(splits) < largest:
        padded = rows.new_zeros(len(splits), largest, *rows.shape[1:])
        for slot, part in zip(padded, rows.split(splits), strict=True):
            slot[: part.size(0)] = part
        rows = padded.flatten(0, 1)
    reduced = rows.new_empty(largest, *rows.shape[1:])
    reduce_scatter_single(reduced, rows.contiguous(), group)
    return reduced[:size].movedim(0, dim).contiguous()


def _scale(grad: Tensor, scale: GradScale, num_ranks: int) -> Tensor:
    if scale == "up":
        return grad * num_ranks
    if scale == "down":
        return grad / num_ranks
    return grad if scale is None or scale == 1.0 else grad * float(scale)


def _check_grad_scale(scale: GradScale) -> None:
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale not in ("up", "down", None) and not number:
        raise ValueError(f'grad_scale must be "up", "down", None or a number; got {scale!r}')


_ALONG_DIM = {"split": _split, "gather": _gather, "reduce_scatter": _reduce_scatter}


class _AlongDim(torch.autograd.Function):
    """One collective along a dimension in forward, another in backward."""

    @staticmethod
    def forward(ctx: Any, input_, group, dim, splits, forward_name, backward_name, grad_scale) -> Tensor:
        ctx.group, ctx.dim, ctx.splits = group, dim, splits
        ctx.backward_name, ctx.grad_scale = backward_name, grad_scale
        return _ALONG_DIM[forward_name](input_, group, dim, splits)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad = _scale(grad, ctx.grad_scale, ctx.group.size())
        grad = _ALONG_DIM[ctx.backward_name](grad, ctx.group, ctx.dim, ctx.splits)
        return grad, None, None, None, None, None, None


def _along_dim(
    names: tuple[str, str],
    input_: Tensor,
    process_group: dist.ProcessGroup | None,
    dim: int,
    splits: Sequence[int] | None,
    grad_scale: GradScale = None,
) -> Tensor:
    group = check_group(process_group)
    dim = check_dim("dim", dim, input_)
    _check_grad_scale(grad_scale)
    local = names[0] == "gather"
    operation = f"{names[0]}_forward_{names[1]}_backward"
    if not local:
        sizes = splits_of_total(input_.size(dim), splits, group, dim)
    check_agreement(
        operation, input_, group, dim if local else None, f"dim={dim}", f"grad_scale={grad_scale}"
    )
    if local:
        sizes = splits_of_local(input_, splits, group, dim)
    if group.size() == 1 and grad_scale in ("up", "down", None):
        return input_
    return _AlongDim.apply(input_, group, dim, sizes, *names, grad_scale)


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

    Communication: none in forward; in backward one all-gather of the share.
    """
    return _along_dim(("split", "gather"), input_, process_group, dim, splits, grad_scale)


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
        splits: every rank's size of `dim`; otherwise they are exchanged, see `cached_sizes`.

    Communication: one all-gather of the share in forward; none in backward.
    """
    return _along_dim(("gather", "split"), input_, process_group, dim, splits, grad_scale)


def gather_forward_reduce_scatter_backward(
    input_: Tensor, process_group: dist.ProcessGroup | None, dim: int, *, splits: Sequence[int] | None = None
) -> Tensor:
    """All ranks' shares joined along `dim`; the gradient is summed over ranks, and each keeps its share.

    The way into a layer whose ranks each compute a part of every output (Megatron, arXiv:2205.05198, g-bar).
    """
    return _along_dim(("gather", "reduce_scatter"), input_, process_group, dim, splits)


def reduce_scatter_forward_gather_backward(
    input_: Tensor, process_group: dist.ProcessGroup | None, dim: int, *, splits: Sequence[int] | None = None
) -> Tensor:
    """This rank's share of the sum over ranks; the gradient is gathered from all ranks.

    The way out of a row-parallel layer under sequence parallelism (Megatron, arXiv:2205.05198, g).
    """
    return _along_dim(("reduce_scatter", "gather"), input_, process_group, dim, splits)
