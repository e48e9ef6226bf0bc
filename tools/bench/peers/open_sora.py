"""Collectives in the plain way: Open-Sora's `all_to_all` (cut, list `all_to_all`, concatenate), and others like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Plain(torch.autograd.Function):
    """A function of tensors as a differentiable one, whose backward is another function of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
    ) -> Tensor:
        """input_ [...] → whatever `forward` makes of it."""
        ctx.backward_function = backward
        return forward(input_)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.backward_function(grads[0]), None, None


def plain_all_to_all(
    input_: Tensor,
    scatter_dim: int,
    gather_dim: int,
    gather_sizes: Sequence[int],
    scatter_sizes: Sequence[int],
) -> Tensor:
    """[…, G/P, …, N, …] → […, G, …, N/P, …]: `opensora.acceleration.communications.all_to_all`, given the right
    sizes where they do not divide."""

    def exchange(tensor: Tensor, scatter_dim: int, gather_dim: int, gather_sizes: Sequence[int]) -> Tensor:
        """[..., G/P, ..., N, ...] → [..., G, ..., N/P, ...]."""
        rank = dist.get_rank()
        pieces = [piece.contiguous() for piece in torch.tensor_split(tensor, len(gather_sizes), scatter_dim)]
        received = []
        for size in gather_sizes:
            shape = [*pieces[rank].shape]
            shape[gather_dim] = size
            received.append(tensor.new_empty(shape))
        if len({piece.shape for piece in (*pieces, *received)}) == 1:
            dist.all_to_all(received, pieces)
        else:  # gloo's list all_to_all takes equal pieces only, and raises otherwise (torch 2.13)
            received[rank].copy_(pieces[rank])
            others = [other for other in range(len(pieces)) if other != rank]
            operations = [dist.P2POp(dist.isend, pieces[other], other) for other in others]
            operations += [dist.P2POp(dist.irecv, received[other], other) for other in others]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return torch.cat(received, gather_dim).contiguous()

    return Plain.apply(
        input_,
        lambda tensor: exchange(tensor, scatter_dim, gather_dim, gather_sizes),
        lambda tensor: exchange(tensor, gather_dim, scatter_dim, scatter_sizes),
    )


def plain_gather(input_: Tensor, sizes: Sequence[int]) -> Tensor:
    """[B, S/P, C] → [B, S, C]; backward splits the gradient."""
    return Plain.apply(input_, lambda t: _gather(t, sizes), lambda t: _split(t, sizes))


def plain_split(input_: Tensor, sizes: Sequence[int]) -> Tensor:
    """[B, S, C] → [B, S/P, C]; backward gathers the gradient."""
    return Plain.apply(input_, lambda t: _split(t, sizes), lambda t: _gather(t, sizes))


def _gather(input_: Tensor, sizes: Sequence[int]) -> Tensor:
    """A list `all_gather` and a concatenation; padded where the sizes differ, which gloo does not take."""
    padding = input_.new_zeros(input_.size(0), max(sizes) - input_.size(1), input_.size(2))
    padded = torch.cat([input_, padding], 1) if len(set(sizes)) > 1 else input_.contiguous()
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return torch.cat([part[:, :size] for part, size in zip(received, sizes, strict=True)], 1)


def _split(input_: Tensor, sizes: Sequence[int]) -> Tensor:
    return input_.split(list(sizes), 1)[dist.get_rank()].contiguous()


def plain_ring(input_: Tensor, sizes: Sequence[int]) -> Tensor:
    """[B, S/P, C] of this rank → that of the rank before."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    received = input_.new_empty((input_.size(0), sizes[rank - 1], *input_.shape[2:]))
    # One batch: posted one after the other, two NCCL ranks would wait for each other.
    sent = dist.P2POp(dist.isend, input_.contiguous(), (rank + 1) % num_ranks)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, received, (rank - 1) % num_ranks)]):
        work.wait()
    return received
