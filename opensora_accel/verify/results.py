"""What the ranks of every mesh found, beside what a single device says it should be.

The ranks' forward is compared too, to find where a wrong one goes wrong: at the first module whose output is not the
single device's, though its inputs are. A rank of a sequence group holds some tokens, one of a tensor group some
channels or a part of a sum. So the ranks' outputs are right where each is the single device's, where they are rows of
it along one dim which all ranks together have, or where they add up to it. What adds up is a right input only behind a
row-parallel layer: elsewhere each rank takes its part of every number for the whole. With P = 3 and 11 tokens, a layer
before the split gives 11 tokens on every rank, one after it 4, 4 and 3 of the same 11. A pooling that forgets the other
ranks gives three means that are neither.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from opensora_accel.observe import PART_AXIS_NAMES, MeshShape, compose_axes, subsets
from opensora_accel.verify.causes import Cause, Origin, Side, Where
from opensora_accel.verify.fit import NEGLIGIBLE, TOLERANCE, Samples, largest, relative_error
from opensora_accel.verify.observation import Observation
from opensora_accel.verify.parameters import join_shares, match_rows
from opensora_accel.verify.side_effects import expected_after_clipping

# Rounding errors of ranks, in those of one run that was moved by some.
_MOST_NOISE = 30.0
AnyCause = TypeVar("AnyCause", bound=Cause)
# One call of the single device for every data rank in turn, or a single one for the whole batch.
Reference = Literal["turns", "whole"]


@dataclass(frozen=True)
class Expected:
    """What is right for one number of data ranks, by the single device.

    Attributes:
        replayed: the turns once more, each with the mean gradient of all in every iteration.
        moved: the same, with gradients moved by rounding errors.
        no_replay: why there is neither, though an optimizer steps.
        noise: how far that has moved what is in `gradients`.
    """

    turns: tuple[Observation, ...]
    replayed: tuple[Observation, ...] = ()
    moved: tuple[Observation, ...] = ()
    no_replay: str = ""
    noise: Mapping[str, float] = field(default_factory=dict)

    @property
    def first(self) -> Observation:
        return self.turns[0]

    @cached_property
    def gradients(self) -> dict[str, Tensor | None]:
        """The mean over data ranks."""
        means: dict[str, Tensor | None] = {}
        for name in dict.fromkeys(name for turn in self.turns for name in turn.gradients):
            # A turn without a gradient (an expert that none of its tokens reached) counts as zero.
            present = [g for turn in self.turns if (g := turn.gradients.get(name)) is not None]
            means[name] = torch.stack(present).sum(0) / len(self.turns) if present else None
        return means

    @property
    def scalars(self) -> dict[str, float]:
        """The mean of what all turns returned; nothing, where it is of iterations that were not replayed."""
        turns = self.replayed or self.turns
        if self.first.goes_on and (not self.replayed or self.num_followed < self.first.num_steps):
            return {}
        names = [name for name in turns[0].scalars if all(name in turn.scalars for turn in turns)]
        return {name: statistics.fmean(turn.scalars[name] for turn in turns) for name in names}

    @property
    def num_followed(self) -> int:
        """Iterations in which the optimizer's step is compared."""
        return len(self.replayed[0].iterations) if self.replayed else 0

    @cached_property
    def floor(self) -> float:
        """Magnitude under which a gradient is rounding errors."""
        return NEGLIGIBLE * largest(self.gradients.values())

    def floor_of(self, name: str) -> float:
        """By which errors of one of them are measured at least: where rounding errors grow, they are none."""
        return max(self.floor, _MOST_NOISE * self.noise.get(name, 0.0) / TOLERANCE)


