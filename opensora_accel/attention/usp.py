"""Ulysses within a ring: heads are exchanged between close ranks, keys go round among the far ones.

Source: USP, arXiv:2405.07719. The mesh has the axes `ring` (outer) and `ulysses` (inner): the ranks of one ulysses
group hold neighbouring shares, so that together they are one rank of the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from opensora_accel.attention.balance import Layout, check_layout, layout_number
from opensora_accel.attention.checks import agreed_splits
from opensora_accel.attention.local import autocast
from opensora_accel.attention.ring import ring_attend
from opensora_accel.attention.ulysses import gather_heads, scatter_heads
from opensora_accel.communications.sizes import Sizes
from opensora_accel.parallel_states import get_parallel_group, has_parallel_group


class _Alone:
    """In place of an axis that nobody made: where a sequence group is registered without axes, it is one of them."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@dataclass(frozen=True)
class SequenceGroups:
    """The two axes of sequence parallelism that a rank is on."""

    ring: dist.ProcessGroup
    ulysses: dist.ProcessGroup

    @classmethod
    def of(cls, mesh: DeviceMesh | SequenceGroups | None) -> SequenceGroups:
        """Those of the mesh, or the registered ones."""
        if isinstance(mesh, SequenceGroups):
            return mesh
        if mesh is None and not has_parallel_group("ring") and has_parallel_group("sequence"):
            return cls(cast(dist.ProcessGroup, _Alone()), get_parallel_group("sequence"))
        if mesh is None:
            return cls(get_parallel_group("ring"), get_parallel_group("ulysses"))
        names = mesh.mesh_dim_names or ()
        if "ring" not in names or "ulysses" not in names:
            raise ValueError(
                f"the mesh needs the axes ring and ulysses, of size 1 where unused; it has {tuple(names)}; "
                'make one by init_device_mesh(device, (2, 4), mesh_dim_names=("ring", "ulysses"))'
            )
        return cls(mesh.get_group("ring"), mesh.get_group("ulysses"))

    @classmethod
    def all_ring(cls, group: dist.ProcessGroup) -> SequenceGroups:
        """The whole sequence group as a ring."""
        return cls(group, cast(dist.ProcessGroup, _Alone()))

    @property
    def inner_first(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.ulysses, self.ring) if not isinstance(group, _Alone)]

    def of_ulysses(self, splits: Sizes) -> Sizes:
        """Sizes within this rank's ulysses group, of those of all ranks."""
        degree = self.ulysses.size()
        return splits[self.ring.rank() * degree : (self.ring.rank() + 1) * degree]

    def of_ring(self, splits: Sizes) -> Sizes:
        """What each ulysses group holds together."""
        degree = self.ulysses.size()
        return tuple(sum(splits[start : start + degree]) for start in range(0, len(splits), degree))


def usp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh | SequenceGroups | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: Layout = "contiguous",
    splits: Sequence[int] | None = None,
    kv_splits: Sequence[int] | None = None,
) -> Tensor:
    """This rank's rows of the attention over the whole sequence, equal to that of one device.

    Args:
        q: [B, S_q/P, H, D], P = ring × ulysses ranks, numbered ring × degree of ulysses + ulysses.
        k, v: [B, S_kv/P, H_kv, D]; H is a multiple of H_kv.
        mesh: with the axes `ring` and `ulysses`; by default the registered one (`init_parallel`).
        mask: [B, S_kv/P], true where a key may be seen.
        causal: query i sees keys 0…i of the whole sequence; needs S_q = S_kv.
        scale: 1/√D by default.
        layout: of the ring's ranks, see `balance`; a ulysses group's share is split again, in order.
        splits, kv_splits: every rank's number of queries and of keys, where the caller knows them; otherwise
            they are exchanged.

    Returns:
        [B, S_q/P, H, D].

    Communication: that of `ulysses_attention` in its group, and of `ring_attention`, with 1/ulysses of the heads and
    ulysses times the tokens, in its own.

    Raises ValueError, before any data is sent, for shapes that are no attention.
    """
    groups = SequenceGroups.of(mesh)
    q, k, v = autocast(q, k, v)
    splits, kv_splits = agreed_splits(
        {"q": q, "k": k, "v": v, "mask": mask},
        {"causal": causal, "scale": scale, "layout": layout_number(layout)},
        groups.inner_first,
        splits,
        kv_splits,
    )
    ring_splits, ring_kv_splits = groups.of_ring(splits), groups.of_ring(kv_splits)
    check_layout(layout, *((ring_splits, ring_kv_splits) if causal else ()))
    num_heads, own = q.size(2), groups.of_ulysses(splits)
    if groups.ulysses.size() > 1:
        q, k, v, mask = scatter_heads(q, k, v, mask, groups.ulysses, own, groups.of_ulysses(kv_splits))
    out = ring_attend(q, k, v, groups.ring, mask, causal, scale, layout, ring_splits, ring_kv_splits)
    return gather_heads(out, groups.ulysses, own, num_heads) if groups.ulysses.size() > 1 else out
