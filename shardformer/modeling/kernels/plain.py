"""What the kernels compute, in PyTorch operations: the reference, and what runs where no kernel can.

Models round in two ways. For x, scale and shift in bf16, norm(x) · (1 + scale) + shift is rounded four times where a
model writes just that: after the norm, in 1 + scale, after the product, after the sum. Where it writes
(norm(x.float()) · (1 + scale) + shift).type_as(x) with fp32 scale and shift, it is rounded once. `rounds="each"` and
`rounds="end"` are these two.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shardformer.modeling.norm_orders import Order

Rounds = Literal["each", "end"]
Pairs = Literal["neighbours", "halves"]


def modulated_norm(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    order: Order,
    eps: float | None,
    rounds: Rounds,
) -> Tensor:
    """x [..., C]; scale, shift broadcast to it; weight, bias [C] → [..., C]."""
    out = order(widened(x) if rounds == "end" else x, weight, bias, eps)
    if scale is not None:
        out = out * (1 + scale)
    if shift is not None:
        out = out + shift
    return out.to(x.dtype) if rounds == "end" else out


def gated_residual(x: Tensor, y: Tensor, gate: Tensor, rounds: Rounds) -> Tensor:
    """x, y [..., C]; gate broadcast to them → [..., C]."""
    if rounds == "end":
        return (widened(x) + widened(y) * gate).to(x.dtype)
    return x + y * gate


def norm_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    order: Order,
    eps: float | None,
    pairs: Pairs,
    rounds: Rounds,
) -> Tensor:
    """x [..., C]; cos, sin broadcast to [..., C / D, D]; weight, bias [C] → [..., C]."""
    normed = order(x, weight, bias, eps)
    heads = (widened(normed) if rounds == "end" else normed).unflatten(-1, (-1, cos.shape[-1]))
    if pairs == "neighbours":
        first, second = heads.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((-second, first), -1).flatten(-2)
    else:
        first, second = heads.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return (heads * cos + turned * sin).to(normed.dtype).flatten(-2)


def widened(x: Tensor) -> Tensor:
    """The tensor in fp32, or as it is in fp64."""
    return x if x.dtype == torch.float64 else x.float()