@dataclass(frozen=True)
class TornPair:
    """Two tensors of ranks that are one on the single device (`ties`)."""

    expected: Tensor
    of_first: Sequence[Tensor]  # of every rank that has one
    of_other: Sequence[Tensor]
    floor: float

    @property
    def is_right(self) -> bool:
        """Whether both have what one device has."""
        return all(self._is_right(each) for each in (*self.of_first, *self.of_other))

    def _is_right(self, found: Tensor) -> bool:
        return (
            found.shape == self.expected.shape
            and relative_error(found, self.expected, self.floor) <= TOLERANCE
        )

    @property
    def is_kept(self) -> bool:
        """Whether both are right, or at least wrong alike, which has another cause."""
        pairs = zip(self.of_first, self.of_other, strict=False)
        are_alike = len(self.of_first) == len(self.of_other) and all(
            one.shape == other.shape and relative_error(one, other, self.floor) <= TOLERANCE
            for one, other in pairs
        )
        return self.is_right or are_alike

    @property
    def is_sum(self) -> bool:
        """Whether on all ranks what both have adds up to what one device has."""
        pairs = zip(self.of_first, self.of_other, strict=False)
        return len(self.of_first) == len(self.of_other) and all(
            one.shape == other.shape and self._is_right(one + other) for one, other in pairs
        )

    @property
    def shares(self) -> tuple[float, float]:
        """The largest norm of each, beside that of what one device has."""
        size = self.expected.norm().item() or 1.0
        first, other = (
            max((g.norm().item() for g in each), default=0.0) for each in (self.of_first, self.of_other)
        )
        return first / size, other / size


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
        samples = {}
        for name, expected in self.expected.gradients.items():
            own = [each.gradients.get(name) for each in self.observations]
            gradients = None if expected is None else self._whole(name, own)
            if expected is not None and gradients is not None:
                samples[name] = Samples(self.shape, gradients, expected, self.expected.floor_of(name))
        return samples

    def _whole(self, name: str, own: Sequence[Tensor | None]) -> tuple[Tensor, ...] | None:
        """Every rank's gradient, in the shape of the single device's, of what each has of it (`own`).

        None where together the ranks do not have all of it.
        """
        present = tuple(gradient for gradient in own if gradient is not None)
        expected, values = self.expected.gradients.get(name), self.expected.first.values.get(name)
        is_on_all = len(present) == len(own)
        if is_on_all and (expected is None or all(each.shape == expected.shape for each in present)):
            return present or None
        # Stages, experts and slices: what ranks hold is put together. A rank need not have the gradient of what it
        # has no parameter of, or of another stage or expert.
        has_parts = any(map(self.shape.uses, PART_AXIS_NAMES))
        may_lack = [has_parts or name not in each.weights for each in self.observations]
        joined = None
        if values is not None and all(g is not None or may for g, may in zip(own, may_lack, strict=True)):
            weights = [each.values.get(name) for each in self.observations]
            joined = join_shares(self.shape, own, weights, values)
        return present if joined is None and is_on_all else joined

    def clipped(self) -> dict[str, Samples]:
        """Gradients after the step has clipped them, beside those of the single device, clipped as a whole."""
        # The first rank that clips: others may hold no piece of what is clipped.
        clips = next((each.clips for each in self.observations if each.clips), None)
        if clips is None:
            return {}
        limits = {(clip.how, name): clip.limit for clip in self.expected.first.clips for name in clip.names}
        # Which norm was meant cannot be seen: the answer that most gradients agree with counts.
        candidates: list[dict[str, Samples]] = []
        for right in expected_after_clipping(clips, self.expected.gradients, limits):
            found = {}
            for name, expected in right.items():
                pairs = [(each.clipped.get(name), each.gradients.get(name)) for each in self.observations]
                own = [after if after is not None else before for after, before in pairs]
                gradients = self._whole(name, own)
                if gradients:
                    found[name] = Samples(self.shape, gradients, expected, self.expected.floor)
            candidates.append(found)
        return min(candidates, key=lambda samples: sum(not each.is_right for each in samples.values()))

    @cached_property
    def untied(self) -> dict[str, TornPair]:
        """Further names of a parameter of one device's that some rank has as a parameter of its own."""
        pairs = {}
        for other, first in self.expected.first.tied.items():
            expected = self.expected.gradients.get(first)
            of = {
                n: [g for each in self.observations if (g := each.gradients.get(n)) is not None]
                for n in (first, other)
            }
            # What is apart and has no gradient may be kept equal by hand.
            if (
                expected is not None
                and of[other]
                and any(other in each.trained for each in self.observations)
            ):
                pairs[other] = TornPair(expected, of[first], of[other], self.expected.floor_of(first))
        return pairs

    def one_sided(self) -> dict[str, Side]:
        """Parameters that have a gradient on one side only, with the ranks that have one."""
        sides: dict[str, Side] = {}
        everywhere = [self.expected.gradients, *(each.gradients for each in self.observations)]
        for name in dict.fromkeys(name for gradients in everywhere for name in gradients):
            if name in self.untied:
                continue
            own = [each.gradients.get(name) for each in self.observations]
            has = [gradient is not None for gradient in own]
            if self.expected.gradients.get(name) is None:
                if any(has):
                    sides[name] = "only in parallel"
            elif not any(has):
                sides[name] = "none"
            elif not all(has) and self._whole(name, own) is None:
                sides[name] = "some ranks only"
        return sides

    def scalars(self, of_parts: Collection[str] = ()) -> dict[str, Samples]:
        """What the step returned: the mean over all ranks; right where the ranks' numbers are `of_parts`."""
        samples = {}
        for name, value in self.expected.scalars.items():
            values = [each.scalars[name] for each in self.observations if name in each.scalars]
            if values:
                number = value if name in of_parts else statistics.fmean(values)
                one, other = (torch.tensor([each], dtype=torch.float64) for each in (number, value))
                samples[name] = Samples(self.shape, (one,), other)
        return samples

    def are_parts(self, name: str) -> bool:
        """Whether what ranks returned as `name` stands for the single device's number.

        Ranks may return numbers of the tokens, or of the shard, that they hold. These differ between ranks, and their
        sum, largest or root of squares over some axes is the single device's. And a norm of gradients is that of the
        mean of the turns, which is no mean of their norms.
        """
        values = [each.scalars[name] for each in self.observations if name in each.scalars]
        if not values:
            return True
        # Any way of putting the ranks' numbers together, beside any number of the single device.
        right, found = [self.expected.scalars[name]], [statistics.fmean(values)]
        if len(self.expected.turns) > 1:
            gradients = [g.flatten() for g in self.expected.gradients.values() if g is not None]
            right += [torch.linalg.vector_norm(torch.cat(gradients), order).item() for order in (2, math.inf)]
        for some in (
            subsets(self.shape.used(self.shape.axes), 1) if len(values) == self.shape.world_size else ()
        ):
            groups = [[values[rank] for rank in ranks] for ranks in self.shape.groups(some)]
            # What all ranks return alike is no part of anything.
            if not all(_is_same(each, group[0]) for group in groups for each in group):
                for combine in (sum, max, min, lambda group: math.hypot(*group)):
                    found.append(statistics.fmean(combine(group) for group in groups))
        return any(_is_same(one, other) for one, other in itertools.product(found, right))

    def inputs(self) -> dict[str, Samples]:
        """Gradients of inputs over the ranks that share a sample, beside the single device's.

        Their mean or their sum, whichever is right: a loop may average or add up what ranks that share a sample
        contribute, and what is upstream of an input goes the same way. An input that ranks were given in parts, or
        that differs from the single device's, has none here.
        """
        turns, samples = self.expected.turns, dict[str, Samples]()
        if len(turns) != self.shape.data_size or not self.observations:
            return samples
        # Inputs have a floor of their own: their gradients may be much smaller than the parameters'.
        floor = NEGLIGIBLE * largest(g for turn in turns for g in turn.input_gradients.values())
        num_sharing = self.shape.world_size // self.shape.data_size
        for name in self.observations[0].input_gradients:
            means = _all_or_none(self._mean_of_input(name, rank) for rank in range(self.shape.data_size))
            if means is not None:
                joined = _join(means)
                expected = _join([turn.input_gradients[name] for turn in turns])
                # [data ranks, …]: one sample of all data ranks' inputs together
                mean = Samples(self.shape, (joined,), expected, floor)
                total = replace(mean, found=(joined * num_sharing,))
                samples[name] = total if total.is_right else mean
        return samples

    def _mean_of_input(self, name: str, data_rank: int) -> Tensor | None:
        turn = self.expected.turns[data_rank]
        ranks = [self.observations[rank] for rank in self.shape.ranks_of(data_rank)]
        given, gradients = (
            turn.inputs.get(name),
            _all_or_none(each.input_gradients.get(name) for each in ranks),
        )
        if given is None or gradients is None or name not in turn.input_gradients:
            return None
        # Ranks that were given other tokens than the single device have gradients of something else.
        if any(name not in each.inputs or not torch.equal(each.inputs[name], given) for each in ranks):
            return None
        return torch.stack(gradients).mean(0)


