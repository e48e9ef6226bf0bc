"""How kernels find the rows of their operands, and how gradients of broadcast operands are summed.

A kernel sees every operand as [N0, N1, N2, C], expanded to the shape of x: it is given four strides, and 0 where an
operand is broadcast. So neither transposed inputs nor [B, 1, C] scales are copied.

The gradient of an operand that is broadcast over tokens is a sum over them. Rows that share all such operands are a
group: with x [B, S, C] and scale [B, 1, C] there are B groups of S rows; a weight [C] alone makes one of B · S. Every
group is cut into chunks, by the shape alone. One program sums the rows of one chunk, in fp32 and in order, into a
row of its own of `partial` [groups, chunks, C], which is summed afterwards. Nothing is added atomically: two runs give
the same bits, on whatever GPU of a kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TL_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# Values that one program holds of each operand, and the programs that a backward is spread over.
_TILE, _PROGRAMS = 4096, 512


class Rows:
    """The rows [N, C] of x [..., C], and the launch of kernels over them.

    operands: those whose gradients are summed over the rows that share them; None for one that is not there.
    """

    def __init__(self, x: Tensor, *operands: Tensor | None):
        self.shape, self.device = x.shape, x.device
        *lead, self.num_features = x.shape
        self.num_rows = math.prod(lead)
        # [N0, N1, N2]: further dimensions are folded into the first.
        folded = [math.prod(lead[:-2]), *lead[-2:]] if len(lead) > 3 else [1] * (3 - len(lead)) + lead
        self.n0, self.n1, self.n2 = folded
        self.block = triton.next_power_of_2(self.num_features)
        self.tile = max(1, min(_TILE // self.block, triton.next_power_of_2(max(1, self.num_rows))))
        # The dimensions of groups: up to the last in which an operand has more than one value.
        padded = [(1,) * (x.dim() - t.dim()) + tuple(t.shape) for t in operands if t is not None]
        varies = [i for i in range(len(lead)) if any(shape[i] != 1 for shape in padded)]
        self._group_dims = varies[-1] + 1 if varies else 0
        self.num_groups = math.prod(lead[: self._group_dims])
        self.group_rows = math.prod(lead[self._group_dims :])
        tiles = triton.cdiv(self.group_rows, self.tile)
        self.num_chunks = max(1, min(tiles, triton.cdiv(_PROGRAMS, max(1, self.num_groups))))
        self.chunk_tiles = triton.cdiv(tiles, self.num_chunks)

    def of(self, tensor: Tensor | None) -> tuple[Tensor | None, tuple[int, ...]]:
        """A tensor that broadcasts to x, and its strides [N0, N1, N2, C]."""
        if tensor is None:
            return None, ()
        wide = tensor.expand(self.shape).reshape(self.n0, self.n1, self.n2, self.num_features)
        return wide, wide.stride()

    def partial(self, operand: Tensor | None, wanted: bool, dtype: torch.dtype) -> Tensor | None:
        """[groups, chunks, C] for the gradient of an operand that is there and wants one."""
        if operand is None or not wanted:
            return None
        # No program writes to it where there are no rows.
        make = torch.empty if self.num_rows else torch.zeros
        return make(self.num_groups, self.num_chunks, self.num_features, dtype=dtype, device=self.device)

    def summed(self, partial: Tensor | None, operand: Tensor | None) -> Tensor | None:
        """The gradient of an operand, in its shape and dtype, from what the programs wrote.

        Args:
            partial: [groups, chunks, C].
            operand: of any shape that broadcasts to x [..., C].
        """
        if partial is None or operand is None:
            return None
        lead = [*self.shape[: self._group_dims], *[1] * (len(self.shape) - 1 - self._group_dims)]
        return partial.sum(1).reshape(*lead, self.num_features).sum_to_size(operand.shape).to(operand.dtype)

    def launch(self, kernel: Any, num_programs: int, *arguments: Any, **options: Any) -> None:
        """Runs a kernel, unless there are no rows."""
        if not num_programs or not self.num_rows:
            return
        # Triton launches on the current device, whatever device its arguments are on.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            kernel[(num_programs,)](
                *arguments,
                **options,
                n1=self.n1,
                n2=self.n2,
                C=self.num_features,
                TILE=self.tile,
                BLOCK=self.block,
                num_warps=max(1, min(16, self.tile * self.block // 512)),
                # A fused multiply-add rounds once where the plain operations round twice.
                enable_fp_fusion=False,
            )


def compute_dtype(tensors: Sequence[Tensor | None]) -> torch.dtype:
    """fp64 if any of the tensors is, else fp32; they may be of any shape."""
    return (
        torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
    )


@triton.jit
def load(ptr, strides, rows, cols, mask, n1, n2, T: tl.constexpr):
    """The rows [R, C] of an operand [N0, N1, N2, C]; rows, cols: [R], [C]."""
    outer = rows // n2
    start = (outer // n1) * strides[0] + (outer % n1) * strides[1] + (rows % n2) * strides[2]
    along = cols.to(tl.int64) * strides[3]
    return tl.load(ptr + start[:, None] + along[None, :], mask=mask, other=0.0).to(T)


@triton.jit
def statistics(x, mask, eps: tl.constexpr, centres: tl.constexpr, C: tl.constexpr):
    """The mean and 1 / rms(x − mean) of the rows of x [R, C], each [R, 1]; a mean of 0 where nothing is centred."""
    mean = tl.zeros_like(tl.sum(x, 1)[:, None])
    if centres:
        mean = tl.sum(x, 1)[:, None] / C
        x = tl.where(mask, x - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(x * x, 1)[:, None] / C + eps)


@triton.jit
def store_sum(ptr, value, program, cols, C: tl.constexpr):
    """A program's row [C] of `partial`, if that gradient is wanted."""
    if ptr is not None:
        tl.store(ptr + program * C + cols, value, mask=cols < C)
