"""What the ranks of every mesh found, beside what a single device says it should be."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from opensora_accel.verify.causes import Side, Where
from opensora_accel.verify.fit import NEGLIGIBLE, TOLERANCE, Samples, magnitude
from opensora_accel.verify.meshes import PART_AXIS_NAMES, MeshShape, compose_axes, subsets
from opensora_accel.verify.observe import Observation
from opensora_accel.verify.parameters import Share, join_shares, share_of
from opensora_accel.verify.watch import expected_after_clipping

Reference = Literal["turns", "whole"]
"""One call of the single device for every data rank in turn, or a single one for the whole batch."""


@dataclass(frozen=True)
class Expected:
    """What is right for one number of data ranks, by the single device."""

    turns: tuple[Observation, ...]

    @property
    def first(self) -> Observation:
        return self.turns[0]

    @cached_property
    def gradients(self) -> dict[str, Tensor | None]:
        """The mean over data ranks."""
        names = dict.fromkeys(name for turn in self.turns for name in turn.gradients)
        return {name: _mean([turn.gradients.get(name) for turn in self.turns]) for name in names}

    @property
    def scalars(self) -> dict[str, float]:
        """The mean of what all turns returned."""
        names = [name for name in self.first.scalars if all(name in turn.scalars for turn in self.turns)]
        return {name: statistics.fmean(turn.scalars[name] for turn in self.turns) for name in names}

    @cached_property
    def norms(self) -> list[float]:
        """The 2-norm and the largest element of all gradients together."""
        all_ = torch.cat([gradient.flatten() for gradient in self.gradients.values() if gradient is not None])
        return [torch.linalg.vector_norm(all_, order).item() for order in (2, float("inf"))]

    @cached_property
    def floor(self) -> float:
        """Magnitude under which a gradient is rounding errors."""
        return NEGLIGIBLE * max((magnitude(g) for g in self.gradients.values() if g is not None), default=0.0)

    @property
    def unprovable(self) -> list[str]:
        """Parameters whose gradient is too small on the single device to be compared."""
        return [
            n
            for n, gradient in self.gradients.items()
            if gradient is not None and magnitude(gradient) <= self.floor
        ]


@dataclass(frozen=True)
class MeshResult:
    """One mesh. `observations` are in rank order, and empty where a rank failed (`errors` by rank)."""

    shape: MeshShape
    expected: Expected
    observations: Sequence[Observation] = ()
    errors: Mapping[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    def parameters(self) -> dict[str, Samples]:
        """Gradients that both sides have."""
        found = {}
        for name, expected in self.expected.gradients.items():
            gradients = None if expected is None else self._gradients(name)
            if expected is not None and gradients is not None:
                found[name] = Samples(self.shape, gradients, expected, self.expected.floor)
        return found

    def _gradients(self, name: str) -> tuple[Tensor, ...] | None:
        """Every rank's, in the shape of the single device's; None where together the ranks do not have all of it."""
        own = [each.gradients.get(name) for each in self.observations]
        expected = self.expected.gradients.get(name)
        values = self.expected.first.values.get(name)
        present = tuple(gradient for gradient in own if gradient is not None)
        is_on_all = len(present) == len(own)
        if not own or (
            is_on_all and (expected is None or all(each.shape == expected.shape for each in present))
        ):
            return present or None
        # Stages, experts and slices: what ranks hold is put together.
        joined = None
        if values is not None:
            shares = [self._share(name, rank, gradient, values) for rank, gradient in enumerate(own)]
            known = [share for share in shares if share is not None]
            if len(known) == len(shares):
                joined = join_shares(self.shape, known, values)
        return present if joined is None and is_on_all else joined

    def _share(self, name: str, rank: int, gradient: Tensor | None, values: Tensor) -> Share | None:
        seen = self.observations[rank]
        if gradient is not None:
            return share_of(gradient, seen.values.get(name), values)
        # A rank need not have the gradient of what it has no parameter of, or of another stage or expert.
        may_lack = name not in seen.weights or any(map(self.shape.uses, PART_AXIS_NAMES))
        return Share(None) if may_lack else None

    def clipped(self) -> dict[str, Samples]:
        """Gradients after the step has clipped them, beside those of the single device, clipped as a whole."""
        clips = next((each.clips for each in self.observations if each.clips), None)
        if clips is None:
            return {}
        limits = {(clip.how, name): clip.limit for clip in self.expected.first.clips for name in clip.names}
        candidates: list[dict[str, Samples]] = []
        for right in expected_after_clipping(clips, self.expected.gradients, limits):
            found = {}
            for name, expected in right.items():
                gradients = _all(
                    each.clipped.get(name, each.gradients.get(name)) for each in self.observations
                )
                if gradients:
                    found[name] = Samples(self.shape, gradients, expected, self.expected.floor)
            candidates.append(found)
        return min(candidates, key=lambda samples: sum(not each.is_right for each in samples.values()))

    def one_sided(self) -> dict[str, Side]:
        """Parameters that have a gradient on one side only, with the ranks that have one."""
        found: dict[str, Side] = {}
        everywhere = [self.expected.gradients, *(each.gradients for each in self.observations)]
        for name in dict.fromkeys(name for gradients in everywhere for name in gradients):
            has = [each.gradients.get(name) is not None for each in self.observations]
            if self.expected.gradients.get(name) is None:
                if any(has):
                    found[name] = "only in parallel"
            elif not any(has):
                found[name] = "none"
            elif not all(has) and self._gradients(name) is None:
                found[name] = "some ranks only"
        return found

    def scalars(self, of_parts: Collection[str] = ()) -> dict[str, Samples]:
        """What the step returned: the mean over all ranks; right where the ranks' numbers are `of_parts`."""
        found = {}
        for name, value in self.expected.scalars.items():
            values = [each.scalars[name] for each in self.observations if name in each.scalars]
            if values:
                number = value if name in of_parts else statistics.fmean(values)
                found[name] = Samples(self.shape, (_number(number),), _number(value))
        return found

    def are_parts(self, name: str) -> bool:
        """Whether what ranks returned as `name` stands for the single device's number.

        Ranks may return numbers of the tokens, or of the shard, that they hold. These differ between ranks, and their
        sum, largest or root of squares over some axes is the single device's. And a norm of gradients is that of the
        mean of the turns, which is no mean of their norms.
        """
        values = [each.scalars[name] for each in self.observations if name in each.scalars]
        value = self.expected.scalars.get(name)
        if value is None or not values:
            return True
        right = [value, *(self.expected.norms if len(self.expected.turns) > 1 else ())]
        found = [statistics.fmean(values)]
        if len(values) == self.shape.world_size:
            found += self._combinations(values)
        return any(_is_same(one, other) for one, other in itertools.product(found, right))

    def _combinations(self, values: Sequence[float]) -> Iterator[float]:
        """The ranks' numbers put together in every way; nothing where all return the same one."""
        for some in subsets(self.shape.used(self.shape.axes), 1):
            groups = [[values[rank] for rank in ranks] for ranks in self.shape.groups(some)]
            # What all ranks return alike is no part of anything.
            if not all(_is_same(each, group[0]) for group in groups for each in group):
                for combine in (sum, max, min, lambda group: math.hypot(*group)):
                    yield statistics.fmean(combine(group) for group in groups)

    def inputs(self) -> dict[str, Samples]:
        """Gradients of inputs over the ranks that share a sample, beside the single device's.

        Their mean or their sum, whichever is right: a loop may average or add up what ranks that share a sample
        contribute, and what is upstream of an input goes the same way. An input that ranks were given in parts, or
        that differs from the single device's, has none here.
        """
        found: dict[str, Samples] = {}
        if len(self.expected.turns) != self.shape.data_size or not self.observations:
            return found
        all_gradients = [g for turn in self.expected.turns for g in turn.input_gradients.values()]
        floor = NEGLIGIBLE * max((magnitude(gradient) for gradient in all_gradients), default=0.0)
        num_sharing = self.shape.world_size // self.shape.data_size
        for name in self.observations[0].input_gradients:
            means = [self._mean_of_input(name, data_rank) for data_rank in range(self.shape.data_size)]
            present = [each for each in means if each is not None]
            if len(present) == len(means):
                joined = _join(present)
                expected = _join([turn.input_gradients[name] for turn in self.expected.turns])
                mean = Samples(self.shape, (joined,), expected, floor)
                total = replace(mean, found=(joined * num_sharing,))
                found[name] = total if total.is_right else mean
        return found

    def _mean_of_input(self, name: str, data_rank: int) -> Tensor | None:
        turn = self.expected.turns[data_rank]
        ranks = [self.observations[rank] for rank in self.shape.ranks_of(data_rank)]
        given = turn.inputs.get(name)
        gradients = _all(each.input_gradients.get(name) for each in ranks)
        if given is None or gradients is None or name not in turn.input_gradients:
            return None
        if any(name not in each.inputs or not torch.equal(each.inputs[name], given) for each in ranks):
            return None
        return torch.stack(gradients).mean(0)


