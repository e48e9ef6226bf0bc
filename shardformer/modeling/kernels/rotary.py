"""RMS or layer norm of queries or keys, and the rotary embedding behind it, in one pass.

The norm is over a row of C features: one head, or all of them. The rotary embedding turns pairs of features within
each head of D: neighbours (0, 1), (2, 3), …, or halves (0, D/2), (1, D/2 + 1), …. With y the normed row and p(c) the
other of a pair,

    out_c = y_c · cos_c + s_c · y_p(c) · sin_c,   s = −1 for the first of a pair and 1 for the second.

A program holds the firsts of all pairs and their seconds as two vectors, and reads each row once. Halves are two loads;
neighbours are one, which is then split: the two of a pair lie in one thread. Pieces (`rows.py`) are of pairs, so they
have half as many columns as the row. Backward turns the gradient back, and goes on as that of the norm in `norm.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardformer.modeling.kernels.norm import affine, roundings
from shardformer.modeling.kernels.plain import Pairs, Rounds
from shardformer.modeling.kernels.rows import (
    TL_DTYPES,
    Rows,
    columns,
    compute_dtype,
    inside,
    is_full,
    normalised,
    num_pieces,
    piece_of,
    start_of,
    with_rows,
    zeros,
)
from shardformer.modeling.norm_orders import Order


@triton.jit
def load_pair(
    ptr,
    start,
    head_stride,
    stride,
    there,
    i: tl.constexpr,
    halves: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Firsts and seconds, each [R, P], of the pairs in the i-th piece of rows that begin at start [R]."""
    if halves:
        pairs = columns(i, PIECE).to(tl.int64)
        along = (pairs // (D // 2)) * head_stride + (pairs % (D // 2)) * stride
        at, mask = ptr + start[:, None] + along[None, :], inside(there, i, C // 2, PIECE)
        first = tl.load(at, mask=mask, other=0.0)
        second = tl.load(at + (D // 2) * stride, mask=mask, other=0.0)
    else:
        both = features(i, PIECE).to(tl.int64)
        along = (both // D) * head_stride + (both % D) * stride
        mask = there[:, None]
        if not is_full(i, C // 2, PIECE):
            mask = mask & (both < C)[None, :]
        value = tl.load(ptr + start[:, None] + along[None, :], mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(value, [TILE, PIECE, 2]))
    return first, second


@triton.jit
def load_pairs(
    ptr,
    strides,
    rows,
    there,
    n1,
    n2,
    halves: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Firsts and seconds of the rows [R] of an operand [N0, N1, N2, C], in pieces [R, P]."""
    start = start_of(strides, rows, n1, n2)
    firsts, seconds = (), ()
    for i in tl.static_range(num_pieces(C // 2, PIECE)):
        first, second = load_pair(ptr, start, D * strides[3], strides[3], there, i, halves, D, C, TILE, PIECE)
        firsts, seconds = firsts + (first,), seconds + (second,)
    return firsts, seconds


@triton.jit
def features(i: tl.constexpr, PIECE: tl.constexpr):
    """The features [2 · P] of neighbours in the i-th piece."""
    return tl.arange(0, 2 * PIECE) + 2 * i * PIECE


@triton.jit
def load_vector(
    ptr, i: tl.constexpr, halves: tl.constexpr, D: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr
):
    """Firsts and seconds, each [1, P], of a vector [C]."""
    begin = tl.zeros([1], tl.int64)
    return load_pair(ptr, begin, D, 1, begin == 0, i, halves, D, C, 1, PIECE)


@triton.jit
def load_tables(
    cos_ptr,
    cos_strides,
    sin_ptr,
    sin_strides,
    rows,
    there,
    n1,
    n2,
    i: tl.constexpr,
    halves: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The cosines of firsts and of seconds and their sines, each [R, P], in the i-th piece of the rows [R]."""
    of_cos, of_sin = start_of(cos_strides, rows, n1, n2), start_of(sin_strides, rows, n1, n2)
    c1, c2 = load_pair(cos_ptr, of_cos, cos_strides[3], cos_strides[4], there, i, halves, D, C, TILE, PIECE)
    s1, s2 = load_pair(sin_ptr, of_sin, sin_strides[3], sin_strides[4], there, i, halves, D, C, TILE, PIECE)
    return c1, c2, s1, s2


@triton.jit
def store_pair(
    at_ptr,
    first,
    second,
    there,
    i: tl.constexpr,
    halves: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Firsts and seconds [R, P] to rows that begin at at_ptr [R]."""
    if halves:
        pairs = columns(i, PIECE)
        at = at_ptr[:, None] + ((pairs // (D // 2)) * D + pairs % (D // 2))[None, :]
        mask = inside(there, i, C // 2, PIECE)
        tl.store(at, first, mask=mask)
        tl.store(at + D // 2, second, mask=mask)
    else:
        both = features(i, PIECE)
        mask = there[:, None]
        if not is_full(i, C // 2, PIECE):
            mask = mask & (both < C)[None, :]
        value = tl.reshape(tl.join(first, second), [TILE, 2 * PIECE])
        tl.store(at_ptr[:, None] + both[None, :], value, mask=mask)


@triton.jit
def store_pairs(
    ptr,
    first,
    second,
    rows,
    there,
    i: tl.constexpr,
    halves: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Firsts and seconds [R, P] to rows [R] of a contiguous [N, C], if there is one."""
    if ptr is not None:
        to = ptr.dtype.element_ty
        at_ptr = ptr + rows.to(tl.int64) * C
        store_pair(at_ptr, first.to(to), second.to(to), there, i, halves, D, C, TILE, PIECE)


@triton.jit
def pair_statistics(
    firsts,
    seconds,
    there,
    eps: tl.constexpr,
    centres: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    T: tl.constexpr,
):
    """As `rows.statistics`, of rows in pairs."""
    mean = tl.zeros([TILE, 1], T)
    if centres:
        total = tl.zeros([TILE, PIECE], T)
        for i in tl.static_range(num_pieces(C // 2, PIECE)):
            total += firsts[i].to(T) + seconds[i].to(T)
        mean = tl.sum(total, 1)[:, None] / C
    squares = tl.zeros([TILE, PIECE], T)
    for i in tl.static_range(num_pieces(C // 2, PIECE)):
        first, second = firsts[i].to(T) - mean, seconds[i].to(T) - mean
        if centres and not is_full(i, C // 2, PIECE):
            mask = inside(there, i, C // 2, PIECE)
            first, second = tl.where(mask, first, 0.0), tl.where(mask, second, 0.0)
        squares += first * first + second * second
    return mean, tl.rsqrt(tl.sum(squares, 1)[:, None] / C + eps)


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
    ONCE: tl.constexpr,
    D: tl.constexpr,
    NORMED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    TURNED: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = rows < num_rows
    firsts, seconds = load_pairs(x_ptr, x_strides, rows, there, n1, n2, halves, D, C, TILE, PIECE)
    if ONCE:
        c1, c2, s1, s2 = load_tables(
            cos_ptr, cos_strides, sin_ptr, sin_strides, rows, there, n1, n2, 0, halves, D, C, TILE, PIECE
        )
    mean, rstd = pair_statistics(firsts, seconds, there, eps, centres, C, TILE, PIECE, T)
    for i in tl.static_range(num_pieces(C // 2, PIECE)):
        # One by one: Triton 3.6 has no tuple with None in it.
        w1 = None
        w2 = None
        b1 = None
        b2 = None
        if weight_ptr is not None:
            w1, w2 = load_vector(weight_ptr, i, halves, D, C, PIECE)
        if bias_ptr is not None:
            b1, b2 = load_vector(bias_ptr, i, halves, D, C, PIECE)
        y1 = affine((firsts[i].to(T) - mean) * rstd, w1, b1, offset, NORMED, WEIGHTED, BIASED, T)
        y2 = affine((seconds[i].to(T) - mean) * rstd, w2, b2, offset, NORMED, WEIGHTED, BIASED, T)
        if not ONCE:
            c1, c2, s1, s2 = load_tables(
                cos_ptr, cos_strides, sin_ptr, sin_strides, rows, there, n1, n2, i, halves, D, C, TILE, PIECE
            )
        out1 = (y1 * c1.to(T)).to(TURNED).to(T) - (y2 * s1.to(T)).to(TURNED).to(T)
        out2 = (y2 * c2.to(T)).to(TURNED).to(T) + (y1 * s2.to(T)).to(TURNED).to(T)
        # The sum is rounded to the dtype of the products before it is stored in that of the output.
        out1, out2 = out1.to(TURNED).to(T), out2.to(TURNED).to(T)
        store_pairs(out_ptr, out1, out2, rows, there, i, halves, D, C, TILE, PIECE)


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
    ONCE: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    program = tl.program_id(0)
    # Programs are numbered by group, then by chunk. Each adds up the rows of its chunk, tile after tile.
    group, begin = program // num_chunks, (program % num_chunks) * chunk_tiles * TILE
    dweight1, dweight2, dbias1, dbias2 = (
        zeros(C // 2, PIECE, T),
        zeros(C // 2, PIECE, T),
        zeros(C // 2, PIECE, T),
        zeros(C // 2, PIECE, T),
    )
    in_group = begin + tl.arange(0, TILE)
    next_rows, next_there = group * group_rows + in_group, in_group < group_rows
    next1, next2 = load_pairs(x_ptr, x_strides, next_rows, next_there, n1, n2, halves, D, C, TILE, PIECE)
    for tile in range(0, chunk_tiles):
        firsts, seconds, rows, there = next1, next2, next_rows, next_there
        grads1, grads2 = load_pairs(grad_ptr, grad_strides, rows, there, n1, n2, halves, D, C, TILE, PIECE)
        if ONCE:
            c1, c2, s1, s2 = load_tables(
                cos_ptr, cos_strides, sin_ptr, sin_strides, rows, there, n1, n2, 0, halves, D, C, TILE, PIECE
            )
        # The next tile is on its way while this one is computed. Behind the last there is none.
        in_group += TILE
        next_rows = group * group_rows + in_group
        next_there = (in_group < group_rows) & (tile + 1 < chunk_tiles)
        next1, next2 = load_pairs(x_ptr, x_strides, next_rows, next_there, n1, n2, halves, D, C, TILE, PIECE)
        mean, rstd = pair_statistics(firsts, seconds, there, eps, centres, C, TILE, PIECE, T)
        new_dweight1, new_dweight2, new_dbias1, new_dbias2 = (), (), (), ()
        normed1, normed2, dnormed1, dnormed2 = (), (), (), ()
        along, total = tl.zeros([TILE, PIECE], T), tl.zeros([TILE, PIECE], T)
        for i in tl.static_range(num_pieces(C // 2, PIECE)):
            x1, x2 = firsts[i].to(T), seconds[i].to(T)
            x1 = normalised(x1, mean, rstd, there, i, eps, centres, C // 2, PIECE)
            x2 = normalised(x2, mean, rstd, there, i, eps, centres, C // 2, PIECE)
            w1 = None
            w2 = None
            b1 = None
            b2 = None
            if weight_ptr is not None:
                w1, w2 = load_vector(weight_ptr, i, halves, D, C, PIECE)
            if bias_ptr is not None:
                b1, b2 = load_vector(bias_ptr, i, halves, D, C, PIECE)
            g1, g2 = grads1[i].to(T), grads2[i].to(T)
            y1, y2 = affine(x1, w1, b1, offset, T, T, T, T), affine(x2, w2, b2, offset, T, T, T, T)
            store_pairs(dcos_ptr, g1 * y1, g2 * y2, rows, there, i, halves, D, C, TILE, PIECE)
            store_pairs(dsin_ptr, -g1 * y2, g2 * y1, rows, there, i, halves, D, C, TILE, PIECE)
            # y1 goes into out1 by c1 and into out2 by s2, and y2 into out2 by c2 and into out1 by −s1.
            if not ONCE:
                c1, c2, s1, s2 = load_tables(
                    cos_ptr,
                    cos_strides,
                    sin_ptr,
                    sin_strides,
                    rows,
                    there,
                    n1,
                    n2,
                    i,
                    halves,
                    D,
                    C,
                    TILE,
                    PIECE,
                )
            dy1, dy2 = g1 * c1.to(T) + g2 * s2.to(T), g2 * c2.to(T) - g1 * s1.to(T)
            new_dbias1 = new_dbias1 + (with_rows(dbias1[i], dy1, dbias_ptr),)
            new_dbias2 = new_dbias2 + (with_rows(dbias2[i], dy2, dbias_ptr),)
            new_dweight1 = new_dweight1 + (with_rows(dweight1[i], dy1 * x1, dweight_ptr),)
            new_dweight2 = new_dweight2 + (with_rows(dweight2[i], dy2 * x2, dweight_ptr),)
            if weight_ptr is not None:
                dy1, dy2 = dy1 * (w1.to(T) + offset), dy2 * (w2.to(T) + offset)
            along += dy1 * x1 + dy2 * x2
            total += dy1 + dy2
            normed1, normed2 = normed1 + (x1,), normed2 + (x2,)
            dnormed1, dnormed2 = dnormed1 + (dy1,), dnormed2 + (dy2,)
        dbias1, dbias2, dweight1, dweight2 = new_dbias1, new_dbias2, new_dweight1, new_dweight2
        if dx_ptr is not None:
            mean_along, mean_dnormed = tl.sum(along, 1)[:, None] / C, 0.0
            if centres:
                mean_dnormed = tl.sum(total, 1)[:, None] / C
            for i in tl.static_range(num_pieces(C // 2, PIECE)):
                dx1 = (dnormed1[i] - normed1[i] * mean_along - mean_dnormed) * rstd
                dx2 = (dnormed2[i] - normed2[i] * mean_along - mean_dnormed) * rstd
                store_pairs(dx_ptr, dx1, dx2, rows, there, i, halves, D, C, TILE, PIECE)
    store_sums(dweight_ptr, dweight1, dweight2, program, halves, D, C, PIECE)
    store_sums(dbias_ptr, dbias1, dbias2, program, halves, D, C, PIECE)


@triton.jit
def store_sums(
    ptr,
    firsts,
    seconds,
    program,
    halves: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    PIECE: tl.constexpr,
):
    """A program's row of `partial`, if that gradient is wanted."""
    if ptr is not None:
        begin = tl.zeros([1], tl.int64)
        for i in tl.static_range(num_pieces(C // 2, PIECE)):
            at = ptr + program.to(tl.int64) * C + begin
            store_pair(at, firsts[i][None, :], seconds[i][None, :], begin == 0, i, halves, D, C, 1, PIECE)


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
        tables = _table(rows, cos), _table(rows, sin)
        ctx.save_for_backward(x, cos, sin, weight, bias)
        ctx.options = order, eps, pairs, wide
        rows.launch(
            _forward,
            triton.cdiv(rows.num_rows, rows.tile),
            out,
            *rows.of(x),
            weight,
            bias,
            *tables[0],
            *tables[1],
            rows.num_rows,
            eps=eps,
            offset=order.offset,
            centres=order.centres,
            **_pieces(rows, tables, pairs),
            NORMED=TL_DTYPES[normed],
            WEIGHTED=TL_DTYPES[weighted],
            BIASED=TL_DTYPES[biased],
            TURNED=TL_DTYPES[turned],
            T=TL_DTYPES[wide],
            is_exact=True,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, cos, sin, weight, bias = ctx.saved_tensors
        order, eps, pairs, wide = ctx.options
        needs_x, needs_cos, needs_sin, needs_weight, needs_bias = ctx.needs_input_grad[:5]
        rows = Rows(x)
        tables = _table(rows, cos), _table(rows, sin)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
        # Tables are seldom learned: their gradients are written whole and summed by PyTorch.
        dcos, dsin = (
            torch.empty(x.shape, dtype=wide, device=x.device) if needed else None
            for needed in (needs_cos, needs_sin)
        )
        wanted = weight if needs_weight else None, bias if needs_bias else None
        dweight, dbias = rows.partials(wide, *wanted)
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
            *tables[0],
            *tables[1],
            rows.group_rows,
            rows.num_chunks,
            rows.chunk_tiles,
            eps=eps,
            offset=order.offset,
            centres=order.centres,
            **_pieces(rows, tables, pairs),
            T=TL_DTYPES[wide],
            is_exact=False,
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
            *rows.sums(*wanted),
            *[None] * 4,
        )


def _table(rows: Rows, table: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A table that broadcasts to [..., C / D, D], and its strides [N0, N1, N2, C / D, D]."""
    head_dim = table.shape[-1]
    heads = rows.num_features // head_dim
    wide = table.expand(*rows.shape[:-1], heads, head_dim)
    wide = wide.reshape(rows.n0, rows.n1, rows.n2, heads, head_dim)
    return wide, wide.stride()


def _pieces(rows: Rows, tables: Sequence[tuple[Tensor, tuple[int, ...]]], pairs: Pairs) -> dict[str, Any]:
    """How long pieces of pairs are, and whether all of a row have the same cosines and sines."""
    piece, (*_, heads, head_dim) = piece_of(rows.num_features // 2), tables[0][0].shape
    # Heads share them, and every piece begins with a head: of 40 heads of 128 in 5 pieces a fifth is read.
    are_shared = (2 * piece) % head_dim == 0 and all(heads == 1 or strides[3] == 0 for _, strides in tables)
    return {
        "halves": pairs == "halves", "ONCE": are_shared or 2 * piece >= rows.num_features,
        "D": head_dim, "piece": piece,
    }  # fmt: skip
