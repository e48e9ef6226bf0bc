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
from shardformer.modeling.kernels.rows import (
    TL_DTYPES,
    Rows,
    columns,
    compute_dtype,
    load,
    load_piece,
    normalised,
    num_pieces,
    start_of,
    statistics,
    store_rows,
    store_sum,
    with_rows,
    zeros,
)
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
    weight,
    bias,
    offset: tl.constexpr,
    NORMED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    T: tl.constexpr,
):
    """normed [R, P] times weight plus bias, each [1, P] or None, rounded as the order rounds."""
    out = rounded(normed, NORMED, T)
    if weight is not None:
        out = out * (weight.to(T) + offset)
    out = rounded(out, WEIGHTED, T)
    if bias is not None:
        out = out + bias.to(T)
    return rounded(out, BIASED, T)


@triton.jit
def load_vector(ptr, i: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr):
    """The i-th piece [1, P] of a vector [C], or None."""
    value = None
    if ptr is not None:
        cols = columns(i, PIECE)[None, :]
        value = tl.load(ptr + cols, mask=cols < C, other=0.0)
    return value


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
    PIECE: tl.constexpr,
):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = rows < num_rows
    x = load(x_ptr, x_strides, rows, there, n1, n2, C, PIECE)
    if scale_ptr is not None:
        of_scale = start_of(scale_strides, rows, n1, n2)
    if shift_ptr is not None:
        of_shift = start_of(shift_strides, rows, n1, n2)
    mean, rstd = statistics(x, there, eps, centres, C, TILE, PIECE, T)
    for i in tl.static_range(num_pieces(C, PIECE)):
        normed = (x[i].to(T) - mean) * rstd
        weight = load_vector(weight_ptr, i, C, PIECE)
        bias = load_vector(bias_ptr, i, C, PIECE)
        out = affine(normed, weight, bias, offset, NORMED, WEIGHTED, BIASED, T)
        # Scale and shift here and not before: held over the statistics they would take the registers of half the
        # programs, and those that rows share are in the cache.
        if scale_ptr is not None:
            scale = load_piece(scale_ptr, of_scale, scale_strides[3], there, i, C, PIECE).to(T)
            out = rounded(out * rounded(1.0 + scale, SCALE, T), SCALED, T)
        if shift_ptr is not None:
            out += load_piece(shift_ptr, of_shift, shift_strides[3], there, i, C, PIECE).to(T)
        # Stored in the dtype of the output, which is the last rounding.
        store_rows(out_ptr, out, rows, there, i, C, PIECE)


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
    PIECE: tl.constexpr,
):
    program = tl.program_id(0)
    # Programs are numbered by group, then by chunk. Each adds up the rows of its chunk, tile after tile.
    group, first = program // num_chunks, (program % num_chunks) * chunk_tiles * TILE
    dweight, dbias, dscale, dshift = (
        zeros(C, PIECE, T),
        zeros(C, PIECE, T),
        zeros(C, PIECE, T),
        zeros(C, PIECE, T),
    )
    in_group = first + tl.arange(0, TILE)
    rows, there = group * group_rows + in_group, in_group < group_rows
    next_x = load(x_ptr, x_strides, rows, there, n1, n2, C, PIECE)
    for tile in range(0, chunk_tiles):
        x, now, here = next_x, there, rows
        grad = load(grad_ptr, grad_strides, rows, there, n1, n2, C, PIECE)
        if scale_ptr is not None:
            of_scale = start_of(scale_strides, rows, n1, n2)
        # The next tile is on its way while this one is computed. Behind the last there is none.
        in_group += TILE
        rows, there = group * group_rows + in_group, (in_group < group_rows) & (tile + 1 < chunk_tiles)
        next_x = load(x_ptr, x_strides, rows, there, n1, n2, C, PIECE)
        mean, rstd = statistics(x, now, eps, centres, C, TILE, PIECE, T)
        # From the output back to the norm: the shift was added last, the weight multiplied first.
        new_dweight, new_dbias, new_dscale, new_dshift = (), (), (), ()
        normed_all, dnormed_all = (), ()
        along, total = tl.zeros([TILE, PIECE], T), tl.zeros([TILE, PIECE], T)
        for i in tl.static_range(num_pieces(C, PIECE)):
            dy, normed = grad[i].to(T), normalised(x[i].to(T), mean, rstd, now, i, eps, centres, C, PIECE)
            weight = load_vector(weight_ptr, i, C, PIECE)
            bias = load_vector(bias_ptr, i, C, PIECE)
            new_dshift = new_dshift + (with_rows(dshift[i], dy, dshift_ptr),)
            if scale_ptr is not None:
                y = affine(normed, weight, bias, offset, T, T, T, T)
                new_dscale = new_dscale + (with_rows(dscale[i], dy * y, dscale_ptr),)
                # Here and not before, because it would take registers; one that rows share is in the cache.
                dy *= 1.0 + load_piece(scale_ptr, of_scale, scale_strides[3], now, i, C, PIECE).to(T)
            new_dbias = new_dbias + (with_rows(dbias[i], dy, dbias_ptr),)
            new_dweight = new_dweight + (with_rows(dweight[i], dy * normed, dweight_ptr),)
            if dx_ptr is not None:
                dnormed = dy
                if weight_ptr is not None:
                    dnormed *= weight.to(T) + offset
                along += dnormed * normed
                total += dnormed
                normed_all = normed_all + (normed,)
                dnormed_all = dnormed_all + (dnormed,)
        dshift, dbias, dweight = new_dshift, new_dbias, new_dweight
        if scale_ptr is not None:
            dscale = new_dscale
        if dx_ptr is not None:
            mean_along, mean_dnormed = tl.sum(along, 1)[:, None] / C, 0.0
            if centres:
                mean_dnormed = tl.sum(total, 1)[:, None] / C
            for i in tl.static_range(num_pieces(C, PIECE)):
                dx = (dnormed_all[i] - normed_all[i] * mean_along - mean_dnormed) * rstd
                store_rows(dx_ptr, dx, here, now, i, C, PIECE)
    store_sum(dweight_ptr, dweight, program, C, PIECE)
    store_sum(dbias_ptr, dbias, program, C, PIECE)
    store_sum(dscale_ptr, dscale, program, C, PIECE)
    store_sum(dshift_ptr, dshift, program, C, PIECE)


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
            is_exact=True,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale, shift, weight, bias = ctx.saved_tensors
        order, eps, wide = ctx.options
        needs_x, *needs = ctx.needs_input_grad[:5]
        wanted = [
            t if needed else None for t, needed in zip((scale, shift, weight, bias), needs, strict=True)
        ]
        num_sums = sum(each is not None for each in wanted)
        rows = Rows(x, *wanted[:2], is_light=scale is None and num_sums <= 1)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
        dscale, dshift, dweight, dbias = rows.partials(wide, *wanted)
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
            is_exact=False,
        )
        return dx, *rows.sums(*wanted), None, None, None
