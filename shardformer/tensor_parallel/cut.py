"""How one dimension of a parameter is cut between the ranks, segment by segment.

A fused projection has rows for queries, keys and values, two heads each, on P = 2 ranks. Each rank holds its head of
all three segments, side by side, so that the layer's own code still finds three equal parts:

    whole     q0 q1 k0 k1 v0 v1
    rank 0    q0 k0 v0
    rank 1    q1 k1 v1

Here `shares` is ((1, 1), (1, 1), (1, 1)) in heads. The ranks' tensors one after another are not the whole one, and no
DTensor placement describes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications import gather_forward_split_backward, share_sizes


def share(size: int, num_units: int, num_ranks: int) -> tuple[int, ...]:
    """Every rank's part of `size` channels, in whole units (heads). The first ranks have one more where they must."""
    assert size % num_units == 0 and num_units >= num_ranks
    return tuple(units * (size // num_units) for units in share_sizes(num_units, num_ranks))


@dataclass(frozen=True)
class Cut:
    """The shares of dimension `dim`."""

    dim: int
    # `shares[segment][rank]`, in channels.
    shares: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """The size of the whole dimension."""
        return sum(map(sum, self.shares))

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, from the shape that a rank holds."""
        return tuple(self.size if dim == self.dim else size for dim, size in enumerate(shape))

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """This rank's shares: [..., N at dim, ...] → [..., N/P at dim, ...]."""
        parts, start = [], 0
        for shares in self.shares:
            parts.append(whole.narrow(self.dim, start + sum(shares[:rank]), shares[rank]))
            start += sum(shares)
        return torch.cat(parts, self.dim)  # a copy: a view would keep the whole alive

    @torch.no_grad()
    def whole(self, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        """All ranks' shares in the model's own order: [..., N/P at dim, ...] → [..., N at dim, ...]. One all-gather."""
        # [P]: how much of the dim each rank holds, all of its segments together.
        sizes = [sum(of_rank) for of_rank in zip(*self.shares, strict=True)]
        gathered = gather_forward_split_backward(local.detach(), group, self.dim, splits=sizes)
        # By rank, then by segment; the whole tensor is by segment, then by rank.
        of_rank = [
            part.split([shares[rank] for shares in self.shares], self.dim)
            for rank, part in enumerate(gathered.split(sizes, self.dim))
        ]
        segments = range(len(self.shares))
        return torch.cat([parts[segment] for segment in segments for parts in of_rank], self.dim)
