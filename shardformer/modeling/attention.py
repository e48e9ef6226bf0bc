"""Sequence-parallel attention inside a model's own attention module.

The module keeps its projections, norms and rotary embedding; only the kernel call at its heart is led elsewhere.
So one piece of code serves every model that ends in `scaled_dot_product_attention`, which all processors of
diffusers do on their native backend.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opensora_accel.wrapping import Forward, wrap_forward

Attention = Callable[..., Tensor]
"""(q, k, v, *, mask, causal, scale) -> out, in the layout [B, S, H, D]; the mask as the model gave it."""


_running = threading.local()  # autograd recomputes on threads of its own


class RedirectAttention(TorchFunctionMode):
    """Within it, `F.scaled_dot_product_attention` is `attention`, and its calls are counted."""

    def __init__(self, attention: Attention):
        super().__init__()
        self.attention = attention
        self.num_calls = 0

    def __enter__(self) -> RedirectAttention:
        self._outer = getattr(_running, "mode", None)
        _running.mode = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _running.mode = self._outer
        super().__exit__(*error)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is not F.scaled_dot_product_attention or _running.mode is not self:
            return function(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """torch's own arguments, [B, H, S, D]; grouped heads are seen from the shapes."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = self.attend(q, k, v, dropout_p, mask=attn_mask, causal=is_causal, scale=scale)
        return out.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, **options: Any) -> Tensor:
        if dropout:
            raise ValueError(
                f"attention dropout ({dropout}) would drop other weights than on one device; set it to 0"
            )
        self.num_calls += 1
        with _outside():
            return self.attention(q, k, v, **options)


@contextmanager
def _outside() -> Iterator[None]:
    """What takes the place of a kernel may call one."""
    mode, _running.mode = _running.mode, None
    try:
        yield
    finally:
        _running.mode = mode


def lead_kernel(module: nn.Module, function: str) -> Callable[[], None]:
    """Leads a function of the model's own package, where it has one of that name, to the mode that runs.

    Models that call flash-attn do not pass torch's own entry, which is all that a function mode sees. Outside of a
    redirected module the function is what it was.
    """
    package = type(module).__module__.rpartition(".")[0]
    undo = ExitStack()
    for name, found in list(sys.modules.items()):
        original = vars(found).get(function) if name.rpartition(".")[0] == package else None
        if callable(original):
            setattr(found, function, _led(original))
            undo.callback(setattr, found, function, original)
    return undo.close


def _led(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of flash-attn's arguments those that attention here has too."""

    @functools.wraps(original)
    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        **others: Any,
    ) -> Tensor:
        mode: RedirectAttention | None = getattr(_running, "mode", None)
        if mode is None:
            options = {"dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal}
            changed = {name: value for name, value in options.items() if value}
            return original(q, k, v, **changed, **others)
        if any(value not in (None, False, 0, 0.0, (-1, -1)) for value in others.values()):
            raise ValueError(f"sequence-parallel attention has no {', '.join(others)}; leave it out")
        return mode.attend(q, k, v, dropout_p, mask=None, causal=causal, scale=softmax_scale)

    return kernel


def redirect_attention(module: nn.Module, name: str, attention: Attention) -> Callable[[], None]:
    """Leads the kernel call inside `module.forward` to `attention`; returns the function that undoes it."""

    def redirected(original: Forward) -> Forward:
        # The compiler breaks its graph at nearly every tensor method under a function mode; so once, around all.
        @torch.compiler.disable(
            reason="sequence-parallel attention communicates; compiled code goes on around it"
        )
        def forward(*args: Any, **kwargs: Any) -> Any:
            with RedirectAttention(attention) as mode:
                out = original(*args, **kwargs)
            if mode.num_calls == 0:
                raise ValueError(
                    f"{name} attended to this rank's tokens alone: it did not call scaled_dot_product_attention; "
                    'select that backend (diffusers: model.set_attention_backend("native"))'
                )
            return out

        return forward

    return wrap_forward(module, redirected)
