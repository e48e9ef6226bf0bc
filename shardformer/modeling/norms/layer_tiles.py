"""Layer norms on a CPU by tiles of rows: LayerNorm on fp32 copies, and adaptive LayerNorm.

torch's own layer norm is one pass already. What costs is what stands around it: fp32 copies of a half input (and of
the output, and of both gradients), and the two passes of `norm(x) * (1 + scale) + shift`, of which autograd keeps
the normalised tensor. `1 + scale` and `shift` are a weight and a bias, one for each sample: so the adaptive norm too
is one pass, and its backward is torch's kernel. Only the input is kept.

Shapes: B batch, R rows of one sample, C features.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardformer.modeling.norms.order import HALVES
from shardformer.modeling.norms.tiles import rows_per_tile

Rounding = Literal["once", "wide", "steps"]
"""After the bias, in torch's kernel for x's dtype (`once`) or on fp32 copies (`wide`: bit for bit FP32LayerNorm); or
after the norm, after the product and after the sum (`steps`: bit for bit the three operations)."""


_LEAST_ELEMENTS = 1 << 21
_LEAST_HALF_ELEMENTS = 1 << 22
"""Below, whole tensors are as fast: torch's kernel is one pass, and copies of halves still fit in a cache."""


def worth_tiling_layer_norm(x: Tensor) -> bool:
    """Whether tiles are no slower than whole tensors on this input."""
    return x.numel() >= (_LEAST_HALF_ELEMENTS if x.dtype in HALVES else _LEAST_ELEMENTS)


class TiledLayerNorm(torch.autograd.Function):
    """LayerNorm of x [B, R, C], times weight [B, C], plus bias [B, C]; either may be None, or [1, C] for all samples.

    Keeps x and the two for backward. Gradients are computed in fp32 and rounded once, whatever x's dtype,
    by operations that autograd can differentiate again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rounding: Rounding
    ) -> Tensor:
        out = torch.empty_like(x)
        for sample in range(x.size(0)):
            w, b = _of_sample(weight, sample), _of_sample(bias, sample)
            for part in _parts(x):
                out[sample, part] = _normalize(x[sample, part], w, b, eps, rounding)
        ctx.save_for_backward(x, weight, bias)
        ctx.eps, ctx.rounding = eps, rounding
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dx = torch.empty_like(x)
        wanted = [True, *ctx.needs_input_grad[1:3]]
        sums: tuple[list[Tensor], list[Tensor]] = ([], [])
        for sample in range(x.size(0)):
            w, b = _float(_of_sample(weight, sample)), _float(_of_sample(bias, sample))
            tiles = []
            for part in _parts(x):
                values, g = x[sample, part].float(), gradient[sample, part].float()
                _, mean, inverse = torch.native_layer_norm(values, [x.size(-1)], None, None, ctx.eps)
                dx[sample, part], *rest = torch.ops.aten.native_layer_norm_backward(
                    g, values, [x.size(-1)], mean, inverse, w, b, wanted
                )
                tiles.append(rest)
            for total, parts in zip(sums, zip(*tiles, strict=True), strict=True):
                if parts[0] is not None:  # added up at the end: as exact as one reduction over all rows
                    total.append(torch.stack(parts).sum(0))
        return dx, _total(sums[0], weight), _total(sums[1], bias), None, None


def _parts(x: Tensor) -> list[slice]:
    step = rows_per_tile(x.size(-1))
    return [slice(start, start + step) for start in range(0, x.size(1), step)]


def _of_sample(rows: Tensor | None, sample: int) -> Tensor | None:
    return None if rows is None else rows[min(sample, len(rows) - 1)]


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rounding: Rounding
) -> Tensor:
    shape = [x.size(-1)]
    if rounding == "wide":
        return F.layer_norm(x.float(), shape, _float(weight), _float(bias), eps)
    if rounding == "once":
        return F.layer_norm(x, shape, weight, bias, eps)
    out = F.layer_norm(x, shape, None, None, eps)
    for operation, rows in ((out.mul_, weight), (out.add_, bias)):
        if rows is not None:
            operation(rows)
    return out


def _total(sums: list[Tensor], like: Tensor | None) -> Tensor | None:
    """Per sample, or over all samples where there is one row for all; None where it is not asked for."""
    if like is None or not sums:
        return None
    rows = torch.stack(sums)
    return (rows if len(like) == len(rows) else rows.sum(0, keepdim=True)).to(like.dtype)
