"""Sequence-parallel attention inside a model's own attention module.

The module keeps its projections, norms and rotary embedding; only the kernel call at its heart is led elsewhere.
So one piece of code serves every model that ends in `scaled_dot_product_attention`, which all processors of
diffusers do on their native backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opensora_accel.wrapping import Forward, wrap_forward

Attention = Callable[..., Tensor]
"""(q, k, v, *, mask, causal, scale) -> out, in the layout [B, S, H, D]; the mask as the model gave it."""


class RedirectAttention(TorchFunctionMode):
    """Within it, `F.scaled_dot_product_attention` is `attention`, and its calls are counted."""

    def __init__(self, attention: Attention):
        super().__init__()
        self.attention = attention
        self.num_calls = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.num_calls += 1
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
        if dropout_p:
            raise ValueError(
                f"attention dropout ({dropout_p}) would drop other weights than on one device; set it to 0"
            )
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = self.attention(q, k, v, mask=attn_mask, causal=is_causal, scale=scale)
        return out.transpose(1, 2)


def redirect_attention(module: nn.Module, name: str, attention: Attention) -> Callable[[], None]:
    """Leads the kernel call inside `module.forward` to `attention`; returns the function that undoes it."""

    def redirected(original: Forward) -> Forward:
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
