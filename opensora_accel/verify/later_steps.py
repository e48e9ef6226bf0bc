"""What an optimizer makes of right gradients, and whether the steps after the first are right.

Every iteration is compared as the first one is: its gradients at the weights that the ones before have left, and then
the parameters that its optimizer leaves. The first one that goes wrong is told, as all after it must be wrong too:

    step 1    gradients right    parameters right
    step 2    gradients wrong: they have those of step 1 in them still, which nobody cleared
    step 3    not looked at

Where gradients are right and parameters wrong after them, the optimizer differs: what it was set to (a learning rate
that was scheduled twice), or what it remembers (a moment that a load has left behind). Both were read before it
stepped, and the difference is told.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from opensora_accel.observe import MeshShape
from opensora_accel.verify.causes import Cause, join_words, list_names
from opensora_accel.verify.diagnose import diagnose_gradients
from opensora_accel.verify.fit import TOLERANCE, magnitude, relative_error
from opensora_accel.verify.observation import Observation
from opensora_accel.verify.results import Expected, MeshResult, Results, wrong_shapes
from opensora_accel.verify.ties import find_untied

# To which settings and norms of states are the same.
_SAME = 1e-6
Shapes = defaultdict[str, list[MeshShape]]


@dataclass(frozen=True)
class InLaterStep(Cause):
    """The first step is right, and this comes in later."""

    step: int = 0
    inner: Cause | None = None

    @classmethod
    def of(cls, inner: Cause, step: int) -> InLaterStep:
        base = {each.name: getattr(inner, each.name) for each in fields(Cause)}
        return cls(**base, step=step, inner=inner)

    @property
    def _inner(self) -> Cause:
        assert self.inner is not None
        return self.inner

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self._inner.kind

    @property
    def axes(self) -> tuple[str, ...]:
        return self._inner.axes

    @property
    def factor(self) -> str:
        return self._inner.factor

    @property
    def what(self) -> str:
        before = "step 1" if self.step == 2 else f"steps 1 to {self.step - 1}"
        if self.kind == "inputs":
            return f"right in {before}, and in step {self.step} {self._inner.what}"
        return f"gradients are right in {before} and wrong in step {self.step}: {self._inner.what}"

    @property
    def remedy(self) -> str:
        if self.kind == "inputs":
            return (
                f"{self._inner.remedy}. As it begins in step {self.step}: look at the end of an epoch, at what is "
                "skipped when a run goes on, and at draws that only some ranks make"
            )
        if self.kind == "values":
            return (
                "it is something that one step leaves for the next: gradients that are not cleared, what is kept "
                "beside them, cached weights or keys, another branch at the end of an accumulation"
            )
        if self.kind in ("scale", "shares"):
            return (
                f"as it begins in step {self.step}: look at the number of its microbatches, which may be smaller at "
                f"the end of an epoch; otherwise {self._inner.remedy}"
            )
        return self._inner.remedy


@dataclass(frozen=True)
class NotCleared(Cause):
    kind = "state"
    WHAT = "gradients of step {step} still have those of step {before} in them {where}: {count}"
    REMEDY = (
        "clear what backward adds to before the next one: zero_grad() of the tensors that gradients accumulate in, "
        "which may be a buffer beside .grad"
    )
    step: int = 0
    before: int = 0


@dataclass(frozen=True)
class OtherNumberOfSteps(Cause):
    kind = "steps"
    REMEDY = (
        "what decides whether an optimizer steps is not the same: the end of an accumulation, of the data, a number of "
        "steps that is divided by that of ranks"
    )
    counts: tuple[tuple[str, str], ...] = ()  # by mesh
    expected: int = 0

    @property
    def what(self) -> str:
        shown = join_words([f"{count} on {mesh}" for mesh, count in self.counts])
        return f"the optimizer steps {shown}, and {self.expected} on one device"


@dataclass(frozen=True)
class OtherTrained(Cause):
    kind = "trained"
    WHAT = "step {step} {how} {count} {where}, which one device does not"
    step: int = 0
    how: str = ""  # trains or freezes

    @property
    def remedy(self) -> str:
        return (
            "requires_grad differs from the single device's from here on: look for what wraps or replaces parameters "
            "(a new one is trained unless it is told otherwise), and at which step layers are frozen or thawed"
        )


@dataclass(frozen=True)
class LeftOut(Cause):
    kind = "optimizer"
    WHAT = "no optimizer holds {count} {where}, which one device trains: they would stay as they are"
    REMEDY = (
        "give the optimizer all of them: look at filters by name, which wrappers change, and by requires_grad"
    )


@dataclass(frozen=True)
class WrongUpdate(Cause):
    """Gradients are right, and parameters are not."""

    step: int = 0
    error: float = 0.0
    settings: tuple[str, ...] = ()  # `lr is 0.05 (one device: 0.1) on data=2`
    states: tuple[str, ...] = ()  # what the optimizer remembers otherwise
    is_apart: bool = False  # ranks differ among themselves

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "state" if self.states and not self.settings else "update"

    @property
    def what(self) -> str:
        if self.settings:
            why = f": {list_names(self.settings)}"
        elif self.states:
            why = f": before it steps the optimizer holds another {list_names(self.states)}"
        else:
            why = ", and no longer the same on all ranks" if self.is_apart else ""
        return (
            f"parameters are wrong after step {self.step} though their gradients are right {self.where}: {self.count}, "
            f"up to {self.error:.1e} of the largest{why}"
        )

    @property
    def remedy(self) -> str:
        if self.settings:
            return (
                "the optimizer is set otherwise than on one device: a scheduler that steps once for each rank, a group "
                "of parameters that were sorted by names or shapes, which sharding changes"
            )
        if self.states:
            return (
                "what it remembers is not what the steps before have left: look at what saves, loads or shards it, and "
                "at an optimizer that is built anew"
            )
        return (
            "the optimizer, or what comes after it, is not what one device has: its type, its parameter groups, "
            "weights that are written (an average, a broadcast) or not updated on some ranks"
        )


@dataclass(frozen=True)
class Followed:
    """How far optimizer steps were compared, and what is wrong with them.

    Attributes:
        steps: the number that was compared, by mesh.
        errors: the largest of parameters after any of them, by mesh.
    """

    causes: tuple[Cause, ...] = ()
    steps: Mapping[MeshShape, int] = field(default_factory=dict)
    errors: Mapping[MeshShape, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def is_wrong(self, shape: MeshShape) -> bool:
        return any(shape in cause.where.meshes for cause in self.causes)

    def describe(self, shape: MeshShape) -> str:
        """`, 3 steps, parameters after each right to 1.2e-15`, to be appended."""
        number = self.steps.get(shape, 0)
        if not number or self.is_wrong(shape):
            return ""
        what = "after a step" if number == 1 else f"after each of {number} steps"
        return f"; parameters {what} right to {self.errors[shape]:.1e}"


def follow(results: Results) -> Followed:
    """Compares every iteration of a step whose first gradients are right, until one is wrong."""
    # Results of an iteration know only themselves: where they were compared, and where not.
    steps = {mesh.shape: number for mesh in results.ran if (number := _num_compared(mesh))}
    meshes = [mesh for mesh in results.ran if mesh.shape in steps]
    found: list[Cause] = _other_numbers(results)
    errors: dict[MeshShape, float] = {}
    for number in range(max(steps.values(), default=0)):
        some = [mesh for mesh in meshes if steps[mesh.shape] > number]
        before = Results([_iteration(mesh, number) for mesh in some])
        after = Results([_iteration(mesh, number, is_after=True) for mesh in some])
        for mesh in after.ran:
            worst = max((each.error() for each in mesh.parameters().values()), default=0.0)
            errors[mesh.shape] = max(errors.get(mesh.shape, 0.0), worst)
        wrong = _wrong_in(number, some, before, after)
        if wrong:
            return Followed((*found, *wrong), steps, errors, tuple(_notes(results, steps)))
    return Followed(tuple(found), steps, errors, tuple(_notes(results, steps)))


def _num_compared(mesh: MeshResult) -> int:
    num_ranks = min(len(each.iterations) if each.num_steps else 0 for each in mesh.observations)
    return min(num_ranks, mesh.expected.num_followed)


def _iteration(mesh: MeshResult, number: int, *, is_after: bool = False) -> MeshResult:
    """One iteration by itself, as a mesh that was seen for it alone: its gradients, or the parameters after it."""

    def of(observation: Observation) -> Observation:
        each = observation.iterations[number]
        return replace(each, gradients=dict(each.after), clips=[], clipped={}) if is_after else each

    turns = tuple(map(of, mesh.expected.replayed))
    right, moved = (Expected(each).gradients for each in (turns, tuple(map(of, mesh.expected.moved))))
    noise = {
        name: magnitude(other - value)
        for name, value in right.items()
        if value is not None and (other := moved.get(name)) is not None
    }
    return MeshResult(mesh.shape, Expected(turns, noise=noise), [of(each) for each in mesh.observations])


def _wrong_in(number: int, meshes: Sequence[MeshResult], before: Results, after: Results) -> list[Cause]:
    """What goes wrong in this iteration, when all before it are right."""
    found = _other_trained(before, number + 1)
    if number and not found:
        found = _not_cleared(before, meshes, number)
        found = found or [InLaterStep.of(each, number + 1) for each in diagnose_gradients(before)]
    return (
        found
        or [*find_untied(after, number + 1)]
        or _left_out(before)
        or _wrong_update(before, after, number + 1)
    )


def _other_numbers(results: Results) -> list[Cause]:
    counts = {}
    for mesh in results.ran:
        own, expected = [each.num_steps for each in mesh.observations], mesh.expected.first.num_steps
        # A loop that leaves the optimizer out on one side is compared up to there.
        if mesh.expected.replayed and all(own) and set(own) != {expected}:
            counts[mesh.shape] = join_words([str(each) for each in sorted(set(own))], "or")
    if not counts:
        return []
    shown = tuple((str(shape), f"{count} times") for shape, count in counts.items())
    expected = results.expected.first.num_steps
    where = results.where(counts)
    return [OtherNumberOfSteps(where, counts=shown, expected=expected)]


def _other_trained(results: Results, step: int) -> list[Cause]:
    trains, freezes = Shapes(list), Shapes(list)
    for mesh in results.ran:
        for name, is_trained in mesh.expected.first.trained.items():
            own = [each.trained[name] for each in mesh.observations if name in each.trained]
            if any(each != is_trained for each in own):
                (freezes if is_trained else trains)[name].append(mesh.shape)
    total = len(results.expected.first.trained)
    kinds = ("trains", trains), ("freezes", freezes)
    return [results.cause(OtherTrained, b, num_names=total, step=step, how=how) for how, b in kinds if b]


def _left_out(results: Results) -> list[Cause]:
    bad = Shapes(list)
    for mesh in results.ran:
        held = {name for each in mesh.observations for name in each.held.settings}
        # A flat parameter has another name, and a rank may have none of a stage.
        known = {name for each in mesh.observations for name in each.trained}
        for name in mesh.expected.first.held.settings if held else ():
            if name in known - held:
                bad[name].append(mesh.shape)
    total = len(results.expected.first.held.settings)
    return [results.cause(LeftOut, bad, num_names=total)] if bad else []


def _not_cleared(results: Results, meshes: Sequence[MeshResult], number: int) -> list[Cause]:
    """Gradients that are right without those of the iteration before."""
    if not results.wrong:
        return []
    bad = Shapes(list)
    for mesh, whole in zip(results.ran, meshes, strict=True):
        last = _iteration(whole, number - 1).parameters()
        for name, samples in mesh.parameters().items():
            if samples.is_right or name not in last:
                continue
            for found, old in zip(samples.found, last[name].found, strict=True):
                if relative_error(found - old, samples.expected, samples.floor) > TOLERANCE:
                    return []
            bad[name].append(mesh.shape)
    return [results.cause(NotCleared, bad, step=number + 1, before=number)]


def _wrong_update(before: Results, after: Results, step: int) -> list[Cause]:
    wrong = after.wrong
    if not wrong:
        return []
    bad = wrong_shapes(wrong)
    settings = dict.fromkeys(_differences(before, bad, _unlike_settings))
    states = dict.fromkeys(_differences(before, bad, _unlike_states))
    return [
        after.cause(
            WrongUpdate,
            bad,
            step=step,
            error=max(each.error() for samples in wrong.values() for each in samples),
            settings=tuple(settings),
            states=tuple(states),
            is_apart=any(
                not f.equal(each.found[0]) for s in wrong.values() for each in s for f in each.found
            ),
        )
    ]


Compare = Callable[[Observation, Observation, str], Iterator[str]]


def _differences(results: Results, bad: Mapping[str, Sequence[MeshShape]], compare: Compare) -> Iterator[str]:
    """What `compare(rank's, one device's, name)` says of parameters that are wrong."""
    for mesh in results.ran:
        for name in (name for name, shapes in bad.items() if mesh.shape in shapes):
            for each in mesh.observations:
                yield from (f"{text} on {mesh.shape}" for text in compare(each, mesh.expected.first, name))


def _unlike_settings(own: Observation, right: Observation, name: str) -> Iterator[str]:
    mine, other = (each.held.settings.get(name, {}) for each in (own, right))
    for key in mine.keys() & other.keys():
        if len(mine[key]) != len(other[key]) or not all(map(_is_same, mine[key], other[key])):
            ours, theirs = (", ".join(f"{n:.6g}" for n in numbers) for numbers in (mine[key], other[key]))
            yield f"{key} is {ours} (one device: {theirs})"


def _unlike_states(own: Observation, right: Observation, name: str) -> Iterator[str]:
    mine, other = (each.held.states.get(name) for each in (own, right))
    if mine is not None and other is not None:
        keys = {*mine, *other}
        yield from sorted(k for k in keys if not _is_same(mine.get(k, 0.0), other.get(k, 0.0)))


def _is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_SAME)


def _notes(results: Results, steps: Mapping[MeshShape, int]) -> Iterator[str]:
    first = results.expected.first
    reason = next((mesh.expected.no_replay for mesh in results.ran if mesh.expected.no_replay), "")
    if first.num_steps and reason and not results.expected.replayed:
        yield f"the optimizer's steps were not compared: {reason}"
    elif first.num_steps > max(steps.values(), default=first.num_steps):
        yield f"{max(steps.values())} of {first.num_steps} optimizer steps were compared"
    without = [
        str(mesh.shape) for mesh in results.ran if not all(each.num_steps for each in mesh.observations)
    ]
    if first.num_steps and without:
        yield (
            f"on {list_names(without)} no optimizer of torch's steps the model's own parameters, as one does on one "
            "device: what it makes of gradients was not compared"
        )
    elif not first.num_steps and len(without) < len(results.ran):
        yield "ranks step an optimizer and one device does not: what it makes of gradients was not compared"
