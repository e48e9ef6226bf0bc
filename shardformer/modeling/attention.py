"""Sequence-parallel attention inside a model's own attention module.

The module keeps its projections, norms and rotary embedding; only the kernel call at its heart is replaced. So one
piece of code serves every model that calls `scaled_dot_product_attention`, which all processors of diffusers do on
their native backend.

    module.forward(x)                                                    x: this rank's tokens
      q, k, v = projections, norms, rotary                               the model's own code
      F.scaled_dot_product_attention(q, k, v)   →   attention(q, k, v)   over the tokens of all ranks
      output projection                                                  the model's own code
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opensora_accel.wrapping import Forward, wrap_forward
from shardformer.modeling.origins import Origins

# (q, k, v, *, mask, causal, scale) -> out, in the layout [B, S, H, D]; the mask as the model gave it.
Attention = Callable[..., Tensor]


_running = threading.local()  # autograd recomputes on threads of its own


class RedirectAttention(TorchFunctionMode):
    """Within it, `F.scaled_dot_product_attention` is `attention`, and its calls are counted."""

    def __init__(self, attention: Attention, origins: Origins | None = None):
        super().__init__()
        self.attention, self.origins = attention, origins
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
        kwargs = kwargs or {}
        # A redirected module within another one, or a kernel that ours calls, is not for this mode.
        if _running.mode is not self:
            return function(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        out = function(*args, **kwargs)
        if self.origins is not None:
            self.origins.note(function, (args, kwargs), out)
        return out

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
        """torch's own arguments, [B, H, S, D]. `enable_gqa` is not needed: the shapes tell grouped heads."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = self.attend(q, k, v, dropout_p, mask=attn_mask, causal=is_causal, scale=scale)
        return out.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, **options: Any) -> Tensor:
        """Calls what takes the kernel's place: q, k, v [B, S/P, H, D] → [B, S/P, H, D].

        Raises:
            ValueError: the model drops attention weights.
        """
        if dropout:
            raise ValueError(
                f"attention dropout ({dropout}) would drop other weights than on one device; set it to 0"
            )
        self.num_calls += 1
        if self.origins is not None and isinstance(options["mask"], Tensor):
            self.origins.check_mask(options["mask"], k.size(1))
        # What takes the place of a kernel may call one, which is not to be redirected.
        mode, _running.mode = _running.mode, None
        try:
            out = self.attention(q, k, v, **options)
        finally:
            _running.mode = mode
        if self.origins is not None:
            self.origins.note_attention(out)
        return out


def running_redirection() -> RedirectAttention | None:
    """The redirection of the attention module that runs on this thread; None where none is redirected."""
    return getattr(_running, "mode", None)


def running_attention() -> Callable[..., Tensor] | None:
    """What takes the place of kernel calls in the module that runs on this thread; None where it is not redirected."""
    mode = running_redirection()
    return None if mode is None else mode.attend


def redirect_attention(
    module: nn.Module, name: str, attention: Attention, counts: Callable[[], frozenset[int]]
) -> Callable[[], None]:
    """Replaces the kernel call inside `module.forward` by `attention`; returns the function that undoes it.

    `counts()`: this rank's number of tokens, and of frames, in the forward that runs. In the module's first call
    nothing may be made from them: `Origins`.
    """
    is_checked = False

    def redirected(original: Forward) -> Forward:
        # The compiler breaks its graph at nearly every tensor method under a function mode; so once, around all.
        @torch.compiler.disable(
            reason="sequence-parallel attention communicates; compiled code goes on around it"
        )
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_checked
            # Without a graph, what autograd functions return cannot be told from what the model makes.
            looks = not is_checked and torch.is_grad_enabled()
            origins = Origins(name, counts, (args, kwargs)) if looks else None
            with RedirectAttention(attention, origins) as mode:
                out = original(*args, **kwargs)
            is_checked = is_checked or looks
            if mode.num_calls == 0:
                raise ValueError(
                    f"{name} attended to this rank's tokens alone: it did not call scaled_dot_product_attention; "
                    'select that backend (diffusers: model.set_attention_backend("native"))'
                )
            return out

        return forward

    return wrap_forward(module, redirected)
