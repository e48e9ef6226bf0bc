"""Whether backward, on one device, is the derivative of what forward computes.

A step that is compared with itself on one device shows no mistake that both make: a kernel whose backward is wrong, one
that has none, a recomputation that draws other numbers. So the single device is held against its own loss. Along a
direction d of the parameters the loss changes by ⟨g, d⟩, if g is its gradient; and how it changes can be measured. Of
f(x) = x³ at 2, with a step of 0.2 and one of 0.1 to both sides:

    (f(2.2) − f(1.8)) / 0.4 = 12.04      (f(2.1) − f(1.9)) / 0.2 = 12.01      (4 · 12.01 − 12.04) / 3 = 12

The last is Richardson's: the error of the first two goes with the square of the step, so it cancels. How far the
second is from it says how far it may be trusted, and in fp64 that is nine digits and more. A backward that gives 2x²
has 8 there, in any direction.

Three random directions over all trained parameters tell whether a gradient is wrong, since no mistake is at right
angles to all of them. Which parameters, and which operator, is asked only then (`operators`). What the code cuts off on
purpose (`detach`, `no_grad`) is constant for backward, so it has to be constant for the measured change as well
(`stop_gradients`); that is tried where the plain change says something else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.verify.causes import Cause, Origin, Where, list_names
from opensora_accel.verify.observation import Observation, Probe
from opensora_accel.verify.operators import (
    MOST_UNKNOWN,
    SIZE_OF_ZEROS,
    TOLERANCE,
    OperatorProbe,
    WrongOperator,
    draw_as,
    draws_now,
    richardson,
)
from opensora_accel.verify.parameters import map_tensors, named_parameters, whole
from opensora_accel.verify.results import Results
from opensora_accel.verify.stop_gradients import StopGradients

_NUM_DIRECTIONS = 3
# Outputs of one forward differ by rounding from those of another.
_SAME_OUTPUTS = 1e-9
# How many parameters are asked one by one.
_MOST_ASKED = 64

PATCHED = "the step leaves functions exchanged, and so runs once a process"

Observe = Callable[..., Observation]
"""One turn of the single device, with the probes that it is given."""


# What is wrong on one device already, so that its gradients prove nothing.


@dataclass(frozen=True)
class WrongBackward(Cause):
    """Backward is not the derivative of the forward."""

    kind = "derivative"
    operators: tuple[WrongOperator, ...] = ()
    # Along one random direction of all parameters: by backward, and as the loss changes.
    given: float = 0.0
    measured: float = 0.0

    @property
    def what(self) -> str:
        if not self.operators:
            return (
                f"on one device already, the gradients of {self.count} are not the derivative of the loss: along a "
                f"direction where it changes by {self.measured:.6g}, backward gives {self.given:.6g}"
            )
        first, *others = self.operators
        names = dict.fromkeys(each.name for each in others if each.name != first.name)
        more = f"; so is that of {list_names(list(names))}" if names else ""
        of = f" of {list_names(first.arguments)}" if first.arguments else ""
        return (
            f"on one device already, {first.name} is wrong, called at {first.line}: along a direction{of} where its "
            f"forward changes by {first.measured:.6g}, it gives {first.given:.6g}{more}"
        )

    @property
    def remedy(self) -> str:
        if any(each.draws for each in self.operators):
            return (
                "it draws random numbers within backward: the forward that is computed again has other dropouts than "
                "the first; checkpoint(…, preserve_rng_state=True), or the state of its own generator restored"
            )
        if self.operators and self.operators[0].is_cut_off:
            return (
                "it gives no gradient at all: a kernel without a backward; register one, or take another kernel for "
                "training"
            )
        if self.operators:
            return "mend its backward; torch.autograd.gradcheck in fp64 tries it alone"
        return (
            "each module's own backward is right: look at what the step does between them and at the loss (values "
            "that are cached or changed in place between forward and backward)"
        )


@dataclass(frozen=True)
class CutOff(Cause):
    """Parameters without a gradient, on which the loss depends."""

    kind = "derivative"
    lines: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        at = f", which is cut off at {list_names(self.lines)}" if self.lines else ""
        return f"on one device already, {self.count} get no gradient, though the loss depends on them{at}"

    @property
    def remedy(self) -> str:
        return (
            "a detach, .data, no_grad or a kernel without a backward stands between them and the loss; where that is "
            "meant, freeze them (requires_grad_(False))"
        )


@dataclass(frozen=True)
class OtherThanPlain(Cause):
    """On one device the model is not what its plain version is."""

    kind = "plain"
    WHAT = (
        "on one device already, the model is not what plain_model_fn() makes: {count} have other gradients, up to "
        "{error:.1e} of the largest"
    )
    error: float = 0.0
    origin: Origin | None = None

    @property
    def remedy(self) -> str:
        if self.origin is None or self.origin.name is None:
            return "every module's forward is right: look at the backward of what stands in the plain one's place"
        name = self.origin.name or "the model itself, outside of its modules"
        return (
            f"the forward is another one, first in {name}: look at what stands there in the plain one's place"
        )


@dataclass(frozen=True)
class OtherForward(Cause):
    kind = "forward"
    WHAT = "the model's forward is another one without gradients: its outputs differ by {difference:.1e} of the largest"
    REMEDY = (
        "what samples and validates would not be what was trained: look for torch.is_grad_enabled(), for a faster path "
        "without gradients, for weights that are merged once"
    )
    difference: float = 0.0


@dataclass(frozen=True)
class Slope:
    """How the loss changes along one direction."""

    measured: float
    error: float  # of that, as far as is known
    given: float  # ⟨g, d⟩, by backward
    scale: float  # the sum of |⟨g, d⟩| over parameters: they may cancel

    @property
    def size(self) -> float:
        return max(self.scale, abs(self.measured))

    @property
    def is_known(self) -> bool:
        """Whether the change can be measured: there is no kink or jump here."""
        return self.error <= MOST_UNKNOWN * self.size

    @property
    def is_right(self) -> bool:
        return abs(self.measured - self.given) <= 10 * self.error + TOLERANCE * self.size

    @property
    def difference(self) -> float:
        return abs(self.measured - self.given) / self.size if self.size else 0.0


@dataclass(frozen=True)
class Derivatives:
    """What was found on one device; nothing, where there is a `reason`."""

    slopes: tuple[Slope, ...] = ()
    num_parameters: int = 0
    reason: str = ""
    # By which all gradients are multiplied, beside what was backwarded: a loop may scale them afterwards.
    factor: float = 1.0
    # Parameters whose gradient is wrong, and those that have none although the loss depends on them.
    wrong: tuple[str, ...] = ()
    cut_off: tuple[str, ...] = ()
    operators: tuple[WrongOperator, ...] = ()
    # Lines where values are taken out of the graph, by way of which the loss depends on parameters as well.
    stops: tuple[str, ...] = ()
    # By how much the outputs of a forward without gradients differ, in parts of the largest.
    without_gradients: float = 0.0

    @property
    def causes_doubt(self) -> bool:
        """Whether gradients on one device are wrong."""
        return bool(self.wrong or self.cut_off or self.operators)

    @property
    def error(self) -> float:
        """The largest difference, in parts of what all parameters contribute."""
        return max((slope.difference for slope in self.slopes), default=0.0)

    def __str__(self) -> str:
        if self.reason:
            return f"backward was not held against the forward: {self.reason}"
        if self.causes_doubt:
            return "backward is NOT the derivative of the forward"
        return (
            f"backward is the derivative of the forward to {self.error:.1e}, in {len(self.slopes)} random directions "
            f"of {self.num_parameters} parameters"
        )


def check_derivatives(observe: Observe) -> Derivatives:
    """Runs one turn of the single device some twenty times; more often where something is wrong."""
    forwards, start = Forwards(), Start()
    base = observe(start)
    if base.leaves_patches:
        return Derivatives(reason=PATCHED)
    again, _ = observe(), observe(forwards)
    gradients = {name: g for name, g in base.gradients.items() if name in start.sizes}
    about = Derivatives(num_parameters=len(gradients), without_gradients=forwards.difference)
    if base.loss is None or again.loss is None:
        return replace(about, reason="the step calls no backward(), whose loss could be measured")
    if base.loss != again.loss:
        return replace(about, reason="two runs with the same seeds have different losses")
    measure = _Measure(observe, base.loss, start.sizes)
    slopes = tuple(measure.slope(gradients, number) for number in range(_NUM_DIRECTIONS))
    if not any(slope.measured for slope in slopes) and any(slope.scale for slope in slopes):
        return replace(
            about, reason="the loss does not change with the model's parameters: are they set in forward?"
        )
    if not all(slope.is_known for slope in slopes):
        return replace(
            about, slopes=slopes, reason="the loss has kinks or jumps where it is, at steps of any length"
        )
    if all(slope.is_right for slope in slopes):
        return replace(about, slopes=slopes)
    scaled, factor = _by_one_factor(slopes)
    if all(slope.is_right for slope in scaled):
        return replace(about, slopes=scaled, factor=factor)
    return _look_closer(replace(about, slopes=slopes), observe, measure, gradients)


def causes_on_one_device(found: Derivatives, results: Results) -> list[Cause]:
    """What that is called. All meshes share it."""
    where, total = Where(tuple(mesh.shape for mesh in results.meshes), "everywhere"), found.num_parameters
    causes: list[Cause] = []
    if found.wrong or found.operators:
        causes.append(
            WrongBackward(
                where,
                found.wrong,
                total,
                over=(),
                operators=found.operators,
                given=found.slopes[0].given,
                measured=found.slopes[0].measured,
            )
        )
    if found.cut_off:
        causes.append(CutOff(where, found.cut_off, total, over=(), lines=found.stops))
    if found.without_gradients:
        causes.append(OtherForward(where, difference=found.without_gradients, over=()))
    return causes


def _look_closer(
    about: Derivatives, observe: Observe, measure: _Measure, gradients: Mapping[str, Tensor | None]
) -> Derivatives:
    """Which gradients are wrong, where by design and where by a mistake."""
    idle = (name for name, g in gradients.items() if g is None or not g.any())
    cut_off = tuple(name for name in idle if _depends(measure, name, gradients))
    # What is cut off on purpose is constant from here on.
    recorded = StopGradients()
    observe(recorded)
    held = replace(measure, constants=recorded)
    slopes = tuple(held.slope(gradients, number) for number in range(_NUM_DIRECTIONS))
    if recorded.is_off or not all(slope.is_known for slope in slopes):
        reason = "values that are taken out of the graph differ from run to run, so what depends on them is not known"
        return replace(about, reason=reason)
    scaled, factor = _by_one_factor(slopes)
    if all(slope.is_right for slope in scaled):
        return replace(about, slopes=scaled, factor=factor, cut_off=cut_off, stops=tuple(recorded.lines))
    asked = [name for name in gradients if name not in cut_off]
    asked = asked[:: -(-len(asked) // _MOST_ASKED)] if asked else []
    wrong = tuple(name for name in asked if not held.slope(gradients, 0, (name,)).is_right)
    probe = OperatorProbe()
    observe(probe)
    return replace(about, slopes=slopes, wrong=wrong, cut_off=cut_off, operators=tuple(probe.found))


def _depends(measure: _Measure, name: str, gradients: Mapping[str, Tensor | None]) -> bool:
    slope = measure.slope(gradients, 0, (name,))
    return slope.is_known and abs(slope.measured) > 10 * slope.error


def _by_one_factor(slopes: Sequence[Slope]) -> tuple[tuple[Slope, ...], float]:
    """With all that was measured multiplied by the factor that fits best."""
    squares = sum(slope.measured**2 for slope in slopes)
    factor = sum(slope.measured * slope.given for slope in slopes) / squares if squares else 1.0
    scaled = (
        replace(slope, measured=factor * slope.measured, error=abs(factor) * slope.error) for slope in slopes
    )
    return tuple(scaled), factor


@dataclass(frozen=True)
class _Measure:
    """The loss along a direction. `constants`: what stays as it is where parameters are not moved."""

    observe: Observe
    loss: float  # where they are not
    sizes: Mapping[str, float]
    constants: StopGradients | None = None

    def slope(
        self, gradients: Mapping[str, Tensor | None], number: int, names: Sequence[str] | None = None
    ) -> Slope:
        """Along direction `number` of all parameters, or of those of `names`."""
        names = list(gradients) if names is None else names
        parts = []
        for name in names:
            gradient = gradients[name]
            if gradient is not None:
                move = direction(name, gradient.shape, self.sizes[name], number)
                parts.append((gradient * move).sum().item())
        scale = sum(map(abs, parts))
        central = partial(self._central, number, names)
        measured, error = richardson(central, scale, 1e-15 * abs(self.loss))
        return Slope(measured, error, sum(parts), scale)

    def _central(self, number: int, names: Sequence[str], step: float) -> float:
        losses = []
        for side in (step, -step):
            constants = () if self.constants is None else (self.constants.again(),)
            sizes = {name: self.sizes[name] for name in names}
            losses.append(self.observe(Nudge(side, number, sizes), *constants).loss or 0.0)
        return (losses[0] - losses[1]) / (2 * step)


class Start(Probe):
    """How large parameters are when the model's first forward begins."""

    def __init__(self) -> None:
        self.sizes: dict[str, float] = {}

    def before_first_forward(self, model: nn.Module) -> None:
        for name, parameter in named_parameters(model):
            if parameter.is_floating_point() or parameter.is_complex():
                values = whole(parameter)
                size = values.square().mean().sqrt().item() if values.numel() else 0.0
                self.sizes[name] = size or SIZE_OF_ZEROS


