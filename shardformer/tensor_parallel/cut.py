"""How one dimension of a parameter is cut between the ranks, segment by segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications import gather_forward_split_backward, share_sizes


def share(size: int, num_units: int, num_ranks: int) -> tuple[int, ...]:
    """Every rank's part of `size` channels, in whole units (heads); where these do not divide, the first ranks have
    one more."""
    assert size % num_units == 0 and num_units >= num_ranks
    return tuple(units * (size // num_units) for units in share_sizes(num_units, num_ranks))


@dataclass(frozen=True)
class Cut:
    """`shares[segment][rank]` of dimension `dim`.

    A rank stores its shares of all segments side by side: of fused queries, keys and values its heads of each. So the
    ranks' tensors one after another are not the whole one, and no DTensor placement describes them.
    """

    dim: int
    shares: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Of the whole dimension."""
        return sum(map(sum, self.shares))

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of a tensor of which a rank holds this shape."""
        return tuple(self.size if dim == self.dim else size for dim, size in enumerate(shape))

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """A copy of this rank's shares: a view would keep the whole alive."""
        parts, start = [], 0
        for shares in self.shares:
            parts.append(whole.narrow(self.dim, start + sum(shares[:rank]), shares[rank]))
            start += sum(shares)
        return torch.cat(parts, self.dim)

    @torch.no_grad()
    def whole(self, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        """All ranks' shares in the model's own order. Communication: one all-gather."""
        sizes = [sum(of_rank) for of_rank in zip(*self.shares, strict=True)]
        gathered = gather_forward_split_backward(local.detach(), group, self.dim, splits=sizes)
        of_rank = [
            part.split([shares[rank] for shares in self.shares], self.dim)
            for rank, part in enumerate(gathered.split(sizes, self.dim))
        ]
        segments = range(len(self.shares))
        return torch.cat([parts[segment] for segment in segments for parts in of_rank], self.dim)
