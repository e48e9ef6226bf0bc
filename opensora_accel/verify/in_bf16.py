"""Compares how far ranks and one device are off in bf16 (`rounding`), and says where ranks round more."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from opensora_accel.observe import MeshShape
from opensora_accel.verify.causes import Cause, list_names
from opensora_accel.verify.fit import NEGLIGIBLE, largest
from opensora_accel.verify.observation import Observation
from opensora_accel.verify.results import Expected, MeshResult, Results
from opensora_accel.verify.rounding import Rounding

NUM_RUNS = 3
# Of one device's error. From the first on ranks round more, whatever they do; of n numbers from 1 + 3 / √n times that
# on, since of few numbers the error itself is known badly. Less is told of many numbers alone: what modules are given
# and give. From the second on ranks round more if they are off further the more of them there are, by the factor
# behind it; from the third on, if their code casts to half precision where one device's does not.
TWICE, CHANCE = 2.0, 3.0
_GROWING, _GROWTH, _CASTING = 1.4, 1.1, 1.25
_ENOUGH = 500
# What one device has in fp32 is off by less than the first. Ranks may have it in bf16, as it may be cast a module
# earlier or later, and are then off by less than the second.
_IN_FP32, _ROUNDED_ONCE = 2.0**-11, 2.0**-7
# Of a gradient's norm: more is no rounding.
_LOST = 0.5

Key = tuple[str, ...]
"""("gradient", a parameter's name), or ("given" or "gives", a module's name, which tensor)."""


# What is wrong in bf16 alone.


@dataclass(frozen=True)
class FailsInBf16(Cause):
    kind = "rounding"
    WHAT = "in bf16, as it is run, the step fails: {message}"
    REMEDY = "it ends well in fp64: look for what asks for one type, or mixes two"
    message: str = ""


@dataclass(frozen=True)
class LostInBf16(Cause):
    kind = "rounding"
    WHAT = "in bf16, as it is run, one device already loses the gradient of {count}"
    REMEDY = (
        "no rounding does that: look for weights that autocast has cached from a forward without gradients in the same "
        "region, for a cast within no_grad, for numbers beyond bf16's digits (timesteps, positions)"
    )


@dataclass(frozen=True)
class RoundsMore(Cause):
    """In bf16, ranks are off by more than one device."""

    kind = "rounding"
    factors: tuple[tuple[str, float], ...] = ()  # of one device's error, by mesh
    side: str = "gives"  # of a module what it is given, or what it gives; or a parameter's gradient
    module: str = ""
    casts: tuple[str, ...] = ()  # to half precision, on ranks alone

    @property
    def what(self) -> str:
        shown = ", ".join(f"{factor:.2f} on {mesh}" for mesh, factor in self.factors)
        name = self.module or "model"
        place = {
            "given": f"what the module {name} is given",
            "gives": f"what the module {name} gives",
            "gradient": f"the gradient of {name}",
        }[self.side]
        casts = f"; ranks alone cast to {list_names(self.casts)}" if self.casts else ""
        return (
            f"in bf16 ranks round more than one device {self.where}: {place} is off by {shown} times its error"
            + casts
        )

    @property
    def remedy(self) -> str:
        if self.side == "gradient":
            return "gradients of several ranks are added up in bf16: add them in fp32, and round the sum"
        return (
            "between the module before and this one, what several ranks have is put together in bf16: merge outputs "
            "and log-sum-exps, and add up partial sums, in fp32, and round once"
        )


@dataclass(frozen=True)
class RoundedOnTheWay(Cause):
    """Ranks cast gradients to half precision, and all before them is right to fp32."""

    kind = "rounding"
    REMEDY = "gradients of several ranks are added up in half precision: add them up in fp32"
    factors: tuple[tuple[str, float], ...] = ()  # errors, as parts of the gradient, by mesh
    parameter: str = ""
    casts: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        shown = ", ".join(f"{factor:.1e} on {mesh}" for mesh, factor in self.factors)
        return (
            f"ranks round gradients to half precision {self.where}, at {list_names(self.casts)}: with all else in "
            f"fp32, that of {self.parameter} is off by {shown}, of {self.count}"
        )


class Runner(Protocol):
    """Runs the step on one device, a data rank's turn each, or on the ranks of a mesh."""

    def turns(self, shape: MeshShape, **options: Any) -> list[Observation]: ...
    def ranks(self, shape: MeshShape, **options: Any) -> list[Observation]: ...


