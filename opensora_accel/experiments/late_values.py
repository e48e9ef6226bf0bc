"""Projects the values of an attention module when its kernel is called, and not before.

A model's own code projects q, k and v, norms and rotates q and k, and calls the kernel. Ulysses could send q and k
while v is still to be projected (`overlap.py`), but by then v is there:

    the model's order    to_q  to_k  to_v  norms, rotary  →  kernel(q, k, v)
    wanted               to_q  to_k        norms, rotary  →  send q, k; to_v under it; send v; attend

So the projection returns a tensor that is not computed yet. It knows its shape, dtype and device, and may be reshaped
and transposed, which is all that models do with v. Whatever else is done with it computes it first, so that a model
which adds a norm or a bias to v still gets its numbers, only without the overlap. Outputs are the same to the last bit.
Gradients are too, unless the module takes more than q, k and v from its input: their order in the sum then changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from opensora_accel.attention import torch_attention
from opensora_accel.wrapping import Forward, wrap_forward
from shardformer.modeling import running_redirection

# What a tensor knows without being computed.
_FACTS: set[Any] = {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")
}
_FACTS |= {Tensor.size, Tensor.dim}
# What only looks at the same numbers in another shape.
_VIEWS: set[Any] = {
    getattr(place, name)
    for place in (Tensor, torch)
    for name in ("reshape", "transpose", "permute", "movedim", "unflatten", "flatten", "unsqueeze", "squeeze")
} | {Tensor.view}


class LateTensor(Tensor):
    """A tensor that is computed when somebody needs its numbers."""

    # A tensor without memory that has the shape, strides and dtype.
    _twin: Tensor
    _compute: Callable[[], Tensor]
    _value: Tensor | None

    @staticmethod
    def of(twin: Tensor, device: torch.device, compute: Callable[[], Tensor]) -> LateTensor:
        """What `compute` will return, on `device`; the twin, on the device "meta", is like it."""
        late: LateTensor = Tensor._make_wrapper_subclass(
            LateTensor, twin.shape, strides=twin.stride(), dtype=twin.dtype, device=device
        )
        late._twin, late._compute, late._value = twin, compute, None
        return late

    def value(self) -> Tensor:
        """The tensor, computed for the first who asks."""
        if self._value is None:
            self._value = self._compute()
        return self._value

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        late = args[0] if args else None
        if isinstance(late, LateTensor) and late._value is None:
            if function in _FACTS:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **kwargs)
            if function in _VIEWS:
                twin = function(late._twin, *args[1:], **kwargs)  # which refuses what does not fit
                return LateTensor.of(twin, late.device, lambda: function(late.value(), *args[1:], **kwargs))
        redirection = running_redirection()
        if function is torch_attention and redirection is not None:
            return redirection.scaled_dot_product_attention(*args, **kwargs)
        return function(*computed(args), **computed(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Computed here, below autograd, it would have no gradient.
        raise RuntimeError(f"{function} got values that were not projected yet; set overlap_ulysses=False")


def computed(value: Any) -> Any:
    """The value with every late tensor in it computed."""
    return tree_map_only(LateTensor, LateTensor.value, value)


def project_late(module: nn.Module, name: str) -> Callable[[], None]:
    """Lets the child `name` of an attention module, a linear layer, project when its result is needed.

    Only where the module's kernel call is redirected. Returns the function that undoes it.
    """
    child: Any = module.get_submodule(name)

    def late(original: Forward) -> Forward:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """x: [..., C_in] → [..., C_out]."""
            mode = running_redirection()
            if mode is None or torch.compiler.is_compiling():
                return original(x, *args, **kwargs)
            dtype = (
                torch.get_autocast_dtype(x.device.type)
                if torch.is_autocast_enabled(x.device.type)
                else x.dtype
            )
            twin = torch.empty(*x.shape[:-1], child.out_features, dtype=dtype, device="meta")
            values = LateTensor.of(twin, x.device, lambda: original(x, *args, **kwargs))
            if mode.origins is not None:
                with torch._C.DisableTorchFunction():  # a note of the values must not be an operation on them
                    mode.origins.note(original, x, values)
            return values

        return forward

    return wrap_forward(child, late)
