"""What the ranks of every mesh found, beside what a single device says it should be."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from opensora_accel.verify.clipping import Limits, clipped
from opensora_accel.verify.fit import NEGLIGIBLE, TOLERANCE, Samples, magnitude
from opensora_accel.verify.observe import Observation
from opensora_accel.verify.parts import Part, part_of, put_together
from opensora_accel.verify.shapes import PART_AXIS_NAMES, MeshShape

Reference = Literal["turns", "whole"]


@dataclass(frozen=True)
class Expected:
    """Of one number of data ranks: the single device's word, by which the ranks are judged."""

    turns: tuple[Observation, ...]
    """One call for every data rank in turn, or a single one for the whole batch."""

    @cached_property
    def gradients(self) -> dict[str, Tensor | None]:
        """The mean over data ranks."""
        names = dict.fromkeys(name for turn in self.turns for name in turn.gradients)
        return {name: _mean([turn.gradients.get(name) for turn in self.turns]) for name in names}

    @property
    def scalars(self) -> dict[str, float]:
        """The mean of what all turns tell."""
        names = [name for name in self.turns[0].scalars if all(name in turn.scalars for turn in self.turns)]
        return {name: statistics.fmean(turn.scalars[name] for turn in self.turns) for name in names}

    @cached_property
    def norms(self) -> list[float]:
        """Of all gradients together."""
        all_ = torch.cat([gradient.flatten() for gradient in self.gradients.values() if gradient is not None])
        return [torch.linalg.vector_norm(all_, order).item() for order in (2, float("inf"))]

    @property
    def weights(self) -> dict[str, str]:
        return self.turns[0].weights

    @property
    def values(self) -> dict[str, Tensor]:
        """The parameters themselves."""
        return self.turns[0].values

    @property
    def outside(self) -> list[str]:
        return self.turns[0].outside

    @property
    def limits(self) -> Limits:
        """By which the single device clips."""
        return {(clip.how, name): clip.limit for clip in self.turns[0].clips for name in clip.names}

    @property
    def backward_order(self) -> list[str]:
        return self.turns[0].backward_order

    @cached_property
    def floor(self) -> float:
        """Magnitude under which a gradient is rounding errors."""
        return NEGLIGIBLE * max((magnitude(g) for g in self.gradients.values() if g is not None), default=0.0)


def _number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _hypot(numbers: Sequence[float]) -> float:
    return math.hypot(*numbers)


def _is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """[data ranks, …], or flat where their batches differ in size."""
    if len({tensor.shape for tensor in tensors}) == 1:
        return torch.stack(list(tensors))
    return torch.cat([tensor.flatten() for tensor in tensors])


