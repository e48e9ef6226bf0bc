"""Attention on one rank, in the layout that every parallel attention here shares: [B, S, H, D].

`local_attention` is the whole of it. The rest is attention over keys that come in blocks, as a ring needs it. A row's
result over a block is its output o and its log-sum-exp, lse = log Σ exp(score). Two blocks a and b make the whole
row:

    o = (1 − w)·o_a + w·o_b    with w = exp(lse_b) / (exp(lse_a) + exp(lse_b)) = σ(lse_b − lse_a)
    lse = log(exp(lse_a) + exp(lse_b))

If the row's scores over a add up to 3 and those over b to 1, w is ¼. The sigmoid neither overflows nor divides. In
backward no merging is needed: each block is given the output and the log-sum-exp of the whole row, and its weights
exp(score − lse) are then those of the whole softmax.

Source: the online softmax of Milakov and Gimelshein, arXiv:1805.02867; FlashAttention-2's backward, arXiv:2307.08691.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opensora_accel.attention.call import AttentionCall, autocast, enter_call, torch_attention
from opensora_accel.attention.kernels import Choice, Grads, Problem, Scores, choose_kernel


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale) v, by torch's own choice of kernel.

    Args:
        q: [B, S_q, H, D].
        k, v: [B, S_kv, H_kv, D]; H is a multiple of H_kv (grouped heads).
        mask: [B, S_kv], true where a key may be seen. A query that may see none gives 0, and no gradient.
        causal: query i sees keys 0…i; needs S_q = S_kv.
        scale: 1/√D by default.

    Returns:
        [B, S_q, H, D].

    Raises:
        ValueError: the shapes are no attention.
    """
    q, k, v = autocast(q, k, v)
    return attend_whole(q, k, v, mask, enter_call(q, k, v, mask, [], causal=causal, scale=scale))


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
    return fits and q.device.type == "cuda" and not torch.version.hip


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


# Operators of their own, as those of the ring: opaque to torch.compile, which need not know which kernel they take.
_OPERATORS = torch.library.Library("opensora_accel", "FRAGMENT")
_OPERATORS.define(
    "masked_attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> (Tensor, Tensor)"
)
_OPERATORS.define(
    "masked_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor out, Tensor lse, "
    "float scale) -> (Tensor, Tensor, Tensor)"
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


_OPERATORS.impl("masked_attention", _masked_forward, "CompositeExplicitAutograd")
_OPERATORS.impl("masked_attention_backward", _masked_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("opensora_accel::masked_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _dim = q.shape
    lse = q.new_empty((batch, heads, tokens), dtype=accumulator_dtype(q.dtype))
    return q.new_empty((batch, tokens, heads, v.size(3))), lse


@torch.library.register_fake("opensora_accel::masked_attention_backward")
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def explain_kernel(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Choice:
    """The kernel that a ring takes for these tensors, and on a GPU masked attention too; and why not those before it.

    `print` it.

    Args:
        q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D]; mask: [B, S_kv].
    """
    return choose_kernel(Problem.of(q, k, v, mask, causal))


def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Attention over one block of keys. Not differentiable.

    Args:
        q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D], the keys and values of the block.

    Returns:
        The output [B, S_q, H, D] and the log-sum-exp [B, H, S_q]; 0 and −inf for a row that sees no key.
    """
    if q.numel() == 0 or k.numel() == 0:
        lse = q.new_full((q.size(0), q.size(2), q.size(1)), float("-inf"), dtype=accumulator_dtype(q.dtype))
        return q.new_zeros(*q.shape[:3], v.size(3)), lse
    mask = scores.mask
    out, lse = choose_kernel(Problem.of(q, k, v, mask, scores.causal)).kernel.forward(q, k, v, scores)
    if mask is not None:
        # [B, S_q] or [B, 1]: kernels differ in what they make of a row that sees nothing.
        sees_none = mask.cumsum(1) == 0 if scores.causal else ~mask.any(1, keepdim=True)
        out = out.masked_fill(sees_none[:, :, None, None], 0)
        lse = lse.masked_fill(sees_none[:, None, :], float("-inf"))
    return out, lse


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Makes `out` and `lse`, in place, the attention over their keys and those of the block. Not differentiable.

    Start from a first block, or from zeros with a log-sum-exp of −inf. A row that sees no key in either has output 0
    and log-sum-exp −inf, never NaN.

    Args:
        out: [B, S, H, D], fp32 or fp64: accumulated in fp32, the error does not grow with the number of blocks.
        lse: [B, S, H], of the same dtype, the natural logarithm of the sum over the scaled scores' exponentials.
        block_out: [B, S, H, D], of any dtype.
        block_lse: [B, S, H].

    Raises:
        ValueError: `out` is of a narrower dtype.
    """
    if out.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"partial results are accumulated in fp32 or fp64; got out in {out.dtype}, use out.float()"
        )
    block_lse = block_lse.to(lse.dtype)
    # The block's share of the row, w above. Where both are −inf the difference is NaN, and the share is 0.
    share = torch.sigmoid(block_lse - lse).nan_to_num_(nan=0.0).unsqueeze(-1)
    # The share is exactly 0 for a block that a row sees nothing of, and such a row keeps its bits.
    out.lerp_(block_out.to(out.dtype), share)
    # Last, because the share needs the log-sum-exp from before. Of −inf and −inf it is −inf.
    torch.logaddexp(lse, block_lse, out=lse)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Grads:
    """Gradients of q, k and v through one block of keys.

    Args:
        grad, out: [B, S_q, H, D], of the whole row; q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D], of the block. lse:
        [B, H, S_q], of the whole row, finite: 0 in place of −inf, for a row without keys, gives all of its masked
            keys the weight 0.
    """
    # A rank without queries takes part in a ring as well, and adds zeros to the gradients of keys.
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kernel = choose_kernel(Problem.of(q, k, v, scores.mask, scores.causal)).kernel
    return kernel.backward(grad, q, k, v, out, lse, scores)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results are added up in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
