"""fp64 that stays fp64 where a model casts.

Nearly every transformer of diffusers calls `.float()` or `.to(torch.float32)` somewhere, so an "fp64" run of it
carries fp32 noise: the gradients of two halves of a loss then add up to the whole to 3e-7 only, and to 1e-14 with
the casts lifted (Wan, CPU, torch 2.13, 2026-11).

    undo = lift_casts(model)      # its forward, and the recomputation of its blocks; `Plan(precision="fp64")` does so
    with LiftOperations():        # all that runs within it, backward too; slower, and not under torch.compile
        step(model)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from opensora_accel.wrapping import Forward, wrap_forward

_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type_as}
# These take operands of one type alone, where sums and products of elements take two.
_PRODUCTS = {
    *(torch.einsum, torch.matmul, torch.mm, torch.bmm, nn.functional.linear),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm),
}
_aten = torch.ops.aten
_FACTORIES = {
    *(_aten.zeros, _aten.ones, _aten.empty, _aten.full, _aten.arange, _aten.linspace, _aten.rand, _aten.randn),
    *(_aten.scalar_tensor, _aten._to_copy),  # a cast of whole numbers makes a value as well
}  # fmt: skip
# These make floating-point numbers where no type is given.
_MAKE_FLOATS = {_aten.zeros, _aten.ones, _aten.empty, _aten.linspace, _aten.rand, _aten.randn}


def _narrow(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != torch.float64


def widest(tensor: Tensor) -> Tensor:
    """The tensor, of any shape, in fp64, or complex of two; whole numbers as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


class LiftCasts(TorchFunctionMode):
    """Within it, an fp64 tensor is never cast to a narrower floating-point type, and is multiplied by wide ones.

    Mochi makes positions in fp32, and multiplies them by frequencies that it casts to fp32.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _PRODUCTS and any(
            isinstance(each, Tensor) and each.dtype == torch.float64 for each in tree_leaves(args)
        ):
            return function(*tree_map_only(Tensor, widest, args), **kwargs)
        if not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.float64:
            return function(*args, **kwargs)
        if function in _CASTS and not (function is Tensor.type_as and not args[1].is_floating_point()):
            return args[0]
        # `x.to(other)` takes other's dtype.
        if function is Tensor.to:
            args = tuple(
                torch.float64 if _narrow(arg) else widest(arg) if isinstance(arg, Tensor) else arg
                for arg in args
            )
        if _narrow(kwargs.get("dtype")):
            kwargs = {**kwargs, "dtype": torch.float64}
        return function(*args, **kwargs)


class LiftOperations(TorchDispatchMode):
    """`LiftCasts` for all that runs within it, backward and recomputation too, where function modes are off.

    What is made in fp32 from nothing or from whole numbers is made in fp64 as well, since it will meet fp64. Slower
    than `LiftCasts`, and not seen by torch.compile.

    Args:
        note: is called with the dtype of every cast that was lifted, from within the cast.
    """

    def __init__(self, note: Callable[[torch.dtype], None] | None = None):
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Below autograd: what backward computes comes by here too.
        is_double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        is_made = func.overloadpacket in _MAKE_FLOATS and kwargs.get("dtype") is None
        # With `out=` they take none.
        if is_made and any(argument.name == "dtype" for argument in func._schema.arguments):
            kwargs = {**kwargs, "dtype": torch.float64}
        if (is_double or func.overloadpacket in _FACTORIES) and _narrow(kwargs.get("dtype")):
            if self._note is not None and func.overloadpacket is _aten._to_copy and is_double:
                self._note(kwargs["dtype"])
            kwargs = {**kwargs, "dtype": torch.float64}
        result = func(*args, **kwargs)
        is_literal = func is _aten.lift_fresh.default  # torch.tensor(numbers, dtype=torch.float32)
        return result.double() if is_literal and _narrow(result.dtype) else result


def lift_casts(model: nn.Module) -> Callable[[], None]:
    """Makes the model's forward keep fp64 as fp64; returns the function that undoes it.

    The recomputation of a checkpointed block runs outside of the model's forward, and keeps fp64 too. Therefore call
    this before checkpointing is applied, and undo it after that is undone.
    """

    def lifted(original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with LiftCasts():
                return original(*args, **kwargs)

        return forward

    # Blocks are wrapped by themselves too: checkpointing calls them again without the model.
    lists = (child for child in model.modules() if isinstance(child, nn.ModuleList))
    modules = [model, *(block for blocks in lists for block in blocks)]
    undo_each = [wrap_forward(module, lifted) for module in modules]

    def undo() -> None:
        for step in reversed(undo_each):
            step()

    return undo