def _is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of R data ranks as [R, ...], or flat where their batches differ in size."""
    if len({tensor.shape for tensor in tensors}) == 1:
        return torch.stack(list(tensors))
    return torch.cat([tensor.flatten() for tensor in tensors])


def _all_or_none(tensors: Iterable[Tensor | None]) -> tuple[Tensor, ...] | None:
    """The tensors, or None where one is missing or there are none."""
    listed = list(tensors)
    present = tuple(tensor for tensor in listed if tensor is not None)
    return present if listed and len(present) == len(listed) else None


class Results:
    """Every mesh's result, and what is asked of all of them together."""

    def __init__(self, meshes: Sequence[MeshResult]):
        self.meshes = list(meshes)
        self.ran = [each for each in meshes if each.observations]  # to the step's end
        self.expected = meshes[0].expected
        shapes = [each.shape for each in meshes]
        axes = dict.fromkeys(axis for shape in shapes for axis in shape.axes)
        # Axes of more than one rank on some mesh.
        self.axes = tuple(axis for axis in axes if any(shape.uses(axis) for shape in shapes))
        self.data_axes = shapes[0].data_axes
        self.names = list(self.expected.gradients)
        self.weight_names = list(self.expected.first.weights)  # also of what the step does not train

    @cached_property
    def wrong(self) -> dict[str, list[Samples]]:
        """Parameters that are wrong on some mesh, with their samples on all meshes, but where they are torn in two."""
        torn = {
            (mesh.shape, mesh.expected.first.tied[name])
            for mesh in self.ran
            for name, pair in mesh.untied.items()
            if not pair.is_kept
        }
        wrong = {
            name: [each for each in samples if (each.shape, name) not in torn]
            for name, samples in self.wrong_of(MeshResult.parameters).items()
        }
        return {name: each for name, each in wrong.items() if not all(s.is_right for s in each)}

    def wrong_of(self, read: Callable[[MeshResult], Mapping[str, Samples]]) -> dict[str, list[Samples]]:
        """The same for any other quantity that `read` finds on a mesh."""
        by_mesh = [read(mesh) for mesh in self.ran]
        names = dict.fromkeys(name for samples in by_mesh for name in samples)
        by_name = {name: [samples[name] for samples in by_mesh if name in samples] for name in names}
        return {name: each for name, each in by_name.items() if any(not s.is_right for s in each)}

    def scalars(self, mesh: MeshResult) -> dict[str, Samples]:
        """What the step returned on a mesh. Numbers are of parts where they are so on all meshes."""
        names = self.expected.scalars
        return mesh.scalars({name for name in names if all(each.are_parts(name) for each in self.ran)})

    def is_right(self, mesh: MeshResult) -> bool:
        if mesh.errors or mesh.one_sided() or not all(each.is_right for each in mesh.untied.values()):
            return False
        compared = [mesh.parameters(), mesh.inputs(), self.scalars(mesh)]
        return all(each.is_right for samples in compared for each in samples.values())

    def where(self, bad: Iterable[MeshShape], among: Sequence[MeshResult] | None = None) -> Where:
        """What the meshes that show an error have in common; `among`: all that could."""
        shapes = [each.shape for each in (self.ran if among is None else among)]
        listed = list(dict.fromkeys(bad))
        return Where.of(listed, [shape for shape in shapes if shape not in listed], self.axes)

    def cause(self, kind: type[AnyCause], bad: Mapping[str, Iterable[MeshShape]], **fields: Any) -> AnyCause:
        """A cause of what is wrong, by name, on these meshes; its axes in the Plan's own words."""
        where = self.where(shape for shapes in bad.values() for shape in shapes)
        fields.setdefault("num_names", len(self.names))
        if fields.get("over") is not None:
            fields["over"] = compose_axes(fields["over"], self.axes)
        if fields.get("by") is not None:
            fields["by"] = fields["by"].composed(self.axes)
        return kind(where=where, names=tuple(bad), **fields)


