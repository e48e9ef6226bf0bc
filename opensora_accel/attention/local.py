"""Attention on one rank, in the layout that every parallel attention here shares: [B, S, H, D].

torch chooses the kernel where it can take the call. Slices of a mask go tile by tile (`sliced.py`), and masked keys in
half precision on a GPU to a kernel that leaves them out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opensora_accel.attention.blocks import accumulator_dtype, attend, attend_backward, make_operators
from opensora_accel.attention.call import AttentionCall, autocast, enter_call, torch_attention
from opensora_accel.attention.kernels import (
    Choice,
    Grads,
    Problem,
    Scores,
    choose_kernel,
    explain_pieces,
)
from opensora_accel.attention.sliced import sliced_attend
from opensora_accel.attention.slices import AttentionSlices, Deal


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    slices: AttentionSlices | Deal | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale) v, by torch's own choice of kernel.

    Args:
        q: [B, S_q, H, D].
        k, v: [B, S_kv, H_kv, D]; H is a multiple of H_kv (grouped heads).
        mask: [B, S_kv], true where a key may be seen. A query that may see none gives 0, and no gradient.
        causal: query i sees keys 0…i; needs S_q = S_kv.
        scale: 1/√D by default.
        slices: which queries see which keys, beside the mask; then only these are computed, by the kernels of a ring.

    Returns:
        [B, S_q, H, D].

    Raises:
        ValueError: the shapes are no attention, or the slices are of other numbers of queries and keys.
    """
    q, k, v = autocast(q, k, v)
    call = enter_call(q, k, v, mask, [], causal=causal, scale=scale, slices=slices)
    return attend_whole(q, k, v, mask, call)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionCall) -> Tensor:
    """`local_attention` of what was checked, with the mask, `causal` and `scale` of the call; tensors may be empty.

    Args:
        q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D]; mask: [B, S_kv].

    Returns:
        [B, S_q, H, D].
    """
    if q.numel() == 0 or k.numel() == 0:
        # There is no query, no key or no head. The zeros stay connected to the inputs: autograd must reach the
        # collectives before them, in which other ranks wait.
        connection = sum(tensor.flatten()[:0].sum() for tensor in (q, k, v))
        return q.new_zeros(*q.shape[:3], v.size(3)) + connection
    if call.slices is not None:
        return sliced_attend(q, k, v, mask, None, call.slices.whole(), call.scale)
    if mask is not None and not call.causal and _leaves_hidden_keys_out(q, v):
        return _MaskedAttention.apply(q, k, v, mask, q.size(3) ** -0.5 if call.scale is None else call.scale)
    causal, attention_mask, sees_none = call.causal, None, None
    if mask is not None:
        # [B, 1, 1, S_kv]: the same for all heads and all queries.
        attention_mask = mask[:, None, None, :]
        if causal:
            # Kernels take a mask or the causal flag, not both.
            triangle = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device).tril()
            attention_mask, causal = attention_mask & triangle, False
        # Kernels differ in what they make of a row without keys: let it see all, and drop what it saw.
        sees_none = ~attention_mask.any(-1, keepdim=True)
        attention_mask = attention_mask | sees_none
    # torch wants [B, H, S, D]; these are views, and nothing is copied here. Which kernel comes first is its own rule,
    # the one that `choose_kernel` follows: cuDNN on Hopper and Blackwell, else flash.
    out = torch_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=attention_mask,
        is_causal=causal,
        scale=call.scale,
        enable_gqa=q.size(2) != k.size(2),
    )
    if sees_none is not None:
        out = out.masked_fill(sees_none, 0)
    return out.transpose(1, 2)


def _leaves_hidden_keys_out(q: Tensor, v: Tensor) -> bool:
    """Whether one of our kernels serves a masked call better than torch's own choice; q, v: [B, S, H, D].

    Under a mask torch leaves flash for the memory-efficient kernel: for a few hidden text tokens, a whole video would.
    """
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.size(3) == v.size(3) and q.size(3) % 8 == 0
    return fits and Problem.of(q, q, v, None).device.type == "cuda" and not torch.version.hip


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D]; mask: [B, S_kv] → [B, S_q, H, D]."""
        out, lse = torch.ops.opensora_accel.masked_attention(q, k, v, mask, scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """grad: [B, S_q, H, D]."""
        operator = torch.ops.opensora_accel.masked_attention_backward
        # The node that refuses a second derivative is only needed where one could be taken.
        backward = _MaskedAttentionBackward.apply if torch.is_grad_enabled() else operator
        return *backward(grad, *ctx.saved_tensors, ctx.scale), None, None


class _MaskedAttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, *arguments: Any) -> Grads:
        return torch.ops.opensora_accel.masked_attention_backward(*arguments)

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Any:
        """Refuses a derivative of the gradients, whatever their shapes."""
        raise RuntimeError(
            "masked attention has no second derivative in fp16 and bf16 on a GPU, nor has any fused kernel of torch; "
            "take it in fp32 under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def _masked_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output [B, S_q, H, D] in the dtype of q, and the log-sum-exp [B, H, S_q]."""
    out, lse = attend(q, k, v, Scores(scale, mask))
    return out.to(q.dtype).contiguous(), lse.to(accumulator_dtype(q.dtype)).contiguous()


def _masked_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Grads:
    """The gradients of q, k and v, in their shapes and dtypes.

    grad, q, out: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D]; mask: [B, S_kv]; lse: [B, H, S_q].
    """
    lse = lse.masked_fill(lse == float("-inf"), 0)  # as `attend_backward` wants it of rows without keys
    grad_q, grad_k, grad_v = attend_backward(grad, q, k, v, out, lse, Scores(scale, mask))
    return grad_q.to(q.dtype).contiguous(), grad_k.to(k.dtype).contiguous(), grad_v.to(v.dtype).contiguous()


_OPERATORS = make_operators(
    "masked_attention", "Tensor mask", "float scale", _masked_forward, _masked_backward
)


def explain_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    slices: AttentionSlices | Deal | None = None,
) -> Choice[Any]:
    """The kernel that a ring takes for these tensors, and on a GPU masked attention too; and why not those before it.

    `print` it. With slices it is that of `local_attention`, and how often it is called.

    Args:
        q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D]; mask: [B, S_kv].
        slices: which queries see which keys.

    Raises:
        ValueError: the slices are of other numbers of queries and keys.
    """
    if slices is None:
        return choose_kernel(Problem.of(q, k, v, mask, causal))
    call = enter_call(q, k, v, mask, [], causal=causal, slices=slices)
    assert call.slices is not None
    pieces = call.slices.whole().steps(0)[0].pieces
    # A tile may be a triangle, of which some kernels do not know all.
    has_triangles = any(tile.causal for tile in pieces.tiles)
    return explain_pieces(Problem.of(q, k, v, mask, has_triangles), pieces.facts)
