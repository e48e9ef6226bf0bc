"""RMS or layer norm of queries or keys, and the rotary embedding behind it, in one pass.

The norm is over a row of C features: one head, or all of them. The rotary embedding turns pairs of features within
each head of D: neighbours (0, 1), (2, 3), …, or halves (0, D/2), (1, D/2 + 1), …. With y the normed row and p(c) the
other of a pair,

    out_c = y_c · cos_c + s_c · y_p(c) · sin_c,   s = −1 for the first of a pair and 1 for the second.

A program reads each row twice, once at c and once at p(c); the second time it is in the cache. Backward turns the
gradient back in the same way, and goes on as that of the norm in `norm.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardformer.modeling.kernels.norm import affine, roundings, through_statistics
from shardformer.modeling.kernels.plain import Pairs, Rounds
from shardformer.modeling.kernels.rows import TL_DTYPES, Rows, compute_dtype, load, statistics, store_sum
from shardformer.modeling.norm_orders import Order


@triton.jit
def load_table(ptr, strides, rows, cols, mask, n1, n2, D: tl.constexpr, T: tl.constexpr):
    """The rows [R, C] of a table [N0, N1, N2, C / D, D]."""
    outer = rows // n2
    start = (outer // n1) * strides[0] + (outer % n1) * strides[1] + (rows % n2) * strides[2]
    along = (cols // D).to(tl.int64) * strides[3] + (cols % D).to(tl.int64) * strides[4]
    return tl.load(ptr + start[:, None] + along[None, :], mask=mask, other=0.0).to(T)


@triton.jit
def partner(cols, halves: tl.constexpr, D: tl.constexpr, T: tl.constexpr):
    """The column of the other of each pair, and s: both [C]."""
    if halves:
        is_first = (cols % D) < D // 2
        other = tl.where(is_first, cols + D // 2, cols - D // 2)
    else:
        is_first = cols % 2 == 0
        other = cols ^ 1
    return other, tl.where(is_first, -1.0, 1.0).to(T)


@triton.jit
def _forward(
    out_ptr,
    x_ptr,
    x_strides,
    weight_ptr,
    bias_ptr,
    cos_ptr,
    cos_strides,
    sin_ptr,
    sin_strides,
    num_rows,
    n1,
    n2,
    eps: tl.constexpr,
    offset: tl.constexpr,
    centres: tl.constexpr,
    halves: tl.constexpr,
    D: tl.constexpr,
    NORMED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    TURNED: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # In 64 bits: rows times features may pass 2³¹.
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.arange(0, BLOCK)
    inside = cols < C
    mask = (rows < num_rows)[:, None] & inside[None, :]
    x = load(x_ptr, x_strides, rows, cols, mask, n1, n2, T)
    mean, rstd = statistics(x, mask, eps, centres, C)
    y = affine((x - mean) * rstd, weight_ptr, bias_ptr, cols, inside, offset, NORMED, WEIGHTED, BIASED, T)
    # The same row once more, at the other of each pair; it lies in the cache.
    others, sign = partner(cols, halves, D, T)
    x = load(x_ptr, x_strides, rows, others, mask, n1, n2, T)
    other = affine(
        (x - mean) * rstd, weight_ptr, bias_ptr, others, inside, offset, NORMED, WEIGHTED, BIASED, T
    )
    cos = load_table(cos_ptr, cos_strides, rows, cols, mask, n1, n2, D, T)
    sin = load_table(sin_ptr, sin_strides, rows, cols, mask, n1, n2, D, T)
    out = (y * cos).to(TURNED).to(T) + (sign[None, :] * other * sin).to(TURNED).to(T)
    # The sum is rounded to the dtype of the products before it is stored in that of the output.
    tl.store(out_ptr + rows[:, None] * C + cols[None, :], out.to(TURNED).to(T), mask=mask)


@triton.jit
def _backward(
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    dcos_ptr,
    dsin_ptr,
    grad_ptr,
    grad_strides,
    x_ptr,
    x_strides,
    weight_ptr,
    bias_ptr,
    cos_ptr,
    cos_strides,
    sin_ptr,
    sin_strides,
    group_rows,
    num_chunks,
    chunk_tiles,
    n1,
    n2,
    eps: tl.constexpr,
    offset: tl.constexpr,
    centres: tl.constexpr,
    halves: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < C
    others, sign = partner(cols, halves, D, T)
    weight = tl.full([BLOCK], 1.0, T)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(T) + offset
    dweight, dbias = tl.zeros([BLOCK], T), tl.zeros([BLOCK], T)
    for tile in range(0, chunk_tiles):
        # Programs are numbered by group, then by chunk. Each adds up the rows of its chunk, tile after tile.
        in_group = ((program % num_chunks) * chunk_tiles + tile) * TILE + tl.arange(0, TILE)
        rows = (program // num_chunks) * group_rows + in_group
        mask = (in_group < group_rows)[:, None] & inside[None, :]
        x = load(x_ptr, x_strides, rows, cols, mask, n1, n2, T)
        mean, rstd = statistics(x, mask, eps, centres, C)
        # Rows that are not there have no rms, if eps is 0.
        normed = tl.where(mask, (x - mean) * rstd, 0.0)
        turned = load(grad_ptr, grad_strides, rows, cols, mask, n1, n2, T)
        at = rows[:, None] * C + cols[None, :]
        if dcos_ptr is not None:
            y = affine(normed, weight_ptr, bias_ptr, cols, inside, offset, T, T, T, T)
            tl.store(dcos_ptr + at, turned * y, mask=mask)
        if dsin_ptr is not None:
            x = load(x_ptr, x_strides, rows, others, mask, n1, n2, T)
            y = affine((x - mean) * rstd, weight_ptr, bias_ptr, others, inside, offset, T, T, T, T)
            tl.store(dsin_ptr + at, turned * sign[None, :] * y, mask=mask)
        # y_c goes into out_c by cos_c, and into out_p(c) by s_p(c) · sin_p(c); s_p(c) is −s_c.
        other = load(grad_ptr, grad_strides, rows, others, mask, n1, n2, T)
        sin = load_table(sin_ptr, sin_strides, rows, others, mask, n1, n2, D, T)
        grad = turned * load_table(cos_ptr, cos_strides, rows, cols, mask, n1, n2, D, T)
        grad -= other * sin * sign[None, :]
        if dbias_ptr is not None:
            dbias += tl.sum(grad, 0)
        if dweight_ptr is not None:
            dweight += tl.sum(grad * normed, 0)
        if dx_ptr is not None:
            tl.store(
                dx_ptr + at, through_statistics(grad * weight[None, :], normed, rstd, centres, C), mask=mask
            )
    store_sum(dweight_ptr, dweight, program, cols, C)
    store_sum(dbias_ptr, dbias, program, cols, C)


class NormRotary(torch.autograd.Function):
    """x [..., C]; cos, sin broadcast to [..., C / D, D]; weight, bias [C] → [..., C]. Keeps its inputs alone."""

    @staticmethod
    def forward(
        ctx: Any,
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
        weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
        wide = compute_dtype([x, cos, sin, weight, bias])
        if eps is None:
            eps = 0.0 if order.centres else torch.finfo(compute_dtype([x])).eps
        normed, weighted, biased = roundings(order, x.dtype, weight, bias)
        turned = wide if rounds == "end" else torch.promote_types(biased, cos.dtype)
        out = torch.empty(x.shape, dtype=biased, device=x.device)
        rows = Rows(x)
        ctx.save_for_backward(x, cos, sin, weight, bias)
        ctx.options = order, eps, pairs, wide
        rows.launch(
            _forward,
            triton.cdiv(rows.num_rows, rows.tile),
            out,
            *rows.of(x),
            weight,
            bias,
            *_table(rows, cos),
            *_table(rows, sin),
            rows.num_rows,
            eps=eps,
            offset=order.offset,
            centres=order.centres,
            halves=pairs == "halves",
            D=cos.shape[-1],
            NORMED=TL_DTYPES[normed],
            WEIGHTED=TL_DTYPES[weighted],
            BIASED=TL_DTYPES[biased],
            TURNED=TL_DTYPES[turned],
            T=TL_DTYPES[wide],
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, cos, sin, weight, bias = ctx.saved_tensors
        order, eps, pairs, wide = ctx.options
        needs_x, needs_cos, needs_sin, needs_weight, needs_bias = ctx.needs_input_grad[:5]
        rows = Rows(x)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
        # Tables are seldom learned: their gradients are written whole and summed by PyTorch.
        dcos, dsin = (
            torch.empty(x.shape, dtype=wide, device=x.device) if needed else None
            for needed in (needs_cos, needs_sin)
        )
        dweight, dbias = rows.partial(weight, needs_weight, wide), rows.partial(bias, needs_bias, wide)
        rows.launch(
            _backward,
            rows.num_groups * rows.num_chunks,
            dx,
            dweight,
            dbias,
            dcos,
            dsin,
            *rows.of(grad),
            *rows.of(x),
            weight,
            bias,
            *_table(rows, cos),
            *_table(rows, sin),
            rows.group_rows,
            rows.num_chunks,
            rows.chunk_tiles,
            eps=eps,
            offset=order.offset,
            centres=order.centres,
            halves=pairs == "halves",
            D=cos.shape[-1],
            T=TL_DTYPES[wide],
        )
        dtables = (
            None
            if d is None
            else d.unflatten(-1, (-1, table.shape[-1])).sum_to_size(table.shape).to(table.dtype)
            for d, table in ((dcos, cos), (dsin, sin))
        )
        return (
            dx,
            *dtables,
            rows.summed(dweight, weight),
            rows.summed(dbias, bias),
            *[None] * 4,
        )


def _table(rows: Rows, table: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A table that broadcasts to [..., C / D, D], and its strides [N0, N1, N2, C / D, D]."""
    head_dim = table.shape[-1]
    heads = rows.num_features // head_dim
    wide = table.expand(*rows.shape[:-1], heads, head_dim)
    wide = wide.reshape(rows.n0, rows.n1, rows.n2, heads, head_dim)
    return wide, wide.stride()
