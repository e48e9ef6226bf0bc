"""Attention on one rank, in the layout that every parallel attention here shares: [B, S, H, D]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    """
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


def check_attention_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Raises ValueError unless the shapes, dtypes and mask are those of one attention."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"q, k and v must be [B, S, H, D]; got {shapes}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k and v must agree in batch, tokens and heads; got {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.size(0) != k.size(0) or q.size(3) != k.size(3):
        raise ValueError(f"q and k must agree in batch and head dim; got {tuple(q.shape)}, {tuple(k.shape)}")
    if k.size(2) == 0 or q.size(2) % k.size(2):
        raise ValueError(
            f"query heads ({q.size(2)}) must be a multiple of key heads ({k.size(2)}); repeat the key heads"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share one dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != k.shape[:2]):
        raise ValueError(
            f"mask must be a bool key mask [B, S_kv] = {tuple(k.shape[:2])}, true where a key may be seen; "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
