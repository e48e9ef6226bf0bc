"""The gated residual x + y · gate, in one pass: reads x and y, writes the sum.

The gradient of x is the incoming one. The backward kernel reads it and y, writes dy = g · gate, and sums
dgate = Σ g · y over the rows that share a gate.
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
    compute_dtype,
    load,
    num_pieces,
    store_rows,
    store_sum,
    zeros,
)


@triton.jit
def _forward(
    out_ptr,
    x_ptr,
    x_strides,
    y_ptr,
    y_strides,
    gate_ptr,
    gate_strides,
    num_rows,
    n1,
    n2,
    GATED: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = rows < num_rows
    x = load(x_ptr, x_strides, rows, there, n1, n2, C, PIECE)
    y = load(y_ptr, y_strides, rows, there, n1, n2, C, PIECE)
    gate = load(gate_ptr, gate_strides, rows, there, n1, n2, C, PIECE)
    for i in tl.static_range(num_pieces(C, PIECE)):
        # Rounded as the plain operations round: the product here, and the sum when it is stored.
        gated = (y[i].to(T) * gate[i].to(T)).to(GATED).to(T)
        store_rows(out_ptr, x[i].to(T) + gated, rows, there, i, C, PIECE)


@triton.jit
def _backward(
    dy_ptr,
    dgate_ptr,
    grad_ptr,
    grad_strides,
    y_ptr,
    y_strides,
    gate_ptr,
    gate_strides,
    group_rows,
    num_chunks,
    chunk_tiles,
    n1,
    n2,
    T: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    program = tl.program_id(0)
    # Programs are numbered by group, then by chunk. Each adds up the rows of its chunk, tile after tile.
    group, first = program // num_chunks, (program % num_chunks) * chunk_tiles * TILE
    dgate = zeros(C, PIECE, T)
    for tile in range(0, chunk_tiles):
        in_group = first + tile * TILE + tl.arange(0, TILE)
        rows, there = group * group_rows + in_group, in_group < group_rows
        grad = load(grad_ptr, grad_strides, rows, there, n1, n2, C, PIECE)
        if dgate_ptr is not None:
            y = load(y_ptr, y_strides, rows, there, n1, n2, C, PIECE)
            summed = ()
            for i in tl.static_range(num_pieces(C, PIECE)):
                summed = summed + (dgate[i] + tl.sum(grad[i].to(T) * y[i].to(T), 0),)
            dgate = summed
        if dy_ptr is not None:
            gate = load(gate_ptr, gate_strides, rows, there, n1, n2, C, PIECE)
            for i in tl.static_range(num_pieces(C, PIECE)):
                store_rows(dy_ptr, grad[i].to(T) * gate[i].to(T), rows, there, i, C, PIECE)
    store_sum(dgate_ptr, dgate, program, C, PIECE)


class GatedResidual(torch.autograd.Function):
    """x, y [..., C]; gate broadcast to them → [..., C]. Keeps y and gate for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gate: Tensor, rounds: Rounds) -> Tensor:
        wide = compute_dtype([x, y, gate])
        gated = wide if rounds == "end" else torch.promote_types(y.dtype, gate.dtype)
        dtype = x.dtype if rounds == "end" else torch.promote_types(x.dtype, gated)
        ctx.save_for_backward(y, gate)
        ctx.options = x.dtype, wide
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        rows = Rows(x)
        rows.launch(
            _forward,
            triton.cdiv(rows.num_rows, rows.tile),
            out,
            *rows.of(x),
            *rows.of(y),
            *rows.of(gate),
            rows.num_rows,
            GATED=TL_DTYPES[gated],
            T=TL_DTYPES[wide],
            is_exact=True,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, gate = ctx.saved_tensors
        x_dtype, wide = ctx.options
        needs_x, needs_y, needs_gate = ctx.needs_input_grad[:3]
        wanted = gate if needs_gate else None
        rows = Rows(y, wanted, is_light=True)
        dy = torch.empty(y.shape, dtype=y.dtype, device=y.device) if needs_y else None
        (dgate,) = rows.partials(wide, wanted)
        if needs_y or needs_gate:
            rows.launch(
                _backward,
                rows.num_groups * rows.num_chunks,
                dy,
                dgate,
                *rows.of(grad),
                *rows.of(y),
                *rows.of(gate),
                rows.group_rows,
                rows.num_chunks,
                rows.chunk_tiles,
                T=TL_DTYPES[wide],
                is_exact=False,
            )
        return grad.to(x_dtype) if needs_x else None, dy, *rows.sums(wanted), None
