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
from shardformer.modeling.kernels.rows import TL_DTYPES, Rows, compute_dtype, load, store_sum


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
    BLOCK: tl.constexpr,
):
    # In 64 bits: rows times features may pass 2³¹.
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < C)[None, :]
    gate = load(gate_ptr, gate_strides, rows, cols, mask, n1, n2, T)
    # Rounded as the plain operations round: the product here, and the sum when it is stored.
    gated = (load(y_ptr, y_strides, rows, cols, mask, n1, n2, T) * gate).to(GATED).to(T)
    out = load(x_ptr, x_strides, rows, cols, mask, n1, n2, T) + gated
    tl.store(out_ptr + rows[:, None] * C + cols[None, :], out, mask=mask)


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
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    dgate = tl.zeros([BLOCK], T)
    for tile in range(0, chunk_tiles):
        # Programs are numbered by group, then by chunk. Each adds up the rows of its chunk, tile after tile.
        in_group = ((program % num_chunks) * chunk_tiles + tile) * TILE + tl.arange(0, TILE)
        rows = (program // num_chunks) * group_rows + in_group
        mask = (in_group < group_rows)[:, None] & (cols < C)[None, :]
        grad = load(grad_ptr, grad_strides, rows, cols, mask, n1, n2, T)
        if dgate_ptr is not None:
            dgate += tl.sum(grad * load(y_ptr, y_strides, rows, cols, mask, n1, n2, T), 0)
        if dy_ptr is not None:
            dy = grad * load(gate_ptr, gate_strides, rows, cols, mask, n1, n2, T)
            tl.store(dy_ptr + rows[:, None] * C + cols[None, :], dy, mask=mask)
    store_sum(dgate_ptr, dgate, program, cols, C)


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
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, gate = ctx.saved_tensors
        x_dtype, wide = ctx.options
        needs_x, needs_y, needs_gate = ctx.needs_input_grad[:3]
        rows = Rows(y, gate if needs_gate else None)
        dy = torch.empty(y.shape, dtype=y.dtype, device=y.device) if needs_y else None
        dgate = rows.partial(gate, needs_gate, wide)
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
            )
        return grad.to(x_dtype) if needs_x else None, dy, rows.summed(dgate, gate), None
