"""RMS and layer norms, and scale and shift behind them, in one pass: norm(x) · (1 + scale) + shift.

The forward reads x once and writes the output. The backward keeps nothing but the inputs: it reads x and the incoming
gradient g, normalises x anew in registers, and writes the gradient of x. With n = (x − mean) / rms, y = n · w + b and
dy = g · (1 + scale), per row and over its C features,

    dx = (dn − n · mean(dn · n) − mean(dn)) / rms,   dn = dy · w,

where mean(dn) stands in layer norms only. Sums over rows give dw = Σ dy · n, db = Σ dy, dscale = Σ g · y and
dshift = Σ g. The forward rounds where the plain operations round. The backward computes in fp32 throughout.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardformer.modeling.kernels.plain import Rounds
from shardformer.modeling.kernels.rows import TL_DTYPES, Rows, compute_dtype, load, statistics, store_sum
from shardformer.modeling.norm_orders import HALVES, Order


def roundings(
    order: Order, x: torch.dtype, weight: Tensor | None, bias: Tensor | None
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes of the normalised value, of its product with the weight, and of the sum with the bias.

    Args:
        x: of the norm's input.
        weight, bias: [C]; their values do not matter.
    """
    wide = torch.float64 if x == torch.float64 else torch.float32
    if order.centres:
        return wide, wide, x
    if weight is None:
        normed = weighted = x
    elif order.rounds == "end":
        normed, weighted = wide, x
    else:
        normed = x if order.rounds == "input" else weight.dtype if weight.dtype in HALVES else wide
        weighted = torch.promote_types(normed, weight.dtype)
    return normed, weighted, weighted if bias is None else torch.promote_types(weighted, bias.dtype)


@triton.jit
def rounded(value, dtype: tl.constexpr, T: tl.constexpr):
    return value.to(dtype).to(T)


@triton.jit
def affine(
    normed,
    weight_ptr,
    bias_ptr,
    cols,
    inside,
    offset: tl.constexpr,
    NORMED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    T: tl.constexpr,
):
    """normed [R, C] times weight plus bias [C], rounded as the order rounds."""
    out = rounded(normed, NORMED, T)
    if weight_ptr is not None:
        out = out * (tl.load(weight_ptr + cols, mask=inside, other=0.0).to(T) + offset)[None, :]
    out = rounded(out, WEIGHTED, T)
    if bias_ptr is not None:
        out = out + tl.load(bias_ptr + cols, mask=inside, other=0.0).to(T)[None, :]
    return rounded(out, BIASED, T)


@triton.jit
def through_statistics(dnormed, normed, rstd, centres: tl.constexpr, C: tl.constexpr):
    """dx of the gradient of the normalised rows; all [R, C], rstd [R, 1]."""
    dx = dnormed - normed * (tl.sum(dnormed * normed, 1)[:, None] / C)
    if centres:
        dx -= tl.sum(dnormed, 1)[:, None] / C
    return dx * rstd


@triton.jit
def _forward(
    out_ptr,
    x_ptr,
    x_strides,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    scale_strides,
    shift_ptr,
    shift_strides,
    num_rows,
    n1,
    n2,
    eps: tl.constexpr,
    offset: tl.constexpr,
    centres: tl.constexpr,
    NORMED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # In 64 bits: rows times features may pass 2³¹.
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < C)[None, :]
    x = load(x_ptr, x_strides, rows, cols, mask, n1, n2, T)
    mean, rstd = statistics(x, mask, eps, centres, C)
    out = affine((x - mean) * rstd, weight_ptr, bias_ptr, cols, cols < C, offset, NORMED, WEIGHTED, BIASED, T)
    if scale_ptr is not None:
        scale = load(scale_ptr, scale_strides, rows, cols, mask, n1, n2, T)
        out = rounded(out * rounded(1.0 + scale, SCALE, T), SCALED, T)
    if shift_ptr is not None:
        out += load(shift_ptr, shift_strides, rows, cols, mask, n1, n2, T)
    # Stored in the dtype of the output, which is the last rounding.
    tl.store(out_ptr + rows[:, None] * C + cols[None, :], out, mask=mask)


