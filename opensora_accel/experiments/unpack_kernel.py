"""Weights from blocks of int8 or fp8 in one pass on a GPU: a byte is read, a number is written.

torch's operations take a byte to fp32, that times its scale, the product to bf16, and that to its parameter's place: 23
bytes a number are read and written, where these are 3.1. The bits that come out are the same.

fp8 is read by its bits, so that GPUs without it do as well. A number of e4m3 has 4 bits of exponent, biased by 7, and
3 of mantissa; fp32 has 8, biased by 127, and 23. Shifted by 20 bits to where fp32 has them it is 2^120 times too small:

    e4m3   0 1000 010                            1.25 · 2^(8 − 7)
    fp32   0 00001000 01000000000000000000000    1.25 · 2^(8 − 127)

Numbers below the smallest power come out right as well, since fp32 has such too.

A thread writes 16 bytes at once where every block begins, and ends, at a multiple of 16 numbers, as the blocks of
linear layers do. Where one does not, nothing is known of any, and a thread writes number by number.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Blocks that one program takes.
_TILE = 32
# What divides the places of blocks that are written 16 bytes at once.
WHOLE = 16


@triton.jit
def _from_e4m3(bits):
    """fp32 from the bits of e4m3, int32 below 256; it has no infinity, and two NaN."""
    shifted = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    value = shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _unpack(
    output_ptr,
    output_stride,
    blocks_ptr,
    blocks_stride,
    scales_ptr,
    scales_stride,
    starts_ptr,
    sizes_ptr,
    num_blocks,
    is_fp8: tl.constexpr,
    STEP: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    block, rank = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1).to(tl.int64)
    there, within = block < num_blocks, tl.arange(0, BLOCK)[None, :]
    starts = tl.multiple_of(tl.load(starts_ptr + block, mask=there, other=0), [STEP])
    sizes = tl.multiple_of(tl.load(sizes_ptr + block, mask=there, other=0), [STEP])
    scales = tl.load(scales_ptr + rank * scales_stride + block, mask=there, other=0.0)
    at = rank * blocks_stride + block.to(tl.int64)[:, None] * BLOCK + within
    value = tl.load(blocks_ptr + at, mask=there[:, None], other=0)
    number = _from_e4m3(value.to(tl.int32)) if is_fp8 else value.to(tl.float32)
    out = (number.to(T) * scales.to(T)[:, None]).to(output_ptr.dtype.element_ty)  # the one rounding
    tl.store(output_ptr + rank * output_stride + starts[:, None] + within, out, mask=within < sizes[:, None])


def unpack_blocks(
    output: Tensor, blocks: Tensor, scales: Tensor, starts: Tensor, sizes: Tensor, step: int = 1
) -> None:
    """Writes the numbers of the blocks of P ranks to where each belongs.

    Args:
        output: [P, n], of any float dtype; contiguous along n.
        blocks: int8 or float8_e4m3fn [P, N · B]; contiguous along its blocks.
        scales: fp32 [P, N].
        starts: int64 [N], where in n each block begins.
        sizes: int64 [N], how many of its B numbers there are.
        step: what divides all starts and sizes, as the caller knows: `WHOLE`, or 1.
    """
    (num_ranks, num_blocks), is_fp8 = scales.shape, blocks.dtype == torch.float8_e4m3fn
    if not num_blocks:
        return
    launch: Any = _unpack[triton.cdiv(num_blocks, _TILE), num_ranks]
    with torch.cuda.device(output.device) if output.is_cuda else nullcontext():
        launch(
            output,
            output.stride(0),
            blocks.view(torch.uint8) if is_fp8 else blocks,
            blocks.stride(0),
            scales,
            scales.stride(0),
            starts,
            sizes,
            num_blocks,
            is_fp8=is_fp8,
            STEP=step,
            T=tl.float64 if output.dtype == torch.float64 else tl.float32,
            BLOCK=blocks.size(1) // num_blocks,
            TILE=_TILE,
        )
