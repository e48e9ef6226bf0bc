"""Linear attention inside a model's own attention module, over a split sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from opensora_accel.attention import linear_attention

_KNOWN = ("SanaLinearAttnProcessor3_0",)


class SpreadLinearAttention:
    """SANA-Video's attention processor; only the sums over the tokens go over all ranks."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[B, S/P, C] in and out.

        Args:
            encoder_hidden_states, attention_mask: None; diffusers' signature has them.
            rotary_emb: cosines and sines [1, S/P, 1, D].

        Raises:
            ValueError: one of those is given that must be None.

        Communication: that of `linear_attention`.
        """
        if attention_mask is not None or encoder_hidden_states is not None:
            raise ValueError("linear attention is self-attention without a mask")
        # What treats each token alone stays as it is in diffusers; only `linear_attention` is ours.
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        q, k, v = (tensor.unflatten(2, (attn.heads, -1)) for tensor in (F.relu(q), F.relu(k), v))
        rotated_q, rotated_k = (None if rotary_emb is None else _rotate(x, *rotary_emb) for x in (q, k))
        out = linear_attention(q, k, v, self.group, rotated_q=rotated_q, rotated_k=rotated_k)
        out = out.flatten(2).to(hidden_states.dtype)
        return attn.to_out[1](attn.to_out[0](out))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (0, 1), (2, 3), … of x [B, S/P, H, D]; cos, sin [1, S/P, 1, D] hold every angle twice."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    # One angle for each pair, [1, S/P, 1, D/2].
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    turned = (even * cos - odd * sin, even * sin + odd * cos)
    return torch.stack(turned, -1).flatten(-2).type_as(x)


def redirect_linear_attention(module: nn.Module, name: str, group: dist.ProcessGroup) -> Callable[[], None]:
    """Makes `module` sum over all ranks' tokens; returns the function that undoes it.

    Raises:
        ValueError: the module's processor is none that is known.
    """
    original = getattr(module, "processor", None)
    if type(original).__name__ not in _KNOWN:
        raise ValueError(
            f"{name} has the processor {type(original).__name__}; linear attention is known of {', '.join(_KNOWN)}"
        )
    module.processor = SpreadLinearAttention(group)  # type: ignore[assignment]

    def undo() -> None:
        module.processor = original  # type: ignore[assignment]

    return undo