@triton.jit
def _backward(
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    dscale_ptr,
    dshift_ptr,
    grad_ptr,
    grad_strides,
    x_ptr,
    x_strides,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    scale_strides,
    group_rows,
    num_chunks,
    chunk_tiles,
    n1,
    n2,
    eps: tl.constexpr,
    offset: tl.constexpr,
    centres: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < C
    weight = tl.full([BLOCK], 1.0, T)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(T) + offset
    bias = tl.zeros([BLOCK], T)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(T)
    dweight, dbias = tl.zeros([BLOCK], T), tl.zeros([BLOCK], T)
    dscale, dshift = tl.zeros([BLOCK], T), tl.zeros([BLOCK], T)
    for tile in range(0, chunk_tiles):
        # Programs are numbered by group, then by chunk. Each adds up the rows of its chunk, tile after tile.
        in_group = ((program % num_chunks) * chunk_tiles + tile) * TILE + tl.arange(0, TILE)
        rows = (program // num_chunks) * group_rows + in_group
        mask = (in_group < group_rows)[:, None] & inside[None, :]
        x = load(x_ptr, x_strides, rows, cols, mask, n1, n2, T)
        grad = load(grad_ptr, grad_strides, rows, cols, mask, n1, n2, T)
        mean, rstd = statistics(x, mask, eps, centres, C)
        # Rows that are not there have no rms, if eps is 0.
        normed = tl.where(mask, (x - mean) * rstd, 0.0)
        # From the output back to the norm: the shift was added last, the weight multiplied first.
        if dshift_ptr is not None:
            dshift += tl.sum(grad, 0)
        if scale_ptr is not None:
            if dscale_ptr is not None:
                dscale += tl.sum(grad * (normed * weight[None, :] + bias[None, :]), 0)
            grad *= 1.0 + load(scale_ptr, scale_strides, rows, cols, mask, n1, n2, T)
        if dbias_ptr is not None:
            dbias += tl.sum(grad, 0)
        if dweight_ptr is not None:
            dweight += tl.sum(grad * normed, 0)
        if dx_ptr is not None:
            dx = through_statistics(grad * weight[None, :], normed, rstd, centres, C)
            tl.store(dx_ptr + rows[:, None] * C + cols[None, :], dx, mask=mask)
    store_sum(dweight_ptr, dweight, program, cols, C)
    store_sum(dbias_ptr, dbias, program, cols, C)
    store_sum(dscale_ptr, dscale, program, cols, C)
    store_sum(dshift_ptr, dshift, program, cols, C)


class ModulatedNorm(torch.autograd.Function):
    """x [..., C]; scale, shift broadcast to it; weight, bias [C] → [..., C]. Keeps its inputs alone for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        order: Order,
        eps: float | None,
        rounds: Rounds,
    ) -> Tensor:
        # A stride of the weight would be one more argument; it is small.
        weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
        wide = compute_dtype([x, scale, shift, weight, bias])
        if eps is None:
            eps = 0.0 if order.centres else torch.finfo(compute_dtype([x])).eps
        ctx.save_for_backward(x, scale, shift, weight, bias)
        ctx.options = order, eps, wide
        seen = wide if rounds == "end" else x.dtype
        normed, weighted, biased = roundings(order, seen, weight, bias)
        scaled = biased if scale is None else torch.promote_types(biased, scale.dtype)
        shifted = scaled if shift is None else torch.promote_types(scaled, shift.dtype)
        out = torch.empty(x.shape, dtype=x.dtype if rounds == "end" else shifted, device=x.device)
        rows = Rows(x)
        rows.launch(
            _forward,
            triton.cdiv(rows.num_rows, rows.tile),
            out,
            *rows.of(x),
            weight,
            bias,
            *rows.of(scale),
            *rows.of(shift),
            rows.num_rows,
            eps=eps,
            offset=order.offset,
            centres=order.centres,
            NORMED=TL_DTYPES[normed],
            WEIGHTED=TL_DTYPES[weighted],
            BIASED=TL_DTYPES[biased],
            SCALE=TL_DTYPES[wide if scale is None else scale.dtype],
            SCALED=TL_DTYPES[scaled],
            T=TL_DTYPES[wide],
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale, shift, weight, bias = ctx.saved_tensors
        order, eps, wide = ctx.options
        needs_x, needs_scale, needs_shift, needs_weight, needs_bias = ctx.needs_input_grad[:5]
        rows = Rows(x, scale if needs_scale else None, shift if needs_shift else None)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
        dscale = rows.partial(scale, needs_scale, wide)
        dshift = rows.partial(shift, needs_shift, wide)
        dweight = rows.partial(weight, needs_weight, wide)
        dbias = rows.partial(bias, needs_bias, wide)
        rows.launch(
            _backward,
            rows.num_groups * rows.num_chunks,
            dx,
            dweight,
            dbias,
            dscale,
            dshift,
            *rows.of(grad),
            *rows.of(x),
            weight,
            bias,
            *rows.of(scale),
            rows.group_rows,
            rows.num_chunks,
            rows.chunk_tiles,
            eps=eps,
            offset=order.offset,
            centres=order.centres,
            T=TL_DTYPES[wide],
        )
        sums = ((dscale, scale), (dshift, shift), (dweight, weight), (dbias, bias))
        return dx, *(rows.summed(*each) for each in sums), None, None, None
