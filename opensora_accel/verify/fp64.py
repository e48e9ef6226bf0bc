"""Double precision that stays double inside models which cast to fp32 on their way, and models made fit for it.

Nearly every transformer of diffusers calls `.float()` or `.to(torch.float32)` somewhere, so an "fp64" run of it
carries fp32 noise: the gradients of two halves of a loss then add up to the whole to 3e-7 only, and to 1e-14 with
the casts lifted (Wan, CPU, torch 2.13, 2026-11).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_accel.verify.parameters import widest
from opensora_accel.wrapping import Forward, wrap_forward

_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type_as}


class LiftCasts(TorchFunctionMode):
    """Within it, an fp64 tensor is never cast to a narrower floating-point type."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.float64:
            return function(*args, **kwargs)
        if function in _CASTS and not (function is Tensor.type_as and not args[1].is_floating_point()):
            return args[0]
        if function is Tensor.to:
            args = tuple(_widened(arg) for arg in args)
        if _narrow(kwargs.get("dtype")):
            kwargs = {**kwargs, "dtype": torch.float64}
        return function(*args, **kwargs)


_aten = torch.ops.aten
_FACTORIES = {
    *(_aten.zeros, _aten.ones, _aten.empty, _aten.full, _aten.arange, _aten.linspace, _aten.rand, _aten.randn),
    *(_aten.scalar_tensor, _aten._to_copy),  # a cast of whole numbers makes a value as well
}  # fmt: skip


class LiftOperations(TorchDispatchMode):
    """`LiftCasts` for all that runs within it, backward and recomputation too, where function modes are off.

    What is made in fp32 from nothing or from whole numbers is made in fp64 as well, since it will meet fp64. Slower
    than `LiftCasts`, and not seen by torch.compile.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if (is_double or func.overloadpacket in _FACTORIES) and _narrow(kwargs.get("dtype")):
            kwargs = {**kwargs, "dtype": torch.float64}
        result = func(*args, **kwargs)
        is_literal = func is _aten.lift_fresh.default  # torch.tensor(numbers, dtype=torch.float32)
        return result.double() if is_literal and _narrow(result.dtype) else result


def _narrow(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != torch.float64


def _widened(argument: Any) -> Any:
    if _narrow(argument):
        return torch.float64
    if isinstance(argument, Tensor) and _narrow(argument.dtype):
        return argument.double()  # `x.to(other)` takes other's dtype
    return argument


def lift_casts(model: nn.Module) -> Callable[[], None]:
    """Makes the model's forward keep fp64 as fp64; returns the function that undoes it.

    The recomputation of a checkpointed block runs outside of the model's forward, and keeps fp64 too. Therefore call
    this before checkpointing is applied, and undo it after that is undone.
    """
    lists = (child for child in model.modules() if isinstance(child, nn.ModuleList))
    modules = [model, *(block for blocks in lists for block in blocks)]
    undo_each = [wrap_forward(module, _lifted) for module in modules]

    def undo() -> None:
        for step in reversed(undo_each):
            step()

    return undo


def _lifted(original: Forward) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with LiftCasts():
            return original(*args, **kwargs)

    return forward


def prepare_model(model: nn.Module) -> list[str]:
    """Makes the model fit for a proof in fp64, and returns what was changed, in sentences.

    Its parameters become fp64, its dropouts 0. A parameter with one value throughout gets others: behind a gate of 0
    every gradient is 0, right or wrong.
    """
    notes = []
    model._apply(widest)
    dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    for dropout in dropouts:
        dropout.p = 0.0
    if dropouts:
        notes.append(f"{len(dropouts)} dropouts were set to 0: a split sequence cannot draw the same masks")
    constant = [(n, p) for n, p in model.named_parameters() if not p.is_meta and _is_constant(p)]
    for name, parameter in constant:
        _vary(name, parameter)
    if constant:
        notes.append(
            f"{len(constant)} parameters with one value throughout (gates and biases of 0, norms of 1) were given "
            "random ones: behind a gate of 0 every gradient is 0, right or wrong"
        )
    return notes


def _is_constant(parameter: Tensor) -> bool:
    is_number = parameter.is_floating_point() or parameter.is_complex()
    return is_number and parameter.numel() > 0 and bool((parameter == parameter.flatten()[0]).all())


@torch.no_grad()
def _vary(name: str, parameter: Tensor) -> None:
    """Random values that depend on the name alone, near what is there. A scale under a root keeps its sign."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    fan_in = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 25
    noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.5 / math.sqrt(fan_in)
    if parameter.any():
        parameter.mul_(noise.exp())
    else:
        parameter.add_(noise)