class Nudge(Probe):
    """Moves parameters along a direction before the model's first forward: by then whatever loads them has done so."""

    def __init__(self, step: float, number: int, sizes: Mapping[str, float]):
        self._step, self._number, self._sizes = step, number, sizes

    def before_first_forward(self, model: nn.Module) -> None:
        for name, parameter in named_parameters(model):
            if name in self._sizes:
                values = torch.view_as_real(parameter.data) if parameter.is_complex() else parameter.data
                move = direction(name, values.shape, self._sizes[name], self._number)
                values.add_(self._step * move)


class Forwards(Probe):
    """Holds the model's first forward against the same one without gradients."""

    def __init__(self) -> None:
        self.difference = 0.0
        self._before_call: tuple[Any, ...] = ()
        self._arguments: tuple[Any, Any] = ((), {})
        self._is_over = False

    def watch(self, model: nn.Module) -> Callable[[], None]:
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        after = model.register_forward_hook(self._after, with_kwargs=True)

        def remove() -> None:
            before.remove()
            after.remove()

        return remove

    def _before(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_over:
            # The forward may write to what it is given.
            self._arguments = map_tensors("", (args, kwargs), lambda _, tensor: tensor.detach().clone())
            self._before_call = draws_now()

    def _after(self, model: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if self._is_over or not torch.is_grad_enabled():
            return
        self._is_over = True
        afterwards = draws_now()
        draw_as(self._before_call)
        with torch.no_grad():
            args, kwargs = self._arguments
            found = [_tensors(output), _tensors(model.forward(*args, **kwargs))]
        draw_as(afterwards)
        if [each.shape for each in found[0]] != [each.shape for each in found[1]]:
            self.difference = float("inf")
        elif found[0]:
            largest = max(float(each.abs().max()) if each.numel() else 0.0 for each in found[0])
            apart = (float((a - b).abs().max()) for a, b in zip(*found, strict=True) if a.numel())
            difference = max(apart, default=0.0) / largest if largest else 0.0
            self.difference = difference if difference > _SAME_OUTPUTS else 0.0


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(_name: str, tensor: Tensor) -> Tensor:
        found.append(tensor.detach())
        return tensor

    map_tensors("", value, note)
    return found


def direction(name: str, shape: Sequence[int], size: float, number: int) -> Tensor:
    """Random numbers of a parameter's size and shape (a complex one's as [..., 2]), the same in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + number)
    return size * torch.randn(*shape, generator=generator, dtype=torch.float64)
