"""All-to-all as torch.compile sees it: functional collectives between plain tensor operations.

The compiler fuses the copies around the collective, and differentiates what is here by itself. It runs in eager mode
too, where `alltoall` copies less.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from opensora_accel.communications.sizes import Sizes, share_sizes


def all_to_all_traced(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    scatter_dim: int,
    gather_dim: int,
    splits: Sequence[Sequence[int] | None],
    scatter_splits: Sequence[Sequence[int] | None],
) -> tuple[Tensor, ...]:
    """`all_to_all_packed`, where every rank's sizes of `gather_dim` are known: they cannot be asked for here."""
    if any(sizes is None for sizes in splits):
        raise ValueError(
            "within torch.compile the ranks cannot exchange their sizes; pass splits= (and kv_splits=), every rank's "
            "number of tokens: opensora_accel.communications.share_sizes(total, num_ranks) for tensor_split's shares"
        )
    rank, num_ranks = group.rank(), group.size()
    gathered: list[Sizes] = [tuple(sizes) for sizes in splits if sizes is not None]
    scattered = [
        share_sizes(tensor.size(scatter_dim), num_ranks) if sizes is None else tuple(sizes)
        for tensor, sizes in zip(tensors, scatter_splits, strict=True)
    ]
    pieces = [t.split(sizes, scatter_dim) for t, sizes in zip(tensors, scattered, strict=True)]
    sent = torch.cat([piece[to].reshape(-1) for to in range(num_ranks) for piece in pieces])
    send_sizes = [sum(piece[to].numel() for piece in pieces) for to in range(num_ranks)]
    shapes = [
        [_shape(t, scatter_dim, s[rank], gather_dim, g[of]) for of in range(num_ranks)]
        for t, s, g in zip(tensors, scattered, gathered, strict=True)
    ]
    lengths = [[torch.Size(shape).numel() for shape in each] for each in shapes]
    receive_sizes = [sum(length[of] for length in lengths) for of in range(num_ranks)]
    received = all_to_all_single_autograd(sent, receive_sizes, send_sizes, group)
    parts = received.split([length[of] for of in range(num_ranks) for length in lengths])
    return tuple(
        torch.cat(
            [
                part.view(shape)
                for part, shape in zip(parts[index :: len(tensors)], shapes[index], strict=True)
            ],
            gather_dim,
        )
        for index in range(len(tensors))
    )


def _shape(
    tensor: Tensor, scatter_dim: int, num_scattered: int, gather_dim: int, num_gathered: int
) -> list[int]:
    shape = list(tensor.shape)
    shape[scatter_dim], shape[gather_dim] = num_scattered, num_gathered
    return shape
