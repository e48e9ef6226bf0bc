"""The small meshes that a step is tried on, and what the step knows of its place on them.

One axis must not be taken for another. On data=2 × ulysses=2 alone, a factor of 1/2 may be either axis's. Beside it
stand ulysses=3 and data=3: a factor of 1/2, 1/3 and 1 on these three is ulysses to the power −1 and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from opensora_accel.plan import DATA_AXES, MESH_AXES, MIXED_AXES, SEQUENCE_AXES, Plan

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

MAX_RANKS = 8
# Axes whose ranks see different samples, unless the caller names others.
DATA_AXIS_NAMES = ("data", "dp", "ddp", "fsdp", "hsdp", "replicate", "shard", *DATA_AXES)
# Axes whose ranks may have no gradient of a parameter that is another rank's: a stage's, an expert's.
PART_AXIS_NAMES = ("pp", "ep")
# Axes whose ranks share a sample.
_SEQUENCE_AXIS_NAMES = ("sequence", "sp", "cp", "context", *SEQUENCE_AXES)
_SHARING_AXIS_NAMES = (*_SEQUENCE_AXIS_NAMES, "tp", "tensor", "model", *PART_AXIS_NAMES)
# Over these FSDP2 shards parameters; they are replicated over dp_replicate.
SHARD_AXES = MIXED_AXES[1:]
_NAMED = {"data": DATA_AXES, "sequence": SEQUENCE_AXES, "mixed": MIXED_AXES, "shard": SHARD_AXES}

# `step(model, run)`, or `step(run)` where it builds its model itself.
Step = Callable[..., Any]
ModelFn = Callable[[], "nn.Module"]


@dataclass(frozen=True)
class MeshShape:
    """Named axes and their degrees, outermost first, with the Plan they came from where there was one."""

    degrees: tuple[tuple[str, int], ...]
    data_axes: tuple[str, ...] = DATA_AXIS_NAMES
    plan: Plan | None = None

    @classmethod
    def of(cls, mesh: Plan | Mapping[str, int], data_axes: Sequence[str] | None = None) -> MeshShape:
        """From a Plan, or from degrees by axis name.

        Raises:
            ValueError: an axis without ranks, or of a name that does not say whether its ranks share a sample.
        """
        if isinstance(mesh, Plan):
            if data_axes is not None:
                raise ValueError(
                    f"a Plan has data axes of its own ({', '.join(DATA_AXES)}); leave data_axes out"
                )
            return cls(tuple(zip(MESH_AXES, mesh.degrees, strict=True)), DATA_AXES, mesh)
        # True is an int to Python, and no degree.
        for axis, degree in mesh.items():
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(
                    f"mesh axis {axis} must be a whole number of ranks, at least 1; got {degree!r}"
                )
        # To guess would be worse than to ask: a missing average over an axis that shares samples is none.
        unknown = [axis for axis in mesh if axis not in (*DATA_AXIS_NAMES, *_SHARING_AXIS_NAMES)]
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
        """How many ranks see different samples."""
        return math.prod(degree for axis, degree in self.degrees if axis in self.data_axes)

    @property
    def alone(self) -> MeshShape:
        """The same axes with one rank each, and a Plan that does nothing."""
        plan = None if self.plan is None else Plan(precision=self.plan.precision)
        return replace(self, degrees=tuple((axis, 1) for axis in self.axes or MESH_AXES), plan=plan)

    def degree(self, axis: str) -> int:
        return dict(self.degrees).get(axis, 1)

    def uses(self, axis: str) -> bool:
        """Whether the axis has more than one rank."""
        return self.degree(axis) > 1

    def used(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of `axes` that have more than one rank."""
        return tuple(axis for axis in axes if self.uses(axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's place along every axis."""
        # The innermost axis counts fastest: on ring=2 × ulysses=3 rank 4 is ring 1, ulysses 1.
        indices: dict[str, int] = {}
        for axis, degree in reversed(self.degrees):
            rank, indices[axis] = divmod(rank, degree)
        return indices

    def data_rank(self, rank: int) -> int:
        """The rank's place along all data axes, the outermost counting most."""
        place, index = self.coordinates(rank), 0
        for axis, degree in self.degrees:
            if axis in self.data_axes:
                index = index * degree + place[axis]
        return index

    def ranks_of(self, data_rank: int) -> list[int]:
        """The ranks that share the samples of a data rank."""
        return [rank for rank in range(self.world_size) if self.data_rank(rank) == data_rank]

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """All ranks, in groups that differ along `axes` only."""
        lines: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in range(self.world_size):
            # Ranks of a group have the same place along every other axis.
            key = tuple((axis, at) for axis, at in self.coordinates(rank).items() if axis not in axes)
            lines.setdefault(key, []).append(rank)
        return list(lines.values())

    def __str__(self) -> str:
        return " × ".join(f"{axis}={self.degree(axis)}" for axis in self.used(self.axes)) or "one rank"


@dataclass(frozen=True)
class Group:
    """What a tuple of global ranks is on a mesh."""

    axes: (
        tuple[str, ...] | None
    )  # along which the ranks differ, outermost first; None for no group of the mesh
    name: str

    def __str__(self) -> str:
        return self.name


@lru_cache(maxsize=4096)
def group_of(ranks: tuple[int, ...], shape: MeshShape) -> Group:
    """`data (dp_replicate × dp_shard)`, `ring`, or the ranks themselves where the mesh has no such group.

    On ring=2 × ulysses=2 with ranks 0 to 3, the ranks 0 and 2 are ring, 0 and 1 are ulysses, all four are sequence,
    and 0 and 3 are no group of the mesh.
    """
    if not ranks:
        return Group(None, "an unknown group")
    if len(ranks) == 1:
        return Group((), "one rank")
    places = [shape.coordinates(rank) for rank in ranks]
    axes = tuple(axis for axis in shape.axes if len({place[axis] for place in places}) > 1)
    # Ranks are distinct: as many as there are places along these axes, is all of them.
    if math.prod(shape.degree(axis) for axis in axes) != len(ranks):
        shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
        return Group(None, f"ranks {shown} (differ along {' and '.join(axes)}, but are not all of them)")
    return Group(axes, name_of(axes, shape))


def axes_between(one: int, other: int, shape: MeshShape) -> tuple[str, ...]:
    """The axes along which a message travels between two ranks."""
    places = shape.coordinates(one), shape.coordinates(other)
    return tuple(axis for axis in shape.axes if places[0][axis] != places[1][axis])


def name_of(axes: tuple[str, ...], shape: MeshShape) -> str:
    """`ring`, `sequence (ring × ulysses)`, or the axes themselves where the Plan has no word for them."""
    if len(axes) == 1:
        return axes[0]
    listed = " × ".join(axes)
    # What the Plan calls sequence is ring alone where ulysses has one rank: only used axes count.
    for name, members in _NAMED.items():
        if axes == shape.used(members):
            return f"{name} ({listed})"
    return f"world ({listed})" if axes == shape.used(shape.axes) else listed


def promised_groups(shape: MeshShape) -> set[tuple[str, ...]]:
    """The axes of every group that a Plan has: each axis alone, data, sequence, shard, mixed, tensor and world."""
    members = [*_NAMED.values(), shape.axes, *((axis,) for axis in shape.axes)]
    return {shape.used(axes) for axes in members}


def subsets(axes: Sequence[str], least: int = 0) -> Iterator[tuple[str, ...]]:
    """Every choice of `least` axes or more, the smaller choices first."""
    for count in range(least, len(axes) + 1):
        yield from itertools.combinations(axes, count)


def compose_axes(axes: Sequence[str], used: Sequence[str]) -> tuple[str, ...]:
    """The Plan's own words for several axes: ring and ulysses are sequence, where the meshes have used both."""
    left = list(axes)
    words: list[str] = []
    for word, members in (("data", DATA_AXES), ("sequence", SEQUENCE_AXES)):
        present = [axis for axis in used if axis in members]
        if len(present) > 1 and all(axis in left for axis in present):
            words.append(word)
            left = [axis for axis in left if axis not in members]
    return (*left, *words)


def meshes_of(plan: Plan, max_ranks: int = MAX_RANKS) -> list[Plan]:
    """Plans like `plan`, small: every axis that it uses alone, in two sizes, every pair of axes, and all at once.

    A data axis is always among them: averaging over it is where most errors of sequence parallelism show.

    Raises:
        ValueError: fewer than two ranks, or a plan with tensor parallelism.
    """
    if max_ranks < 2:
        raise ValueError(f"max_ranks must be at least 2; got {max_ranks}")
    if plan.tp > 1:
        raise ValueError(f"tp={plan.tp}: tensor parallelism cannot be verified yet; use tp=1")
    used = [axis for axis in MESH_AXES if getattr(plan, axis) > 1]
    # The data axis is the one over which this plan would really average.
    if not any(axis in DATA_AXES for axis in used):
        used.insert(0, "dp_shard" if plan.is_sharded else "dp_replicate")
    # A factor of more than one rank belongs to the mesh that it was chosen for.
    factor = 1 if plan.sharding_factor == 1 else None
    # What needs ranks of an axis is asked for where a mesh has them.
    options: list[dict[str, Any]] = [
        {"overlap_ulysses": plan.overlap_ulysses},
        {"reduce_dtype": plan.reduce_dtype},
        {"gather_dtype": plan.gather_dtype},
    ]
    without = {"overlap_ulysses": False, "reduce_dtype": "same", "gather_dtype": "same"}
    without |= {"two_level": "off", "ranks_per_node": None}
    one = plan.replace(**dict.fromkeys(MESH_AXES, 1), sharding_factor=factor, **without)
    pairs = itertools.combinations(used, 2) if max_ranks >= 4 else ()
    meshes = [one.replace(**{first: 2, second: 2}) for first, second in pairs]
    # Each axis alone, in sizes that make 1/P another number than 1/2 or a constant.
    for axis in used:
        sizes = (2, 4) if axis in DATA_AXES else (2, 3, 4)
        smallest = 3 if len(used) > 1 and max_ranks >= 4 else 2  # two ranks of it are in the pairs
        meshes += [one.replace(**{axis: size}) for size in sizes if smallest <= size <= max_ranks]
    if len(used) > 2 and 2 ** len(used) <= max_ranks:
        meshes.append(one.replace(**dict.fromkeys(used, 2)))
    for number, mesh in enumerate(meshes):
        for option in options:
            with contextlib.suppress(ValueError):
                mesh = mesh.replace(**option)
        # Two nodes of two ranks.
        if plan.two_level != "off" and 4 in (mesh.ulysses, mesh.mixed // mesh.num_shards):
            with contextlib.suppress(ValueError):
                mesh = mesh.replace(two_level="on", ranks_per_node=2)
        meshes[number] = mesh
    return meshes


@dataclass(frozen=True)
class Run:
    """One call of the step: on a rank of a mesh, or on the single device that the mesh is compared with."""

    shape: MeshShape  # axes and degrees; every degree is 1 on the single device
    rank: int
    data_rank: int  # which samples the step takes, and what its noise depends on: nothing else may
    # How many data ranks there are, to choose samples by and for nothing else: on a single device they take their
    # turns, so a loss divided by it would be wrong alike.
    data_size: int
    is_reference: bool = False  # the plain run on one device: apply no parallelism
    # Tells the verifier whose gradients to compare, in a step that builds its model itself (no `model_fn`).
    watch: Callable[[nn.Module], None] = field(default=lambda model: None, repr=False)

    @property
    def plan(self) -> Plan:
        """The Plan to apply; on the single device it has every degree 1 and nothing else.

        Raises:
            ValueError: the mesh was given as axes.
        """
        if self.shape.plan is None:
            raise ValueError("this mesh was given as axes, not as a Plan; use run.mesh, or verify with Plans")
        return self.shape.plan

    @property
    def world_size(self) -> int:
        return self.shape.world_size

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh on CPU, with the axes' names: what FSDP2, diffusers and DTensor take."""
        from torch.distributed.device_mesh import init_device_mesh

        # Lazily: a step that verifies a Plan may never ask for it, and to make a mesh is collective.
        sizes: Any = tuple(degree for _, degree in self.shape.degrees)
        return init_device_mesh("cpu", sizes, mesh_dim_names=self.shape.axes)
