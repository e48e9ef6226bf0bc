"""The Megatron pair that copies one way and sums the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.checks import check_agreement, check_group
from opensora_accel.communications.waiting import waiting


def _reduce(input_: Tensor, group: dist.ProcessGroup) -> Tensor:
    reduced = input_.clone(memory_format=torch.contiguous_format)
    with waiting("all_reduce", group):
        dist.all_reduce(reduced, group=group)
    return reduced


class _CopyReduce(torch.autograd.Function):
    """Identity one way, all-reduce (sum) the other."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: dist.ProcessGroup, reduce_forward: bool) -> Tensor:
        ctx.group, ctx.reduce_backward = group, not reduce_forward
        return _reduce(input_, group) if reduce_forward else input_.view_as(input_)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_reduce(grad, ctx.group) if ctx.reduce_backward else grad), None, None


def copy_forward_reduce_backward(input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """The input; its gradient is summed over ranks (Megatron, arXiv:1909.08053, f: into a column-parallel layer)."""
    group = check_group(process_group)
    check_agreement("copy_forward_reduce_backward", input_, group, None)
    return _CopyReduce.apply(input_, group, False)


def reduce_forward_copy_backward(input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """The sum over ranks; its gradient is passed on (Megatron, arXiv:1909.08053, g: out of a row-parallel layer)."""
    group = check_group(process_group)
    check_agreement("reduce_forward_copy_backward", input_, group, None)
    return _CopyReduce.apply(input_, group, True)