def wrong_shapes(wrong: Mapping[str, Sequence[Samples]]) -> dict[str, list[MeshShape]]:
    """The meshes on which each parameter is wrong."""
    return {name: [each.shape for each in samples if not each.is_right] for name, samples in wrong.items()}


def find_origin(shape: MeshShape, turns: Sequence[Observation], ranks: Sequence[Observation]) -> Origin:
    """The first module whose forward goes wrong on the ranks, which were all traced; `turns`: the single device's."""
    groups = [[ranks[rank] for rank in shape.ranks_of(data_rank)] for data_rank in range(shape.data_size)]
    # One turn for every data rank, or one whose batch all of them share.
    one_each = len(turns) == len(groups)
    pairs = [(turn, [groups[number]] if one_each else groups) for number, turn in enumerate(turns)]
    # What row-parallel layers have given so far: by data rank and rank.
    sums: list[list[list[Tensor]]] = []
    # Calls are in the order in which they ended: a module after those that it consists of, the model ("") last.
    first_wrong, is_model_right = None, False
    for call in turns[0].calls:
        name, _number = call
        if not all(call in each.calls for each in (*turns, *ranks)):
            continue  # another stage's, or another expert's
        gave = [_is_call_right(call, 1, turn, groups, None) for turn, groups in pairs]
        if False in gave:
            given = [_is_call_right(call, 0, turn, groups, sums) for turn, groups in pairs]
            # The first module that makes something wrong of what is right.
            if all(given):
                return Origin(name, before=None if first_wrong is None else first_wrong.name)
            first_wrong = first_wrong or Origin(name, False if False in given else None)
        for turn, of_turn in pairs:
            if _is_row_parallel(call, turn, of_turn):
                sums += _of_call(call, 1, of_turn)
        is_model_right |= not name and all(gave)
    return first_wrong or Origin(None, is_model_right or None)


