"""Which operator's backward is not the derivative of its forward, asked of each by itself while the step runs.

Every operator that somebody has written (a `torch.autograd.Function`, an operator of a library, a module's forward) is
called again, with what it was called with. Of outputs y and any v, ⟨v, y⟩ is a number; its derivative along a direction
d of the inputs is measured, and backward, given v, says that it is ⟨g, d⟩. torch's own operators are taken at their
word. A module is asked only where nothing within it is wrong already, so what is named is the innermost.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from opensora_accel.observe import find_call_site
from opensora_accel.verify.observation import Probe
from opensora_accel.verify.parameters import map_tensors, named_modules
from opensora_accel.verify.stop_gradients import StopGradients, around_functions

# Steps, as parts of a parameter's size. A long one has few rounding errors, a short one crosses few kinks.
_STEPS = (1e-3, 1e-5, 1e-7)
# Of what all arguments contribute. From the first on a gradient is wrong; an error of the measured change beyond the
# second leaves open what is right.
TOLERANCE, MOST_UNKNOWN = 1e-6, 1e-2
# Of a direction, where what is moved is zero.
SIZE_OF_ZEROS = 0.1
# Operators that are torch's own, whose gradients its own tests prove.
_OF_TORCH = {"aten", "prims", "prim", "_c10d_functional", "c10d", "profiler", "higher_order", "flex_lib"}
_MOST_FOUND = 8


def richardson(central: Callable[[float], float], scale: float, rounding: float) -> tuple[float, float]:
    """A derivative from differences, and how far it may be off.

    Args:
        central: the difference to both sides of a step of this length, over twice the length.
        scale: what the derivative's parts add up to, in absolute values.
        rounding: errors of the values that are subtracted.
    """
    measured, error = 0.0, float("inf")
    for step in _STEPS:
        one, two = central(step), central(step / 2)
        better = (4 * two - one) / 3
        if (doubt := abs(better - two) + rounding / step) < error:
            measured, error = better, doubt
        if error <= TOLERANCE / 10 * max(scale, abs(measured)):
            break
    return measured, error


@dataclass(frozen=True)
class WrongOperator:
    """An operator, what it gives and what it should, along a direction of the arguments that are wrong."""

    name: str
    line: str  # that called it
    arguments: tuple[str, ...]
    given: float
    measured: float
    draws: bool  # within backward: a recomputation that draws other numbers than the forward did

    @property
    def is_cut_off(self) -> bool:
        return not self.given


class OperatorProbe(Probe):
    """Asks every operator of a step; `found` are those that are wrong, in the order of forward."""

    def __init__(self) -> None:
        self.found: list[WrongOperator] = []
        self._is_asking = False

    @contextmanager
    def around(self) -> Iterator[None]:
        with around_functions(self._of_function), _OfLibraries(self):
            yield

    def watch(self, model: nn.Module) -> Callable[[], None]:
        hooks = ExitStack()
        for name, module in named_modules(model):
            # A layer of torch's alone has torch's backward.
            if type(module).__module__.startswith("torch.nn.") and not list(module.children()):
                continue
            stack: list[tuple[int, Any]] = []
            hooks.callback(module.register_forward_pre_hook(partial(self._before_module, stack)).remove)
            after = partial(self._after_module, stack, name)
            hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        return hooks.close

    def ask(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any, signature: Any = None) -> Any:
        """Calls an operator, and asks it."""
        if self._is_busy():
            return call(*args, **kwargs)
        before = draws_now()
        self._is_asking = True  # what it is made of is its own business
        try:
            result = call(*args, **kwargs)
        finally:
            self._is_asking = False
        self._ask(name, call, args, kwargs, (), before, signature, is_module=False)
        return result

    def _is_busy(self) -> bool:
        is_backward = torch._C._current_graph_task_id() != -1
        return self._is_asking or is_backward or not torch.is_grad_enabled() or len(self.found) >= _MOST_FOUND

    def _of_function(self, function: Any, call: Any, args: Any, kwargs: Any) -> Any:
        # Without the context, which comes first where there is no `setup_context`.
        names = list(inspect.signature(function.forward).parameters)
        has_context = function.setup_context is torch.autograd.function._SingleLevelFunction.setup_context
        code = getattr(function.backward, "__code__", None)
        place = "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
        return self.ask(f"{function.__qualname__}.backward{place}", call, args, kwargs, names[has_context:])

    def _before_module(self, stack: list[tuple[int, Any]], _module: nn.Module, _args: Any) -> None:
        stack.append((len(self.found), draws_now()))

    def _after_module(
        self, stack: list[tuple[int, Any]], name: str, module: nn.Module, args: Any, kwargs: Any, _output: Any
    ) -> None:
        num_found, before = stack.pop()
        if not self._is_busy() and len(self.found) == num_found:
            parameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
            where = f"the backward of {name or 'the model'} ({type(module).__qualname__})"
            names = list(inspect.signature(module.forward).parameters)
            self._ask(where, module.forward, args, kwargs, parameters, before, names, is_module=True)

    def _ask(
        self,
        name: str,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        parameters: Sequence[tuple[str, Tensor]],
        before: Any,
        signature: Any,
        *,
        is_module: bool,
    ) -> None:
        afterwards, line = draws_now(), find_call_site().caller
        self._is_asking = True
        try:
            question = _Question(call, args, kwargs, parameters, before, signature, is_module)
            if (answer := question.answer()) is not None:
                self.found.append(WrongOperator(name, line, *answer))
        finally:
            self._is_asking = False
            draw_as(afterwards)


class _OfLibraries(TorchFunctionMode):
    def __init__(self, probe: OperatorProbe):
        super().__init__()
        self._probe = probe

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(function, OpOverload):
            namespace, name = function.namespace, function.name()
        elif isinstance(function, OpOverloadPacket):
            namespace, _, name = function._qualified_op_name.partition("::")
            name = f"{namespace}::{name}"
        else:
            return function(*args, **kwargs)
        if namespace in _OF_TORCH:
            return function(*args, **kwargs)
        overload = (
            function if isinstance(function, OpOverload) else getattr(function, function.overloads()[0])
        )
        names = [argument.name for argument in overload._schema.arguments]
        return self._probe.ask(f"the backward of {name}", function, args, kwargs, names)


class _Question:
    """One operator with what it was called with: its arguments that take gradients, and its parameters."""

    def __init__(
        self, call: Any, args: Any, kwargs: Any, parameters: Any, before: Any, signature: Any, may_stop: bool
    ):
        self._call, self._before, self._parameters = call, before, list(parameters)
        # What a module takes out of the graph on purpose is constant.
        self._may_stop = may_stop
        self._stops: StopGradients | None = None
        leaves, self._structure = tree_flatten((args, kwargs))
        self._leaves = leaves
        self._places = [i for i, each in enumerate(leaves) if isinstance(each, Tensor) and each.requires_grad]
        names = _names_of(args, kwargs, signature)
        self._names = [names.get(id(leaves[i]), f"argument {i}") for i in self._places]
        self._names += [name for name, _ in self._parameters]

    def answer(self) -> tuple[tuple[str, ...], float, float, bool] | None:
        """The arguments that are wrong, what backward gives and what was measured, whether backward draws."""
        points = [self._leaves[i].detach().clone().requires_grad_() for i in self._places]
        outputs = self._outputs(points)
        if not outputs or not self._names:
            return None
        generator = torch.Generator().manual_seed(0)
        weights = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs
        ]
        joined = [(o, w) for o, w in zip(outputs, weights, strict=True) if o.requires_grad]
        own = [*points, *(parameter for _, parameter in self._parameters)]
        state = torch.get_rng_state()
        found: list[Tensor | None] = [None] * len(own)
        if joined:
            ends, gradients = zip(*joined, strict=True)
            found = list(torch.autograd.grad(ends, own, gradients, allow_unused=True))
        draws = not torch.equal(state, torch.get_rng_state())
        moves = []
        for each in own:
            size = each.detach().abs().square().mean().sqrt().item() if each.numel() else 0.0
            noise = torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.dtype)
            moves.append(noise * (size or SIZE_OF_ZEROS))
        whole = self._slope(own, moves, found, weights)
        if whole is None:
            return None
        wrong, given, measured = [], 0.0, 0.0
        for i, name in enumerate(self._names):
            alone = self._slope(own, [m if i == j else None for j, m in enumerate(moves)], found, weights)
            if alone is not None:
                wrong.append(name)
                given, measured = given + alone[0], measured + alone[1]
        return tuple(wrong), *((given, measured) if wrong else whole), draws

    def _slope(
        self,
        own: Sequence[Tensor],
        moves: Sequence[Tensor | None],
        found: Sequence[Any],
        weights: Sequence[Tensor],
    ) -> tuple[float, float] | None:
        """What backward gives and what was measured along `moves`, where these are not the same."""
        parts = [
            _inner(g, move)
            for g, move in zip(found, moves, strict=True)
            if g is not None and move is not None
        ]
        given, scale = sum(parts), sum(map(abs, parts))
        measured, error = richardson(partial(self._central, own, moves, weights), scale, 1e-13)
        size = max(scale, abs(measured))
        is_right = abs(measured - given) <= 10 * error + TOLERANCE * size
        return None if is_right or error > MOST_UNKNOWN * size else (given, measured)

    def _central(
        self, own: Sequence[Tensor], moves: Sequence[Tensor | None], weights: Sequence[Tensor], step: float
    ) -> float:
        values = []
        for side in (step, -step):
            kept = [each.detach().clone() for each in own]
            with torch.no_grad():
                for each, move in zip(own, moves, strict=True):
                    if move is not None:
                        each.data.add_(side * move)
            points = [each.detach().clone().requires_grad_() for each in own[: len(self._places)]]
            outputs = self._outputs(points)
            with torch.no_grad():
                for each, before in zip(own, kept, strict=True):
                    each.data.copy_(before)
            values.append(sum(_inner(o.detach(), w) for o, w in zip(outputs, weights, strict=True)))
        return (values[0] - values[1]) / (2 * step)

    def _outputs(self, points: Sequence[Tensor]) -> list[Tensor]:
        """Floating-point outputs for other arguments, with all else as it was at first."""
        leaves = list(self._leaves)
        for place, point in zip(self._places, points, strict=True):
            leaves[place] = point.view_as(point)  # a leaf cannot be written to
        args, kwargs = tree_unflatten(leaves, self._structure)
        draw_as(self._before)
        outputs: list[Tensor] = []

        def note(_name: str, tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() or tensor.is_complex():
                outputs.append(tensor)
            return tensor

        if self._may_stop:
            self._stops = StopGradients() if self._stops is None else self._stops.again()
        with self._stops.around() if self._stops is not None else nullcontext():
            map_tensors("", self._call(*args, **kwargs), note)
        return outputs


def _names_of(args: Any, kwargs: Any, signature: Sequence[str] | None) -> dict[int, str]:
    names = list(signature or ())
    given = dict(zip(names, args, strict=False)) | kwargs
    found: dict[int, str] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        found.setdefault(id(tensor), name)
        return tensor

    for name, value in given.items():
        map_tensors(name, value, note)
    return found


def _inner(one: Tensor, other: Tensor) -> float:
    """The sum of products; of complex numbers, of their parts."""
    one, other = (
        torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in (one, other)
    )
    return (one.double() * other.double()).sum().item()


def draws_now() -> tuple[Any, ...]:
    """Where torch's and Python's generators are; `draw_as` puts them there again."""
    return torch.get_rng_state(), random.getstate()


def draw_as(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
