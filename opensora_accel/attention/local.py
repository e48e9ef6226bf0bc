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

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora_accel.attention.call import AttentionCall, autocast, enter_call
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
    out = F.scaled_dot_product_attention(
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


def explain_kernel(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Choice:
    """The kernel that ring attention takes for these tensors, and why not the ones before it: `print` it.

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