class Errors:
    """Squares of errors, and of what is right, by what they are of."""

    def __init__(self) -> None:
        self._sums: defaultdict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._numbers: defaultdict[Key, int] = defaultdict(int)

    def add(self, key: Key, found: Tensor, right: Tensor) -> None:
        sums = self._sums[key]
        error = (found - right).square().sum().item()
        sums[0] += error if math.isfinite(error) else math.inf
        sums[1] += right.square().sum().item()
        self._numbers[key] += right.numel()

    def __getitem__(self, key: Key) -> float:
        error, right = self._sums[key]
        return math.sqrt(error / right) if right else 0.0

    def __iter__(self) -> Iterator[Key]:
        return iter(self._sums)

    def number(self, key: Key) -> int:
        """How many numbers were compared."""
        return self._numbers[key]

    def add_calls(self, found: Sequence[Observation], right: Sequence[Observation]) -> None:
        """What modules were given and gave, rank by rank."""
        for narrow, wide in zip(found, right, strict=True):
            for call, sides in wide.calls.items():
                pairs = zip(("given", "gives"), narrow.calls.get(call, ()), sides, strict=False)
                for side, ours, theirs in pairs:
                    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
                        if one.shape == other.shape and other.is_floating_point():
                            self.add((side, call[0], str(place)), one, other)


@dataclass(frozen=True)
class InBf16:
    """How far one device is off, as a part of each parameter's gradient, and ranks in parts of that."""

    error: float = 0.0  # the median over parameters
    ratios: Mapping[str, float] = field(default_factory=dict)  # by mesh: the median over parameters
    causes: tuple[Cause, ...] = ()
    reason: str = ""  # why it was not looked at
    num_steps: int = (
        1  # of the optimizer, in which one device's gradients are off by no more than rounding explains
    )

    def __str__(self) -> str:
        if self.reason:
            return f"in bf16: {self.reason}"
        meshes = ", ".join(f"{mesh}: {ratio:.2f} of that" for mesh, ratio in self.ratios.items())
        beside = ", and more than that as told below" if self.causes else ""
        if self.num_steps > 1:
            beside += f"; in each of {self.num_steps} steps by what rounding explains"
        return f"in bf16 one device is off by {self.error:.2%} of a gradient; {meshes}{beside}"


