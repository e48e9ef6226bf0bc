"""The name of a group of ranks: the mesh axes along which they differ.

On ring=2 × ulysses=2 with ranks 0 to 3, the ranks 0 and 2 are ring, 0 and 1 are ulysses, all four are sequence, and 0
and 3 are no group of the mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from opensora_accel.plan import DATA_AXES, MIXED_AXES, SEQUENCE_AXES
from opensora_accel.verify.meshes import MeshShape

SHARD_AXES = MIXED_AXES[1:]
"""Over which FSDP2 shards parameters; they are replicated over dp_replicate."""

_NAMED = {
    "data": DATA_AXES,
    "sequence": SEQUENCE_AXES,
    "mixed": MIXED_AXES,
    "shard": SHARD_AXES,
}


@dataclass(frozen=True)
class Group:
    """What a tuple of global ranks is on a mesh."""

    axes: tuple[str, ...] | None
    """Of more than one rank, outermost first; None where the ranks are no group of the mesh."""
    name: str

    def __str__(self) -> str:
        return self.name


@lru_cache(maxsize=4096)
def group_of(ranks: tuple[int, ...], shape: MeshShape) -> Group:
    """`data (dp_replicate × dp_shard)`, `ring`, or the ranks themselves where the mesh has no such group."""
    if not ranks:
        return Group(None, "an unknown group")
    if len(ranks) == 1:
        return Group((), "one rank")
    places = [shape.coordinates(rank) for rank in ranks]
    axes = tuple(axis for axis in shape.axes if len({place[axis] for place in places}) > 1)
    if math.prod(shape.degree(axis) for axis in axes) != len(ranks):
        shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
        return Group(None, f"ranks {shown} (differ along {' and '.join(axes)}, but are not all of them)")
    return Group(axes, name_of(axes, shape))


def axes_between(one: int, other: int, shape: MeshShape) -> tuple[str, ...]:
    """Along which a message travels."""
    places = shape.coordinates(one), shape.coordinates(other)
    return tuple(axis for axis in shape.axes if places[0][axis] != places[1][axis])


def name_of(axes: tuple[str, ...], shape: MeshShape) -> str:
    if len(axes) == 1:
        return axes[0]
    listed = " × ".join(axes)
    for name, members in _NAMED.items():
        if axes == used(members, shape):
            return f"{name} ({listed})"
    return f"world ({listed})" if axes == used(shape.axes, shape) else listed


def used(axes: tuple[str, ...], shape: MeshShape) -> tuple[str, ...]:
    """Those with more than one rank."""
    return tuple(axis for axis in axes if shape.degree(axis) > 1)


def promised_groups(shape: MeshShape) -> set[tuple[str, ...]]:
    """The axes of every group that a Plan has: each axis alone, data, sequence, shard, mixed, tensor and world."""
    members = [*_NAMED.values(), shape.axes, *((axis,) for axis in shape.axes)]
    return {used(axes, shape) for axes in members}
