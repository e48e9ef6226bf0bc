"""What one forward of a model shows of its tokens: which modules are called with them, and where they are attended to.

The model runs twice, on the same inputs and weights. The second time, noise is added to the tokens that the first block
gets. What differs then was made of these tokens, and under sequence parallelism it is a rank's share by itself. What
does not differ, and has as many rows as there are tokens, was made beside them and has to be split. With 75 tokens:

    blocks.0(x=[2, 75, 36])           first run  0.31 …   second run  0.36 …   made of the tokens
    blocks.0(rotary=[75, 12])         first run  0.54 …   second run  0.54 …   made beside them: split it
    blocks.0(context=[2, 7, 36])      first run  0.92 …   second run  0.92 …   no row for each token: leave it
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opensora_accel.arguments import tensors_in
from opensora_accel.attention import torch_attention
from shardformer.functions import packages_of, replace_function

# Names of the first three parameters of functions that attend, as kernels have them.
_QUERY_NAMES, _KEY_NAMES = ("q", "query", "query_states"), ("k", "key", "key_states")


@dataclass(frozen=True)
class Leaf:
    """A tensor in an argument or output: the argument's name, and the item where it is a tuple or list."""

    name: str
    index: int | None
    tensor: Tensor
    # A copy, because the model may write to the tensor later.
    value: Tensor


@dataclass
class Call:
    """A call of a module."""

    path: str
    module: nn.Module
    # Paths of the modules that run around it, from the model on.
    within: tuple[str, ...]
    arguments: list[Leaf]
    # Whole numbers among the arguments.
    numbers: dict[str, int]
    outputs: list[Leaf] = field(default_factory=list)


@dataclass(frozen=True)
class AttentionCall:
    """A call of an attention kernel."""

    # Paths of the modules that run, the innermost last.
    within: tuple[str, ...]
    # The function of the model's package that was called, or None for torch's own.
    function: str | None
    # [B, S, H, D], or packed as [B·S, H, D].
    queries: Tensor
    keys: Tensor
    # How many modules had been called before.
    order: int

    def lengths(self, batch: int) -> tuple[int, int]:
        """How many queries and keys a sample has."""
        shared = batch if self.queries.dim() == 3 else 1
        return self.queries.size(-3) // shared, self.keys.size(-3) // shared


@dataclass(frozen=True)
class FunctionCall:
    """A call, inside attention, of a function of the model's package that returns what one of its arguments is like."""

    name: str
    argument: str
    shape: tuple[int, ...]
    within: tuple[str, ...]
    # How many calls run around it: functions that it calls itself have more.
    depth: int


@dataclass
class Trace:
    """What was called in a forward, in order."""

    calls: list[Call] = field(default_factory=list)
    attentions: list[AttentionCall] = field(default_factory=list)
    functions: list[FunctionCall] = field(default_factory=list)

    def calls_of(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path]


@dataclass(frozen=True)
class Noise:
    """Where noise is added: to an argument of the first call of a module, or to all that some modules return."""

    path: str = ""
    argument: str = ""
    outputs_of: tuple[str, ...] = ()


_NO_NOISE = Noise()


def trace(model: nn.Module, inputs: Mapping[str, Any], noise: Noise = _NO_NOISE) -> Trace:
    """Runs the model on the inputs, and notes what is called. Gradients are on, as in training."""
    recorded = Trace()
    running: list[str] = []
    with ExitStack() as undo:
        for path, module in model.named_modules():
            for handle in _hooks(path, module, recorded, running, noise):
                undo.callback(handle.remove)
        for name in _kernel_names(model):
            undo.callback(replace_function(model, name, _recorder(name, recorded, running)))
        undo.enter_context(_KernelCalls(recorded, running))
        undo.enter_context(_FunctionCalls(model, recorded, running))
        torch.manual_seed(0)
        model(**inputs)
    return recorded


