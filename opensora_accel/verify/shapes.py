"""Which meshes a step is tried on: small ones, on which the error of one axis cannot be taken for another's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opensora_accel.plan import DATA_AXES, MESH_AXES, Plan

DATA_AXIS_NAMES = ("data", "dp", "ddp", "fsdp", "hsdp", "replicate", "shard", *DATA_AXES)
"""Axes whose ranks see different samples, unless the caller names others."""
SHARING_AXIS_NAMES = (
    "sequence",
    "sp",
    "cp",
    "context",
    "ring",
    "ulysses",
    "tp",
    "tensor",
    "model",
    "ep",
    "pp",
)
"""Axes whose ranks share a sample."""
PART_AXIS_NAMES = ("pp", "ep")
"""Of these, axes whose ranks may have no gradient of a parameter that is another rank's: a stage's, an expert's."""
MAX_RANKS = 4


@dataclass(frozen=True)
class MeshShape:
    """Named axes and their degrees, outermost first, with the Plan they came from where there was one."""

    degrees: tuple[tuple[str, int], ...]
    data_axes: tuple[str, ...] = DATA_AXIS_NAMES
    plan: Plan | None = None

    @classmethod
    def of(cls, mesh: Plan | Mapping[str, int], data_axes: Sequence[str] | None = None) -> MeshShape:
        """ValueError for an axis without ranks, or of a name that does not tell whether its ranks share a sample."""
        if isinstance(mesh, Plan):
            if data_axes is not None:
                raise ValueError(
                    f"a Plan has data axes of its own ({', '.join(DATA_AXES)}); leave data_axes out"
                )
            return cls(tuple(zip(MESH_AXES, mesh.degrees, strict=True)), DATA_AXES, mesh)
        for axis, degree in mesh.items():
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(
                    f"mesh axis {axis} must be a whole number of ranks, at least 1; got {degree!r}"
                )
        unknown = [axis for axis in mesh if axis not in (*DATA_AXIS_NAMES, *SHARING_AXIS_NAMES)]
        if unknown and data_axes is None:
            raise ValueError(
                f"do the ranks along {' and '.join(unknown)} see different samples, or share one? Say so: data_axes "
                f"(--data-axes) names those that see different ones; {', '.join(DATA_AXIS_NAMES[:4])} do by default"
            )
        return cls(tuple(mesh.items()), DATA_AXIS_NAMES if data_axes is None else tuple(data_axes))

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.degrees)

    @property
    def world_size(self) -> int:
        return math.prod(degree for _, degree in self.degrees)

    @property
    def data_size(self) -> int:
        """Ranks that see different samples."""
        return math.prod(degree for axis, degree in self.degrees if axis in self.data_axes)

    def degree(self, axis: str) -> int:
        return dict(self.degrees).get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's place along every axis."""
        found: dict[str, int] = {}
        for axis, degree in reversed(self.degrees):
            rank, found[axis] = divmod(rank, degree)
        return found

    def data_rank(self, rank: int) -> int:
        place, found = self.coordinates(rank), 0
        for axis, degree in self.degrees:
            if axis in self.data_axes:
                found = found * degree + place[axis]
        return found

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The ranks, parted into groups that differ along `axes` only."""
        parted: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in range(self.world_size):
            key = tuple((axis, at) for axis, at in self.coordinates(rank).items() if axis not in axes)
            parted.setdefault(key, []).append(rank)
        return list(parted.values())

    def __str__(self) -> str:
        used = [f"{axis}={degree}" for axis, degree in self.degrees if degree > 1]
        return " × ".join(used) or "one rank"


def meshes_of(plan: Plan, max_ranks: int = MAX_RANKS) -> list[Plan]:
    """Plans like `plan`, small, on which every axis that it uses is seen alone, in two sizes, and beside each other.

    A data axis is always among them: averaging over it is where most errors of sequence parallelism show.
    """
    if max_ranks < 2:
        raise ValueError(f"max_ranks must be at least 2; got {max_ranks}")
    if plan.tp > 1:
        raise ValueError(f"tp={plan.tp}: tensor parallelism cannot be verified yet; use tp=1")
    used = [axis for axis in MESH_AXES if getattr(plan, axis) > 1]
    sharded_axis = "dp_shard" if plan.sharding != "none" else "dp_replicate"
    if not any(axis in DATA_AXES for axis in used):
        used.insert(0, sharded_axis)
    one = plan.replace(**dict.fromkeys(MESH_AXES, 1))
    pairs = itertools.combinations(used, 2) if max_ranks >= 4 else ()
    found = [one.replace(**{first: 2, second: 2}) for first, second in pairs]
    for axis in used:
        alone = (2, 4) if axis in DATA_AXES else (2, 3, 4)
        smallest = 3 if len(used) > 1 and max_ranks >= 4 else 2  # two ranks of it are in the pairs
        sizes = [size for size in alone if smallest <= size <= max_ranks]
        found += [one.replace(**{axis: size}) for size in sizes]
    return found