def _mean(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    return torch.stack(present).sum(0) / len(tensors)


@dataclass
class MeshResult:
    """One mesh. `observations` are in rank order, and empty where a rank failed (`errors` by rank)."""

    shape: MeshShape
    expected: Expected
    observations: list[Observation] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    def parameters(self) -> dict[str, Samples]:
        """Gradients that both sides have."""
        floor = self.expected.floor
        found = {}
        for name, expected in self.expected.gradients.items():
            gradients = None if expected is None else self._gradients(name)
            if expected is not None and gradients is not None:
                found[name] = Samples(self.shape, gradients, expected, floor)
        return found

    def _gradients(self, name: str) -> tuple[Tensor, ...] | None:
        """Of every rank, whole, where together they have all of it."""
        own = [each.gradients.get(name) for each in self.observations]
        expected = self.expected.gradients.get(name)
        whole = self.expected.values.get(name)
        present = tuple(gradient for gradient in own if gradient is not None)
        is_whole = len(present) == len(own)
        if not own or (
            is_whole and (expected is None or all(each.shape == expected.shape for each in present))
        ):
            return present or None
        parts = [
            (Part(None) if self._may_have_none(each, name) else None)
            if gradient is None
            else None
            if whole is None
            else part_of(gradient, each.values.get(name), whole)
            for each, gradient in zip(self.observations, own, strict=True)
        ]
        known = [part for part in parts if part is not None]
        together = None
        if whole is not None and len(known) == len(parts):
            together = put_together(self.shape, known, whole)
        return present if together is None and is_whole else together

    def _may_have_none(self, observation: Observation, name: str) -> bool:
        """Whether a rank need not have this gradient: without the parameter, or beside other stages and experts."""
        return name not in observation.weights or any(self.shape.degree(axis) > 1 for axis in PART_AXIS_NAMES)

    def clipped(self) -> dict[str, Samples]:
        """Gradients after the step has clipped them, beside those of one device, clipped as a whole."""
        clips = next((each.clips for each in self.observations if each.clips), None)
        if clips is None:
            return {}
        answers = clipped(clips, self.expected.gradients, self.expected.limits)
        found: list[dict[str, Samples]] = []
        for answer in answers:
            gradients = {
                n: self._tensors(each.clipped.get(n, each.gradients.get(n)) for each in self.observations)
                for n in answer
            }
            found.append(
                {n: Samples(self.shape, g, answer[n], self.expected.floor) for n, g in gradients.items() if g}
            )
        return min(found, key=lambda samples: sum(not each.is_right for each in samples.values()))

    def one_sided(self) -> dict[str, str]:
        """Parameters that have a gradient on one side only, with a word on where."""
        found: dict[str, str] = {}
        everywhere = [self.expected.gradients, *(each.gradients for each in self.observations)]
        for name in dict.fromkeys(name for gradients in everywhere for name in gradients):
            expected = self.expected.gradients.get(name)
            has = [each.gradients.get(name) is not None for each in self.observations]
            if expected is not None and not all(has):
                if not any(has):
                    found[name] = "none"
                elif self._gradients(name) is None:
                    found[name] = "some ranks only"
            elif expected is None and any(has):
                found[name] = "only in parallel"
        return found

    def scalars(self, of_parts: Collection[str] = ()) -> dict[str, Samples]:
        """Of what the step returned: the mean over all ranks; right where ranks tell `of_parts`."""
        found = {}
        for name, value in self.expected.scalars.items():
            values = [each.scalars[name] for each in self.observations if name in each.scalars]
            if values:
                number = value if name in of_parts else statistics.fmean(values)
                found[name] = Samples(self.shape, (_number(number),), _number(value))
        return found

    def are_parts(self, name: str) -> bool:
        """Whether what ranks returned as `name` stands for the single device's.

        Ranks may tell of the tokens, or of the shard, that they hold: numbers that differ between them, and whose sum,
        largest or root of squares over some axes is the single device's. And a norm of gradients is that of the mean
        of its turns, which is no mean of their norms.
        """
        values = [each.scalars[name] for each in self.observations if name in each.scalars]
        value = self.expected.scalars.get(name)
        if value is None or not values:
            return True
        answers = [value, *(self.expected.norms if len(self.expected.turns) > 1 else ())]
        told = [
            statistics.fmean(values),
            *(self._sums(values) if len(values) == self.shape.world_size else ()),
        ]
        return any(_is_same(of, answer) for of, answer in itertools.product(told, answers))

    def _sums(self, values: Sequence[float]) -> Iterator[float]:
        """Numbers of parts, put together in every way; nothing where ranks tell one and the same."""
        axes = [axis for axis, degree in self.shape.degrees if degree > 1]
        for count in range(1, len(axes) + 1):
            for some in itertools.combinations(axes, count):
                groups = [[values[rank] for rank in ranks] for ranks in self.shape.groups(some)]
                if not all(_is_same(each, group[0]) for group in groups for each in group):
                    for combine in (sum, max, min, _hypot):
                        yield statistics.fmean(combine(group) for group in groups)

    def inputs(self) -> dict[str, Samples]:
        """Gradients of inputs over the ranks that share a sample, beside the single device's.

        Their mean or their sum, whichever is right: a loop may average or add up what ranks that share a sample
        contribute, and what is upstream of an input goes the same way. An input that ranks were given in parts, or
        that differs from the single device's, has none here.
        """
        found: dict[str, Samples] = {}
        if len(self.expected.turns) != self.shape.data_size:
            return found
        names = self.observations[0].input_gradients if self.observations else {}
        for name in names:
            means, expected = [], []
            for data_rank, turn in enumerate(self.expected.turns):
                ranks = [self.observations[r] for r in self.sharing(data_rank)]
                same = all(
                    name in each.inputs
                    and torch.equal(each.inputs[name], turn.inputs.get(name, torch.empty(0)))
                    for each in ranks
                )
                gradients = self._tensors(each.input_gradients.get(name) for each in ranks)
                if not same or gradients is None or name not in turn.input_gradients:
                    break
                means.append(torch.stack(gradients).mean(0))
                expected.append(turn.input_gradients[name])
            else:
                (joined, whole), floor = (_joined(each) for each in (means, expected)), self._input_floor()
                mean = Samples(self.shape, (joined,), whole, floor)
                num_sharing = self.shape.world_size // self.shape.data_size
                total = Samples(self.shape, (joined * num_sharing,), whole, floor)
                found[name] = total if total.is_right else mean
        return found

    def _input_floor(self) -> float:
        gradients = [g for turn in self.expected.turns for g in turn.input_gradients.values()]
        return NEGLIGIBLE * max(magnitude(gradient) for gradient in gradients)

    def sharing(self, data_rank: int) -> list[int]:
        """The ranks that share the samples of a data rank."""
        return [r for r in range(self.shape.world_size) if self.shape.data_rank(r) == data_rank]

    @staticmethod
    def _tensors(tensors: Iterable[Tensor | None]) -> tuple[Tensor, ...] | None:
        listed = list(tensors)
        present = tuple(tensor for tensor in listed if tensor is not None)
        return present if listed and len(present) == len(listed) else None