def _hooks(path: str, module: nn.Module, found: Trace, running: list[str], noise: Noise) -> Iterator[Any]:
    signature = inspect.signature(module.forward)
    open_calls: list[Call] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if noise.argument and noise.path == path and not found.calls_of(path):
            bound = signature.bind(*args, **kwargs)
            bound.arguments[noise.argument] = _with_noise(bound.arguments[noise.argument])
            args, kwargs = bound.args, dict(bound.kwargs)
        try:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError:  # the model's own mistake: its forward says it better
            arguments = {}
        numbers = {
            name: value
            for name, value in arguments.items()
            if isinstance(value, int) and not isinstance(value, bool)
        }
        call = Call(path, module, tuple(running), list(_leaves(arguments)), numbers)
        found.calls.append(call)
        open_calls.append(call)
        running.append(path)
        return args, kwargs

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        running.pop()
        if path in noise.outputs_of:
            output = _with_noise(output)
        open_calls.pop().outputs = list(_leaves({"output": output}))
        return output

    yield module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    yield module.register_forward_hook(after)


def _with_noise(value: Any) -> Any:
    """A tensor of numbers, or all in a tuple or list, with noise added; the same noise every time."""
    if isinstance(value, (tuple, list)):
        return type(value)(_with_noise(item) for item in value)
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    generator = torch.Generator(value.device).manual_seed(1)
    return value + torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device)


def _leaves(values: Mapping[str, Any]) -> Iterator[Leaf]:
    for name, value in values.items():
        items = list(enumerate(value)) if isinstance(value, (tuple, list)) else [(None, value)]
        for index, item in items:
            for tensor in tensors_in(item):
                yield Leaf(name, index, tensor, tensor.detach().clone())


class _KernelCalls(TorchFunctionMode):
    """Notes calls of torch's own attention function."""

    def __init__(self, found: Trace, running: list[str]):
        super().__init__()
        self._found, self._running = found, running

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch_attention:
            query = args[0] if args else kwargs["query"]
            key = args[1] if len(args) > 1 else kwargs["key"]
            queries, keys = (each.detach().transpose(1, 2).clone() for each in (query, key))
            self._found.attentions.append(
                AttentionCall(tuple(self._running), None, queries, keys, len(self._found.calls))
            )
        return function(*args, **kwargs)


def _kernel_names(model: nn.Module) -> list[str]:
    """Functions that the model's package defines or imports, and that attend, by their parameters' names."""
    names = set()
    for file in packages_of(model):
        for name, value in list(vars(file).items()):
            if not inspect.isfunction(value) or value.__module__.split(".")[0] == "torch":
                continue
            parameters = list(inspect.signature(value).parameters)[:3]
            if len(parameters) == 3 and parameters[0] in _QUERY_NAMES and parameters[1] in _KEY_NAMES:
                names.add(name)
    return sorted(names)


def _recorder(
    name: str, found: Trace, running: list[str]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            q, k = list(signature.bind(*args, **kwargs).arguments.values())[:2]
            num_before = len(found.attentions)
            out = original(*args, **kwargs)
            within = found.attentions[num_before:]
            is_kernel = isinstance(q, Tensor) and q.dim() in (3, 4) and getattr(out, "shape", None) == q.shape
            # The outermost function that returns what queries are like is the kernel, if it does not hand them on to
            # torch's: one that calls it for each sample does not.
            if is_kernel and [call.function for call in within] != [None]:
                del found.attentions[num_before:]
                queries, keys = q.detach().clone(), k.detach().clone()
                found.attentions.append(AttentionCall(tuple(running), name, queries, keys, len(found.calls)))
            return out

        return recorded

    return wrap


class _FunctionCalls:
    """Notes functions of the model's package that are called inside modules and return a tensor like an argument."""

    def __init__(self, model: nn.Module, found: Trace, running: list[str]):
        self._files = {getattr(file, "__file__", None) for file in packages_of(model)} - {None}
        self._found, self._running = found, running

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        sys.setprofile(self._note)

    def __exit__(self, *_error: Any) -> None:
        sys.setprofile(self._before)

    def _note(self, frame: FrameType, event: str, returned: Any) -> None:
        if (
            event != "return"
            or not isinstance(returned, Tensor)
            or frame.f_code.co_filename not in self._files
        ):
            return
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and next(owner.parameters(), None) is not None:
            return  # a layer
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        for name in names:
            value = frame.f_locals.get(name)
            if isinstance(value, Tensor) and value.dim() >= 3 and value.shape == returned.shape:
                # A method is named with its class, a function by itself; what is defined in a function has no name.
                qualified = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
                if "<locals>" not in qualified:
                    self._found.functions.append(
                        FunctionCall(qualified, name, tuple(value.shape), tuple(self._running), _depth(frame))
                    )
                return


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth
