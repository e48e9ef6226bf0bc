"""Attention on one rank, in the layout that every parallel attention here shares: [B, S, H, D].

`local_attention` is the whole of it. `attend` and `attend_backward` are one block of keys of it: they give and take
the log-sum-exp by which blocks are merged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora_accel.attention.checks import check_alone
from opensora_accel.attention.kernels import Choice, Problem, Scores, choose_kernel
from opensora_accel.attention.kernels.base import Grads


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

    Raises ValueError for shapes that are no attention.
    """
    q, k, v = autocast(q, k, v)
    check_alone({"q": q, "k": k, "v": v, "mask": mask}, {"causal": causal, "scale": scale})
    return attend_whole(q, k, v, mask, causal, scale)


def autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors as torch.autocast gives them to an attention kernel: norms leave q and k in fp32, v is bf16 there.

    At the entry of every attention, so that ranks with and without work of their own send one dtype.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]


def attend_whole(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """`local_attention` of what was checked; any of the tensors may be empty."""
    if q.numel() == 0 or k.numel() == 0:
        return _nothing(q, k, v)
    grouped = q.size(2) != k.size(2)
    attention_mask, sees_none = None, None
    if mask is not None:
        attention_mask = mask[:, None, None, :]
        if causal:  # the kernels take a mask or the causal flag, not both
            triangle = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device).tril()
            attention_mask, causal = attention_mask & triangle, False
        # Kernels differ in what they make of a row without keys: let it see all, and drop what it saw.
        sees_none = ~attention_mask.any(-1, keepdim=True)
        attention_mask = attention_mask | sees_none
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=attention_mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=grouped,
    )
    if sees_none is not None:
        out = out.masked_fill(sees_none, 0)
    return out.transpose(1, 2)


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No query, no key or no head: zeros, still connected to the inputs, as other ranks await their gradients."""
    connection = sum(tensor.flatten()[:0].sum() for tensor in (q, k, v))
    return q.new_zeros(*q.shape[:3], v.size(3)) + connection


def explain_kernel(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Choice:
    """The kernel that ring attention takes for these tensors, and why not the ones before it: `print` it."""
    return choose_kernel(Problem.of(q, k, v, mask))


def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Attention over one block of keys: output [B, S_q, H, D_v] and log-sum-exp [B, H, S_q].

    Arguments as `local_attention`. A row that sees no key has output 0 and log-sum-exp −inf. Not differentiable.
    """
    if q.numel() == 0 or k.numel() == 0:
        lse = q.new_full((q.size(0), q.size(2), q.size(1)), float("-inf"), dtype=accumulator_dtype(q.dtype))
        return q.new_zeros(*q.shape[:3], v.size(3)), lse
    mask = scores.mask
    kernel = choose_kernel(Problem.of(q, k, v, mask)).kernel
    out, lse = kernel.forward(q, k, v, scores)
    if mask is not None:
        # [B, S_q] or [B, 1]: kernels differ in what they make of a row that sees nothing.
        sees_none = mask.cumsum(1) == 0 if scores.causal else ~mask.any(1, keepdim=True)
        out = out.masked_fill(sees_none[:, :, None, None], 0)
        lse = lse.masked_fill(sees_none[:, None, :], float("-inf"))
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Grads:
    """Gradients of q, k and v through one block of keys, where `out` and `lse` are those of the whole row.

    `lse` must be finite: 0 in place of −inf, for a row without keys, gives all of its masked keys the weight 0.
    """
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kernel = choose_kernel(Problem.of(q, k, v, scores.mask)).kernel
    return kernel.backward(grad, q, k, v, out, lse, scores)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results are added up in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