def look_in_bf16(results: Results, runner: Runner, say: Callable[[str], None]) -> InBf16:
    """Runs the step in fp64 and in bf16 from several sets of weights, on one device and on every mesh."""
    shapes = [mesh.shape for mesh in results.ran]
    wraps = autocast_wraps(results)
    floor = NEGLIGIBLE * largest(results.expected.gradients.values())
    names = [
        n for n, g in results.expected.gradients.items() if g is not None and float(g.abs().max()) > floor
    ]
    of_one: dict[int, Errors] = {}
    of_mesh = {shape: Errors() for shape in shapes}
    for number in range(NUM_RUNS):
        wide, narrow = (Rounding(number, is_narrow, wraps) for is_narrow in (False, True))
        right: dict[int, Mapping[str, Tensor | None]] = {}
        exact_of: dict[int, Sequence[Observation]] = {}
        for shape in shapes:
            size = shape.data_size
            if size not in right:
                say(f"in bf16, one device, {number + 1} of {NUM_RUNS}")
                exact, found = (runner.turns(shape, rounding=each, is_traced=True) for each in (wide, narrow))
                exact_of[size], right[size] = exact, _mean(exact, names)
                errors = of_one.setdefault(size, Errors())
                _add_gradients(errors, _mean(found, names), right[size])
                errors.add_calls(found, exact)
            say(f"in bf16, {shape}, {number + 1} of {NUM_RUNS}")
            exact, found = (runner.ranks(shape, rounding=each, is_traced=True) for each in (wide, narrow))
            _add_gradients_of_ranks(of_mesh[shape], shape, exact_of[size], found, right[size])
            of_mesh[shape].add_calls(found, exact)
    lost = [name for name in names if any(errors["gradient", name] > _LOST for errors in of_one.values())]
    beside = {shape: ratios(of_mesh[shape], of_one[shape.data_size]) for shape in shapes}
    causes: list[Cause] = []
    casts = _casts_of_ranks(results)
    if lost:
        causes.append(results.cause(LostInBf16, {name: shapes for name in lost}, over=()))
    else:
        causes += _more(results, shapes, beside, of_one[shapes[0].data_size].number, casts)
    if casts and not causes:
        say("in fp32, where ranks alone cast")
        causes += _rounded_on_the_way(results, shapes, runner, names, casts)
    errors = next(iter(of_one.values()))
    return InBf16(
        statistics.median(errors["gradient", name] for name in names),
        {str(shape): _typical(beside[shape]) for shape in shapes},
        tuple(causes),
    )


def autocast_wraps(results: Results) -> bool:
    """Whether autocast is to stand around the step; one with autocast of its own is run as it is."""
    return not any(cast.startswith("autocast") for turn in results.expected.turns for cast in turn.lifted)


def _mean(turns: Sequence[Observation], names: Sequence[str]) -> dict[str, Tensor | None]:
    means: dict[str, Tensor | None] = {}
    for name in names:
        present = [g for turn in turns if (g := turn.gradients.get(name)) is not None]
        means[name] = torch.stack(present).sum(0) / len(turns) if present else None
    return means


def _add_gradients(
    errors: Errors, found: Mapping[str, Tensor | None], right: Mapping[str, Tensor | None]
) -> None:
    for name, gradient in right.items():
        own = found.get(name)
        if gradient is not None and (own is None or own.shape == gradient.shape):
            errors.add(("gradient", name), torch.zeros_like(gradient) if own is None else own, gradient)


def _add_gradients_of_ranks(
    errors: Errors,
    shape: MeshShape,
    turns: Sequence[Observation],
    found: Sequence[Observation],
    right: Mapping[str, Tensor | None],
) -> None:
    """Shards, stages and experts are put together as the proof puts them together."""
    beside = MeshResult(shape, Expected(tuple(turns)), found).parameters()
    for name, gradient in right.items():
        for own in beside[name].found if name in beside else (None,):
            _add_gradients(errors, {name: own}, {name: gradient})


def ratios(of_ranks: Errors, of_one: Errors) -> dict[Key, float]:
    """The errors of ranks in those of one device, or the other way in those that rounding explains."""
    of_both = set(of_one)
    both = [key for key in of_ranks if key in of_both]
    scales = {key: of_one[key] if of_one[key] > _IN_FP32 else _ROUNDED_ONCE for key in both}
    return {key: of_ranks[key] / scales[key] for key in both}


def _typical(ratios: Mapping[Key, float]) -> float:
    return statistics.median(ratio for key, ratio in ratios.items() if key[0] == "gradient")


