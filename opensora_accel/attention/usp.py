"""Ulysses within a ring: heads are exchanged between close ranks, keys go round among the far ones.

A mesh of 2 × 2 ranks has the axes `ring` (outer) and `ulysses` (inner). Of 8 tokens each rank holds two:

    ring 0:  rank 0 has tokens 0 1,  rank 1 has tokens 2 3     (one ulysses group, on one node)
    ring 1:  rank 2 has tokens 4 5,  rank 3 has tokens 6 7     (another one)

The all-to-all inside a ulysses group leaves ranks 0 and 1 with tokens 0…3 and half of the heads each. Rank 0 then
forms a ring with rank 2, which has the same heads of tokens 4…7; rank 1 with rank 3. Neighbouring shares are in one
ulysses group, so that together they are one rank of the ring.

Source: USP, arXiv:2405.07719.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from opensora_accel.attention.balance import TokenLayout, check_layout
from opensora_accel.attention.call import AttentionCall, autocast, enter_call
from opensora_accel.attention.ring import ring_attend
from opensora_accel.attention.slices import AttentionSlices, Deal
from opensora_accel.attention.ulysses import gather_heads, scatter_heads
from opensora_accel.communications import Sizes
from opensora_accel.parallel_states import get_parallel_group, has_parallel_group


@dataclass(frozen=True)
class SequenceGroups:
    """The two axes of sequence parallelism that a rank is on. None is an axis of one rank that nobody made."""

    ring: dist.ProcessGroup | None
    ulysses: dist.ProcessGroup | None

    @classmethod
    def of(cls, mesh: DeviceMesh | SequenceGroups | None) -> SequenceGroups:
        """The groups of a mesh, or the registered ones.

        Raises:
            ValueError: the mesh has no axes ring and ulysses.
        """
        if isinstance(mesh, SequenceGroups):
            return mesh
        # A sequence group that was registered alone counts as one axis: Ulysses, the faster one where heads suffice.
        if mesh is None and not has_parallel_group("ring") and has_parallel_group("sequence"):
            return cls(None, get_parallel_group("sequence"))
        if mesh is None:
            return cls(get_parallel_group("ring"), get_parallel_group("ulysses"))
        names = mesh.mesh_dim_names or ()
        if "ring" not in names or "ulysses" not in names:
            raise ValueError(
                f"the mesh needs the axes ring and ulysses, of size 1 where unused; it has {tuple(names)}; "
                'make one by init_device_mesh(device, (2, 4), mesh_dim_names=("ring", "ulysses"))'
            )
        return cls(mesh.get_group("ring"), mesh.get_group("ulysses"))

    @property
    def inner_first(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.ulysses, self.ring) if group is not None]

    @property
    def ring_size(self) -> int:
        return 1 if self.ring is None else self.ring.size()

    @property
    def ring_rank(self) -> int:
        return 0 if self.ring is None else self.ring.rank()

    @property
    def ulysses_size(self) -> int:
        return 1 if self.ulysses is None else self.ulysses.size()

    def of_ulysses(self, splits: Sizes) -> Sizes:
        """The part of all ranks' sizes that is of this rank's ulysses group: (2, 2, 2, 2) → (2, 2)."""
        return splits[self.ring_rank * self.ulysses_size : (self.ring_rank + 1) * self.ulysses_size]

    def of_ring(self, splits: Sizes) -> Sizes:
        """What each ulysses group holds together: (2, 2, 2, 2) → (4, 4)."""
        return tuple(
            sum(splits[start : start + self.ulysses_size])
            for start in range(0, len(splits), self.ulysses_size)
        )


def usp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh | SequenceGroups | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: TokenLayout = "contiguous",
    splits: Sequence[int] | None = None,
    kv_splits: Sequence[int] | None = None,
    slices: AttentionSlices | Deal | None = None,
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
        slices: which queries see which keys of the whole sequence; with a key mask beside it, both count. Where tokens
            are dealt out, what says so: `deal(mask, P, ulysses=…)`.

    Returns:
        [B, S_q/P, H, D].

    Raises:
        ValueError: the mesh has not these axes, or the shapes are no attention: on every rank and before any data is
            sent, unless the sizes are given.

    Communication: that of `ulysses_attention` in its group, and of `ring_attention`, with 1/ulysses of the heads and
    ulysses times the tokens, in its own.
    """
    groups = SequenceGroups.of(mesh)
    q, k, v = autocast(q, k, v)
    call = enter_call(
        q, k, v, mask, groups.inner_first,
        splits=splits, kv_splits=kv_splits, causal=causal, scale=scale, slices=slices, layout=layout,
    )  # fmt: skip
    ring_call = on_ring(call, groups)
    if causal:
        check_layout(layout, ring_call.splits, ring_call.kv_splits)
    num_heads, own = q.size(2), groups.of_ulysses(call.splits)
    if groups.ulysses is None or groups.ulysses.size() == 1:
        return ring_attend(q, k, v, mask, groups.ring, ring_call)
    # [B, S_q/P, H, D] → [B, S_q/ring, H/ulysses, D]: all tokens of a ulysses group, which is one rank of the ring.
    q, k, v, mask = scatter_heads(q, k, v, mask, groups.ulysses, own, groups.of_ulysses(call.kv_splits))
    out = ring_attend(q, k, v, mask, groups.ring, ring_call)
    return gather_heads(out, groups.ulysses, own, num_heads)


def on_ring(call: AttentionCall, groups: SequenceGroups) -> AttentionCall:
    """The same call between the ulysses groups, each of which is one rank of the ring."""
    return replace(
        call,
        splits=groups.of_ring(call.splits),
        kv_splits=groups.of_ring(call.kv_splits),
        slices=None if call.slices is None else call.slices.merged(groups.ulysses_size),
    )
