"""Attention and rotary embedding of Open-Sora v2 (opensora/models/mmdit/math.py).

Letters: `B` batch, `H` heads, `L` tokens, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

_use_flash = False


@contextmanager
def flash_attention() -> Iterator[None]:
    """Within it, `attention` calls this module's `flash_attn_func`, as the released model always does.

    Backward belongs inside too, where blocks are checkpointed.
    """
    global _use_flash
    before, _use_flash = _use_flash, True
    try:
        yield
    finally:
        _use_flash = before


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """flash-attn's call: [B, L, H, D] in and out.

    Written out, not through `F.scaled_dot_product_attention`: who redirects only that does not meet flash-attn
    either.
    """
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) / q.size(-1) ** 0.5
    return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v)


def attention(q: Tensor, k: Tensor, v: Tensor, pe: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """[B, H, L, D] with positions `pe` → [B, L, H·D]."""
    q, k = apply_rope(q, k, pe) if isinstance(pe, Tensor) else _apply_liger_rope(q, k, *pe)
    if _use_flash:
        x = flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)))
    else:
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return x.flatten(2)


def _angles(pos: Tensor, dim: int, theta: int, dtype: torch.dtype) -> Tensor:
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=dtype, device=pos.device) / dim)
    return pos[..., None] * frequencies


def rope(pos: Tensor, dim: int, theta: int) -> Tensor:
    """[B, L] → rotation matrices [B, L, dim/2, 2, 2]."""
    angles = _angles(pos, dim, theta, torch.float64)
    rows = [angles.cos(), -angles.sin(), angles.sin(), angles.cos()]
    return torch.stack(rows, -1).unflatten(-1, (2, 2)).float()


def liger_rope(pos: Tensor, dim: int, theta: int) -> tuple[Tensor, Tensor]:
    angles = _angles(pos, dim, theta, torch.float32)
    return angles.cos(), angles.sin()


def apply_rope(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Turns the pairs (0, 1), (2, 3), ... of each head; `freqs_cis`: [B, 1, L, D/2, 2, 2]."""

    def turn(x: Tensor) -> Tensor:
        pairs = x.float().unflatten(-1, (-1, 1, 2))
        return (freqs_cis * pairs).sum(-1).flatten(-2).type_as(x)

    return turn(xq), turn(xk)


def _apply_liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """liger-kernel's rotation: pairs (i, i + D/2); `cos`, `sin`: [B, L, D]."""
    cos, sin = cos[:, None].to(q), sin[:, None].to(q)

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turn(q), turn(k)