def _number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """[data ranks, …], or flat where their batches differ in size."""
    if len({tensor.shape for tensor in tensors}) == 1:
        return torch.stack(list(tensors))
    return torch.cat([tensor.flatten() for tensor in tensors])


def _mean(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present).sum(0) / len(tensors) if present else None


def _all(tensors: Iterable[Tensor | None]) -> tuple[Tensor, ...] | None:
    """The tensors, or None where one is missing or there are none."""
    listed = list(tensors)
    present = tuple(tensor for tensor in listed if tensor is not None)
    return present if listed and len(present) == len(listed) else None


class Results:
    """Every mesh's result, and what is asked of all of them together."""

    def __init__(self, meshes: Sequence[MeshResult]):
        self.meshes = list(meshes)
        self.ran = [each for each in meshes if each.observations]
        """Meshes on which the step ran to its end."""
        self.expected = meshes[0].expected
        shapes = [each.shape for each in meshes]
        axes = dict.fromkeys(axis for shape in shapes for axis in shape.axes)
        self.axes = tuple(axis for axis in axes if any(shape.uses(axis) for shape in shapes))
        """Axes of more than one rank on some mesh."""
        self.data_axes = shapes[0].data_axes
        self.names = list(self.expected.gradients)
        self.weight_names = list(self.expected.first.weights)

    @cached_property
    def wrong(self) -> dict[str, list[Samples]]:
        """Parameters that are wrong on some mesh, with their samples on all meshes."""
        found = [each.parameters() for each in self.ran]
        by_name = {name: [samples[name] for samples in found if name in samples] for name in self.names}
        return {name: each for name, each in by_name.items() if any(not s.is_right for s in each)}

    @cached_property
    def _of_parts(self) -> set[str]:
        """Numbers that ranks return of their parts, on all meshes."""
        return {name for name in self.expected.scalars if all(each.are_parts(name) for each in self.ran)}

    def scalars(self, mesh: MeshResult) -> dict[str, Samples]:
        """What the step returned on a mesh."""
        return mesh.scalars(self._of_parts)

    def is_right(self, mesh: MeshResult) -> bool:
        if mesh.errors or mesh.one_sided():
            return False
        compared = [mesh.parameters(), mesh.inputs(), self.scalars(mesh)]
        return all(each.is_right for samples in compared for each in samples.values())

    def where(self, bad: Iterable[MeshShape], among: Sequence[MeshResult] | None = None) -> Where:
        """What the meshes that show an error have in common; `among`: all that could."""
        shapes = [each.shape for each in (self.ran if among is None else among)]
        listed = list(dict.fromkeys(bad))
        found = Where.of(listed, [shape for shape in shapes if shape not in listed], self.axes)
        return replace(found, axes=compose_axes(found.axes, self.axes), members=found.axes)

    def where_of(self, by_name: Mapping[str, Iterable[MeshShape]]) -> Where:
        """The same for meshes that are known by parameter."""
        return self.where(shape for shapes in by_name.values() for shape in shapes)


def wrong_shapes(wrong: Mapping[str, Sequence[Samples]]) -> list[MeshShape]:
    """Meshes on which any of the parameters is wrong."""
    return list(dict.fromkeys(s.shape for samples in wrong.values() for s in samples if not s.is_right))