def _is_row_parallel(
    call: tuple[str, int], turn: Observation, groups: Sequence[Sequence[Observation]]
) -> bool:
    """Whether each rank has a part of the layer's weights, or takes a part of its channels with all of them."""
    name, ranks = call[0], [rank for group in groups for rank in group]
    # A digest begins with the shape. Of experts, other ranks have nothing.
    sizes = {
        each: digest.split("]")[0]
        for each, digest in turn.weights.items()
        if name and each.rpartition(".")[0] == name
    }
    if any(
        rank.weights.get(each, "").split("]")[0] != size for each, size in sizes.items() for rank in ranks
    ):
        return True
    pairs = zip(
        turn.calls[call][0], zip(*(rank.calls[call][0] for rank in ranks), strict=False), strict=False
    )
    return any(
        whole.dim() > 0
        and all(part.dim() == whole.dim() and part.size(-1) < whole.size(-1) for part in parts)
        for whole, parts in pairs
    )


def _of_call(
    call: tuple[str, int], side: int, groups: Sequence[Sequence[Observation]]
) -> list[list[list[Tensor]]]:
    """The ranks' inputs (`side` 0) or outputs (1): of each its tensors by data rank and rank."""
    by_group = [[rank.calls[call][side] for rank in group] for group in groups]
    num_tensors = min(len(tensors) for group in by_group for tensors in group)
    return [[[tensors[i] for tensors in group] for group in by_group] for i in range(num_tensors)]


def _is_call_right(
    call: tuple[str, int],
    side: int,
    turn: Observation,
    groups: Sequence[Sequence[Observation]],
    sums: Sequence[Sequence[Sequence[Tensor]]] | None,
) -> bool | None:
    """Whether the ranks' inputs (`side` 0) or outputs (1) are the turn's; None where that cannot be known.

    Args:
        sums: tensors of which the sum over ranks counts; None for any.
    """
    expected = turn.calls[call][side]
    # Another number of tensors is another signature: a mask that only ranks are given, for one.
    if any(len(rank.calls[call][side]) != len(expected) for group in groups for rank in group):
        return None
    answers = [
        _are_right(found, each, sums is None or any(_are_equal(found, known) for known in sums))
        for found, each in zip(_of_call(call, side, groups), expected, strict=True)
    ]
    return False if False in answers else None if None in answers else True


def _are_equal(one: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]) -> bool:
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=False)
    return len(one) == len(other) and all(torch.equal(mine, theirs) for mine, theirs in pairs)


def _are_right(groups: Sequence[Sequence[Tensor]], expected: Tensor, may_be_sum: bool) -> bool | None:
    """Whether parts of `expected` are right, by data rank and rank; None where shapes are no part of it.

    Args:
        may_be_sum: whether parts that add up to it are right.
    """
    ranks = [each for group in groups for each in group]
    if all(relative_error(each, expected) <= TOLERANCE for each in ranks):
        return True
    have_shape = may_be_sum and all(each.shape == expected.shape for each in ranks)
    if have_shape and relative_error(torch.stack(ranks).sum(0), expected) <= TOLERANCE:
        return True
    # A rank's tokens, heads or channels are rows of the whole along one dim, in any order.
    fits = False
    for dim in range(expected.dim()):
        others = [d for d in range(expected.dim()) if d != dim]
        if all(
            each.dim() == expected.dim()
            and each.size(dim) <= expected.size(dim)
            and all(each.size(d) == expected.size(d) for d in others)
            for each in ranks
        ):
            fits = True
            # [rows of the rank, rows expected]
            matches = [[match_rows(each, expected, dim) for each in group] for group in groups]
            are_known = all(bool(each.any(1).all()) for group in matches for each in group)
            of_groups = [torch.stack([each.any(0) for each in group]).any(0) for group in matches]
            # Every data rank has rows that no other data rank has, and all of them together all.
            if are_known and bool((torch.stack(of_groups).sum(0) == 1).all()):
                return True
    return False if fits else None
