"""How kernels find the rows of their operands, and how gradients of broadcast operands are summed.

A kernel sees every operand as [N0, N1, N2, C], expanded to the shape of x: it is given four strides, and 0 where an
operand is broadcast. So neither transposed inputs nor [B, 1, C] scales are copied.

Triton's vectors have a power of two of values. A row of another length lies in several of one length, its pieces, and
what a function here takes or returns of rows is a tuple of as many. Sums over a row add the pieces up value by value
first, so that threads meet once:

    C       pieces      one vector would have
    4096    1 × 4096    4096
    5120    5 × 1024    8192, 37 % of them for nothing
    6144    3 × 2048    8192
    5376    6 × 1024    8192; an eighth for nothing is let pass

The gradient of an operand that is broadcast over tokens is a sum over them. Rows that share all such operands are a
group: with x [B, S, C] and scale [B, 1, C] there are B groups of S rows; a weight [C] alone makes one of B · S. Every
group is cut into chunks, by the shape and the kind of GPU alone. One program sums the rows of one chunk, in fp32 and in
order, into a row of its own of `partials` [groups, chunks, C], which one more launch sums for all operands. Nothing is
added atomically: two runs give the same bits, on whatever GPU of a kind.
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
# Values that one program holds of each operand, where rows are shorter.
_TILE = 2048
# Of a multiprocessor, and how many of those there are where nobody is asked: as in an H100.
_REGISTERS, _MULTIPROCESSORS = 65536, 132
# Of a row, in a thread: about so many, and in a backward with 8 warps at most so many, of two bytes and of more.
_VALUES, _MOST_HALVES, _MOST_VALUES = 16, 24, 20
# Of partial sums, what a program adds up at a time: 395 chunks of 3,072 features are as many programs as 96.
_SUM_CHUNKS, _SUM_COLUMNS = 128, 32
# Of a row's pieces: at most 8, and values that are not there.
_MOST_HALVINGS, _MOST_WASTE = 3, 1 / 8


def piece_of(num_features: int) -> int:
    """How long the pieces of a row are: a power of two, and several of them little longer than the row."""
    whole = int(triton.next_power_of_2(max(1, num_features)))
    lengths = [max(1, whole >> halvings) for halvings in range(_MOST_HALVINGS + 1)]
    taken = {length: triton.cdiv(num_features, length) * length for length in lengths}
    few = (length for length in lengths if taken[length] - num_features <= _MOST_WASTE * taken[length])
    return next(few, min(lengths, key=lambda length: (taken[length], -length)))


class Rows:
    """The rows [N, C] of x [..., C], and the launch of kernels over them.

    operands: those whose gradients are summed over the rows that share them; None for one that is not there.
    is_light: whether a backward holds nothing of a row but x, the gradient and one sum.
    """

    def __init__(self, x: Tensor, *operands: Tensor | None, is_light: bool = False):
        self.shape, self.device = x.shape, x.device
        self._has_halves = x.element_size() <= 2
        self._is_light = is_light and self._has_halves
        *lead, self.num_features = x.shape
        self.num_rows = math.prod(lead)
        # [N0, N1, N2]: further dimensions are folded into the first.
        folded = [math.prod(lead[:-2]), *lead[-2:]] if len(lead) > 3 else [1] * (3 - len(lead)) + lead
        self.n0, self.n1, self.n2 = folded
        self.piece = piece_of(self.num_features)
        # As many values as a thread block has of a row.
        self._width = triton.cdiv(self.num_features, self.piece) * self.piece
        tile = max(1, min(_TILE // self._width, triton.next_power_of_2(max(1, self.num_rows))))
        self.tile = 1 << (tile.bit_length() - 1)
        # The dimensions of groups: up to the last in which an operand has more than one value.
        padded = [(1,) * (x.dim() - t.dim()) + tuple(t.shape) for t in operands if t is not None]
        varies = [i for i in range(len(lead)) if any(shape[i] != 1 for shape in padded)]
        self._group_dims = varies[-1] + 1 if varies else 0
        self.num_groups = math.prod(lead[: self._group_dims])
        self.group_rows = math.prod(lead[self._group_dims :])
        tiles = triton.cdiv(self.group_rows, self.tile)
        # As many programs as run at once: one more, and all would wait for a second turn of it.
        num_warps = self._num_warps(is_exact=False)
        num_programs = _num_running(self.device, num_warps, self._most_registers(num_warps))
        self.chunk_tiles = triton.cdiv(tiles, max(1, min(tiles, num_programs // max(1, self.num_groups))))
        self.num_chunks = max(1, triton.cdiv(tiles, max(1, self.chunk_tiles)))

    def of(self, tensor: Tensor | None) -> tuple[Tensor | None, tuple[int, ...]]:
        """A tensor that broadcasts to x, and its strides [N0, N1, N2, C]."""
        if tensor is None:
            return None, ()
        wide = tensor.expand(self.shape).reshape(self.n0, self.n1, self.n2, self.num_features)
        return wide, wide.stride()

    def partials(self, dtype: torch.dtype, *operands: Tensor | None) -> list[Tensor | None]:
        """[groups, chunks, C] for the gradient of each operand; None where none is wanted.

        dtype: in which they are summed.
        """
        num = sum(operand is not None for operand in operands)
        # No program writes to it where there are no rows.
        make = torch.empty if self.num_rows else torch.zeros
        shape = num, self.num_groups, self.num_chunks, self.num_features
        self._partials = make(shape, dtype=dtype, device=self.device)
        each = iter(self._partials)
        return [None if operand is None else next(each) for operand in operands]

    def sums(self, *operands: Tensor | None) -> list[Tensor | None]:
        """The gradient of each operand, in its shape and dtype, from what the programs wrote to `partials`.

        operands: as they were given there, of any shape that broadcasts to x [..., C].
        """
        there = [operand for operand in operands if operand is not None]
        lead = [*self.shape[: self._group_dims], *[1] * (len(self.shape) - 1 - self._group_dims)]
        # Of the last rounding the kernel takes care, unless something is still to be summed.
        dtypes, num_values = {operand.dtype for operand in there}, self.num_groups * self.num_features
        is_last = len(dtypes) == 1 and all(operand.numel() == num_values for operand in there)
        each = iter(self._summed(dtypes.pop() if is_last else self._partials.dtype) if there else ())
        return [
            None
            if operand is None
            else next(each).reshape(*lead, self.num_features).sum_to_size(operand.shape).to(operand.dtype)
            for operand in operands
        ]

    def _summed(self, dtype: torch.dtype) -> Tensor:
        """[operands, groups, C] of `partials`, all of it in one launch."""
        if self.num_chunks == 1:
            return self._partials[:, :, 0]
        num, *_ = self._partials.shape
        out = self._partials.new_empty(num, self.num_groups, self.num_features, dtype=dtype)
        with self._on_device():
            _sum_chunks[(num * self.num_groups, triton.cdiv(self.num_features, _SUM_COLUMNS))](
                out,
                self._partials,
                self.num_chunks,
                T=TL_DTYPES[self._partials.dtype],
                C=self.num_features,
                CHUNKS=min(_SUM_CHUNKS, int(triton.next_power_of_2(self.num_chunks))),
                COLUMNS=_SUM_COLUMNS,
                num_warps=8,
            )
        return out

    def _on_device(self) -> Any:
        """Triton launches on the current device, whatever device its arguments are on."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _num_warps(self, is_exact: bool) -> int:
        """Of a program of the forward, which rounds as the plain operations do, or of the backward."""
        values = self.tile * self._width
        num_warps = 1 << (max(1, min(16, values // (32 * _VALUES))).bit_length() - 1)
        # A backward holds so much of a row that one program would fill a multiprocessor's registers, and nothing would
        # run while it waits.
        most = _MOST_HALVES if self._has_halves else _MOST_VALUES
        if not is_exact and num_warps == 8 and values > 32 * num_warps * most:
            num_warps = 16
        return num_warps

    def _most_registers(self, num_warps: int) -> int:
        """Of a thread: so many that three programs of 4 warps fit a multiprocessor, two of 8, or one of 16.

        Where a thread has few values four programs of 4 warps do, and three of 8 that hold little else.
        """
        has_few = self.tile * self._width <= 32 * num_warps * _VALUES
        if num_warps == 8 and has_few and self._is_light:
            return 80
        return 168 if num_warps <= 4 and not has_few else 128

    def launch(
        self,
        kernel: Any,
        num_programs: int,
        *arguments: Any,
        is_exact: bool,
        piece: int | None = None,
        **options: Any,
    ) -> None:
        """Runs a kernel, unless there are no rows.

        Args:
            is_exact: whether it rounds where the plain operations do. A fused multiply-add rounds once where they
                round twice.
            piece: of what it takes for a row, where that is not x's own.
        """
        if not num_programs or not self.num_rows:
            return
        num_warps = self._num_warps(is_exact)
        # Halves lie in vectors of their own, whose addresses take more registers.
        is_wide = not is_exact and options.get("halves")
        limit = {} if is_wide else {"maxnreg": self._most_registers(num_warps)}
        with self._on_device():
            kernel[(num_programs,)](
                *arguments,
                **options,
                n1=self.n1,
                n2=self.n2,
                C=self.num_features,
                TILE=self.tile,
                PIECE=self.piece if piece is None else piece,
                num_warps=num_warps,
                enable_fp_fusion=not is_exact,
                **limit,
            )


def _num_running(device: torch.device, num_warps: int, registers: int) -> int:
    """Programs of a backward that a GPU runs at once; 512 where 396 fit take twice the time of 396."""
    is_cuda = device.type == "cuda"
    num = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else _MULTIPROCESSORS
    return int(num) * (_REGISTERS // (32 * num_warps * registers))


def compute_dtype(tensors: Sequence[Tensor | None]) -> torch.dtype:
    """fp64 if any of the tensors is, else fp32; they may be of any shape."""
    return (
        torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
    )


@triton.constexpr_function
def num_pieces(C, PIECE):
    return -(-C // PIECE)


@triton.constexpr_function
def is_full(i, C, PIECE):
    """Whether a row has all columns of its i-th piece."""
    return (i + 1) * PIECE <= C


@triton.jit
def columns(i: tl.constexpr, PIECE: tl.constexpr):
    """The columns [P] of the i-th piece."""
    return tl.arange(0, PIECE) + i * PIECE


@triton.jit
def inside(there, i: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr):
    """Which values of a piece there are: [R, P], or [R, 1] for all of a row; `there` [R] says which rows are."""
    mask = there[:, None]
    if not is_full(i, C, PIECE):
        mask = mask & (columns(i, PIECE) < C)[None, :]
    return mask


@triton.jit
def start_of(strides, rows, n1, n2):
    """Where the rows [R] of an operand [N0, N1, N2, C] begin."""
    # Rows are numbered in 32 bits, in which a GPU divides; features may need 64.
    outer = rows // n2
    at = (outer // n1).to(tl.int64) * strides[0] + (outer % n1).to(tl.int64) * strides[1]
    return at + (rows % n2).to(tl.int64) * strides[2]


@triton.jit
def load_piece(ptr, start, stride, there, i: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr):
    """The i-th piece [R, P] of rows that begin at start [R], as it is stored; 0 where there is no value."""
    along = columns(i, PIECE).to(tl.int64) * stride
    return tl.load(ptr + start[:, None] + along[None, :], mask=inside(there, i, C, PIECE), other=0.0)


@triton.jit
def load(ptr, strides, rows, there, n1, n2, C: tl.constexpr, PIECE: tl.constexpr):
    """The rows [R] of an operand [N0, N1, N2, C], as they are stored; 0 where there is no value."""
    start = start_of(strides, rows, n1, n2)
    pieces = ()
    for i in tl.static_range(num_pieces(C, PIECE)):
        pieces = pieces + (load_piece(ptr, start, strides[3], there, i, C, PIECE),)
    return pieces


@triton.jit
def zeros(C: tl.constexpr, PIECE: tl.constexpr, T: tl.constexpr):
    """A vector [C] of zeros."""
    pieces = ()
    for _ in tl.static_range(num_pieces(C, PIECE)):
        pieces = pieces + (tl.zeros([PIECE], T),)
    return pieces


@triton.jit
def statistics(
    x,
    there,
    eps: tl.constexpr,
    centres: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    T: tl.constexpr,
):
    """The mean and 1 / rms(x − mean) of rows, each [R, 1]; a mean of 0 where nothing is centred."""
    mean = tl.zeros([TILE, 1], T)
    if centres:
        total = tl.zeros([TILE, PIECE], T)
        for i in tl.static_range(num_pieces(C, PIECE)):
            total += x[i].to(T)
        mean = tl.sum(total, 1)[:, None] / C
    squares = tl.zeros([TILE, PIECE], T)
    for i in tl.static_range(num_pieces(C, PIECE)):
        centred = x[i].to(T) - mean
        if centres and not is_full(i, C, PIECE):
            # A value that is not there is not 0 any more.
            centred = tl.where(inside(there, i, C, PIECE), centred, 0.0)
        squares += centred * centred
    return mean, tl.rsqrt(tl.sum(squares, 1)[:, None] / C + eps)


@triton.jit
def normalised(
    x,
    mean,
    rstd,
    there,
    i: tl.constexpr,
    eps: tl.constexpr,
    centres: tl.constexpr,
    C: tl.constexpr,
    PIECE: tl.constexpr,
):
    """(x − mean) · rstd of the i-th piece [R, P], and 0 where there is no value."""
    normed = (x - mean) * rstd
    # A row that is not there has no rms if eps is 0, and a column none of 0 if something was subtracted.
    if eps == 0.0 or (centres and not is_full(i, C, PIECE)):
        normed = tl.where(inside(there, i, C, PIECE), normed, 0.0)
    return normed


@triton.jit
def with_rows(total, value, ptr):
    """A sum [P] and the rows of a value [R, P], if that gradient is wanted."""
    if ptr is not None:
        total += tl.sum(value, 0)
    return total


@triton.jit
def store_rows(ptr, value, rows, there, i: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr):
    """The i-th piece [R, P] of rows of a contiguous [N, C]."""
    at = rows.to(tl.int64)[:, None] * C + columns(i, PIECE)[None, :]
    tl.store(ptr + at, value, mask=inside(there, i, C, PIECE))


@triton.jit
def store_sum(ptr, value, program, C: tl.constexpr, PIECE: tl.constexpr):
    """A program's row of `partials`, if that gradient is wanted."""
    if ptr is not None:
        for i in tl.static_range(num_pieces(C, PIECE)):
            cols = columns(i, PIECE)
            tl.store(ptr + program.to(tl.int64) * C + cols, value[i], mask=cols < C)


@triton.jit
def _sum_chunks(
    out_ptr,
    partial_ptr,
    num_chunks,
    T: tl.constexpr,
    C: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """[N, C] of partial [N, chunks, C], in an order that hangs on the shape alone."""
    of = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([CHUNKS, COLUMNS], T)
    for first in range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        mask = (chunks < num_chunks)[:, None] & (cols < C)[None, :]
        at = (of * num_chunks + chunks)[:, None] * C + cols[None, :]
        total += tl.load(partial_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + of * C + cols, tl.sum(total, 0), mask=cols < C)