def _more(
    results: Results,
    shapes: Sequence[MeshShape],
    ratios: Mapping[MeshShape, Mapping[Key, float]],
    number: Callable[[Key], int],
    casts: tuple[str, ...],
) -> list[Cause]:
    """Where ranks are off by more than one device, the first place in forward, or else in backward."""
    worst: dict[Key, dict[MeshShape, float]] = {}
    for key in dict.fromkeys(key for shape in shapes for key in ratios[shape]):
        by_shape = {shape: ratios[shape][key] for shape in shapes if key in ratios[shape]}
        most = max(by_shape.values())
        is_twice = most >= TWICE * (1 + CHANCE / math.sqrt(number(key)))
        are_many = key[0] != "gradient" and number(key) >= _ENOUGH
        is_growing = most >= _GROWING and _grows(by_shape)
        if is_twice or (are_many and (is_growing or (bool(casts) and most >= _CASTING))):
            worst[key] = by_shape
    if not worst:
        return []
    # Modules stand in the order in which they ended; gradients come from the loss down.
    order = list(results.expected.first.backward_order)
    in_forward = [key for key in worst if key[0] != "gradient"]
    in_backward = sorted(
        (key for key in worst if key[0] == "gradient"), key=lambda key: _place(order, key[1])
    )
    first = (in_forward or in_backward)[0]
    factors = tuple((str(shape), ratio) for shape, ratio in worst[first].items())
    shown = [
        shape for shape, ratio in worst[first].items() if ratio >= min(_GROWING, max(worst[first].values()))
    ]
    names = tuple(key[1] for key in in_backward)
    bad = {name: shown for name in names} or {results.names[0]: shown}
    return [results.cause(RoundsMore, bad, factors=factors, side=first[0], module=first[1], casts=casts)]


def _rounded_on_the_way(
    results: Results,
    shapes: Sequence[MeshShape],
    runner: Runner,
    names: Sequence[str],
    casts: tuple[str, ...],
) -> list[Cause]:
    """Gradients that ranks cast to half precision, which bf16 everywhere else would hide.

    In fp32 one device is off by 1e-7, and what is rounded once by 1e-3. Where activations are rounded as well this says
    nothing: in bf16 they have these digits anyway.
    """
    wide, narrow = Rounding(0, is_narrow=False), Rounding(0, is_narrow=True, in_fp32=True)
    worst: dict[str, dict[MeshShape, float]] = defaultdict(dict)
    for shape in shapes:
        exact_turns, one = (runner.turns(shape, rounding=each, is_traced=True) for each in (wide, narrow))
        right, of_one, of_mesh = _mean(exact_turns, names), Errors(), Errors()
        _add_gradients(of_one, _mean(one, names), right)
        exact, found = (runner.ranks(shape, rounding=each, is_traced=True) for each in (wide, narrow))
        _add_gradients_of_ranks(of_mesh, shape, exact_turns, found, right)
        calls = Errors()
        calls.add_calls(found, exact)
        if any(calls[key] > _IN_FP32 / 4 for key in calls):
            return []
        for name in names:
            error = of_mesh["gradient", name]
            if _IN_FP32 / 2 < error < math.inf and error > 100 * of_one["gradient", name]:
                worst[name][shape] = error
    if not worst:
        return []
    order = list(results.expected.first.backward_order)
    first = min(worst, key=lambda name: _place(order, name))
    factors = tuple((str(shape), error) for shape, error in worst[first].items())
    bad = {name: list(by_shape) for name, by_shape in worst.items()}
    return [results.cause(RoundedOnTheWay, bad, factors=factors, parameter=first, casts=casts)]


def _casts_of_ranks(results: Results) -> tuple[str, ...]:
    """Casts to half precision that ranks make and one device does not, by line."""
    of_one = {cast for turn in results.expected.turns for cast in turn.lifted}
    of_ranks = (cast for mesh in results.ran for seen in mesh.observations for cast in seen.lifted)
    return tuple(dict.fromkeys(cast for cast in of_ranks if cast not in of_one))


def _place(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _grows(by_shape: Mapping[MeshShape, float]) -> bool:
    """Whether more ranks that share a sample are off further than fewer of them."""
    by_number = sorted((shape.world_size // shape.data_size, ratio) for shape, ratio in by_shape.items())
    several = [each for each in by_number if each[0] > 1]
    return bool(several) and several[-1][0] > several[0][0] and several[-1][1] >= _GROWTH * several[0][1]
