"""Attention over keys that come in blocks or tiles, and the merging of what each gives. Not differentiable.

A row's result over a block is its output o and its log-sum-exp, lse = log Σ exp(score). Two blocks a and b make the
whole row:

    o = (1 − w)·o_a + w·o_b    with w = exp(lse_b) / (exp(lse_a) + exp(lse_b)) = σ(lse_b − lse_a)
    lse = log(exp(lse_a) + exp(lse_b))

If the row's scores over a add up to 3 and those over b to 1, w is ¼. The sigmoid neither overflows nor divides. In
backward no merging is needed: each block is given the output and the log-sum-exp of the whole row, and its weights
exp(score − lse) are then those of the whole softmax.

Source: the online softmax of Milakov and Gimelshein, arXiv:1805.02867; FlashAttention-2's backward, arXiv:2307.08691.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from opensora_accel.attention.balance import Tile
from opensora_accel.attention.kernels import (
    Grads,
    PiecesKernel,
    Problem,
    Scores,
    choose_for_pieces,
    choose_kernel,
)
from opensora_accel.attention.slices import Pieces

# Gradients of a run of keys and of its values, [B, run, H_kv, D].
Part = tuple[slice, Tensor, Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Attention over one block of keys. Not differentiable.

    Args:
        q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D], the keys and values of the block.

    Returns:
        The output [B, S_q, H, D] and the log-sum-exp [B, H, S_q]; 0 and −inf for a row that sees no key.
    """
    if q.numel() == 0 or k.numel() == 0:
        lse = q.new_full((q.size(0), q.size(2), q.size(1)), float("-inf"), dtype=accumulator_dtype(q.dtype))
        return q.new_zeros(*q.shape[:3], v.size(3)), lse
    if scores.reversed:
        # Read from its end, a reversed triangle is one that kernels know.
        out, lse = attend(q.flip(1), k.flip(1), v.flip(1), scores.from_the_end())
        return out.flip(1), lse.flip(2)
    mask = scores.mask
    out, lse = choose_kernel(Problem.of(q, k, v, mask, scores.causal)).kernel.forward(q, k, v, scores)
    if mask is not None:
        # [B, S_q] or [B, 1]: kernels differ in what they make of a row that sees nothing.
        sees_none = mask.cumsum(1) == 0 if scores.causal else ~mask.any(1, keepdim=True)
        out = out.masked_fill(sees_none[:, :, None, None], 0)
        lse = lse.masked_fill(sees_none[:, None, :], float("-inf"))
    return out, lse


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Makes `out` and `lse`, in place, the attention over their keys and those of the block. Not differentiable.

    Start from a first block, or from zeros with a log-sum-exp of −inf. A row that sees no key in either has output 0
    and log-sum-exp −inf, never NaN.

    Args:
        out: [B, S, H, D], fp32 or fp64: accumulated in fp32, the error does not grow with the number of blocks.
        lse: [B, S, H], of the same dtype, the natural logarithm of the sum over the scaled scores' exponentials.
        block_out: [B, S, H, D], of any dtype.
        block_lse: [B, S, H].

    Raises:
        ValueError: `out` is of a narrower dtype.
    """
    if out.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"partial results are accumulated in fp32 or fp64; got out in {out.dtype}, use out.float()"
        )
    block_lse = block_lse.to(lse.dtype)
    # The block's share of the row, w above. Where both are −inf the difference is NaN, and the share is 0.
    share = torch.sigmoid(block_lse - lse).nan_to_num_(nan=0.0).unsqueeze(-1)
    # The share is exactly 0 for a block that a row sees nothing of, and such a row keeps its bits.
    out.lerp_(block_out.to(out.dtype), share)
    # Last, because the share needs the log-sum-exp from before. Of −inf and −inf it is −inf.
    torch.logaddexp(lse, block_lse, out=lse)


def attend_pieces(
    kernel: PiecesKernel, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pieces: Pieces
) -> tuple[Tensor, Tensor]:
    """Attention over all pieces of one block of keys, in one call. Not differentiable.

    Args:
        q: [B, S_q, H, D], the queries `pieces.rows`; k, v: [B, S_kv, H_kv, D], the keys `pieces.keys`.

    Returns:
        As `attend`.
    """
    out, lse = kernel.forward(q, k, v, scores, pieces)
    # Kernels differ in what they leave of these.
    for run in pieces.unseeing:
        out[:, run.start : run.stop] = 0
        lse[:, :, run.start : run.stop] = float("-inf")
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Grads:
    """Gradients of q, k and v through one block of keys.

    Args:
        grad, out: [B, S_q, H, D], of the whole row; q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D], of the block. lse:
        [B, H, S_q], of the whole row, finite: 0 in place of −inf, for a row without keys, gives all of its masked
            keys the weight 0.
    """
    # A rank without queries takes part in a ring as well, and adds zeros to the gradients of keys.
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if scores.reversed:
        grad, q, k, v, out = (tensor.flip(1) for tensor in (grad, q, k, v, out))
        grads = attend_backward(grad, q, k, v, out, lse.flip(2), scores.from_the_end())
        grad_q, grad_k, grad_v = (each.flip(1) for each in grads)
        return grad_q, grad_k, grad_v
    kernel = choose_kernel(Problem.of(q, k, v, scores.mask, scores.causal)).kernel
    return kernel.backward(grad, q, k, v, out, lse, scores)


class Rows:
    """Attention of this rank's queries over keys that come tile by tile. Not differentiable.

    Args:
        q: [B, S_q, H, D].
        value_dim: D of the values.
    """

    def __init__(self, q: Tensor, value_dim: int, scale: float):
        self._q, self._value_dim, self._scale = q, value_dim, scale
        self._dtype = accumulator_dtype(q.dtype)
        # Until a first part has come there is nothing to merge with, and the part itself is the sum.
        self._out: Tensor | None = None  # [B, S_q, H, D], in fp32 or fp64
        self._lse: Tensor | None = None  # [B, S_q, H]

    def add(self, tile: Tile, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        """Attends to the tile's keys; k, v: [B, S_kv, H_kv, D] and mask [B, S_kv], of the block that it is of."""
        q = rows_of(self._q, tile.rows)
        scores = scores_of(tile, self._scale, mask)
        part, part_lse = attend(q, rows_of(k, tile.keys), rows_of(v, tile.keys), scores)
        self._merge(tile.rows, part, part_lse)

    def add_pieces(self, pieces: Pieces, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        """Attends to all that is seen of a block, in one call if a kernel knows how; k, v, mask: as for `add`."""
        rows, keys = pieces.rows, pieces.keys
        operands = rows_of(self._q, rows), rows_of(k, keys), rows_of(v, keys)
        kernel = _kernel_of(pieces, *operands, mask)
        if kernel is None:
            for tile in pieces.tiles:
                self.add(tile, k, v, mask)
            return
        scores = Scores(self._scale, None if mask is None else rows_of(mask, keys))
        self._merge(rows, *attend_pieces(kernel, *operands, scores, pieces))

    def _merge(self, rows: slice, part: Tensor, part_lse: Tensor) -> None:
        """Adds what rows saw: part [B, rows, H, D], part_lse [B, H, rows]."""
        part_lse = part_lse.transpose(1, 2)  # [B, rows, H], beside the output's layout
        if self._out is None and part.size(1) == self._q.size(1):
            self._out, self._lse = part.to(self._dtype), part_lse.to(self._dtype)
            return
        # In place: these rows change, and all others stay as they are.
        out, lse = self._sums()
        merge_(rows_of(out, rows), rows_of(lse, rows), part, part_lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output [B, S_q, H, D] in the dtype of q, and the log-sum-exp [B, H, S_q]; 0 and −inf without keys."""
        out, lse = self._sums()
        # Rounded to the dtype of q once, after the last merge. The log-sum-exp stays wide and is contiguous,
        # because kernels on CUDA read it in backward through its raw pointer.
        return out.to(self._q.dtype).contiguous(), lse.transpose(1, 2).contiguous()

    def _sums(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            shape = (*self._q.shape[:3], self._value_dim)
            self._out = self._q.new_zeros(shape, dtype=self._dtype)
            self._lse = self._q.new_full(shape[:3], float("-inf"), dtype=self._dtype)
        return self._out, self._lse


class RowsBackward:
    """The gradients of `Rows`, tile by tile.

    Args:
        grad, q, out: [B, S_q, H, D]; lse: [B, H, S_q], of the whole rows.
        is_masked: whether keys may be hidden, so that a row may have seen none.
    """

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float, *, is_masked: bool):
        if is_masked:
            lse = lse.masked_fill(
                lse == float("-inf"), 0
            )  # as `attend_backward` wants it of rows without keys
        self._grad, self._q, self._out, self._lse, self._scale = grad, q, out, lse, scale
        self._is_finite = is_masked
        self._grad_q: Tensor | None = None  # [B, S_q, H, D], added up over all tiles in fp32 or fp64

    def add(self, tile: Tile, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The gradients [B, keys, H_kv, D] of the tile's keys and values, of a block as in `Rows.add`."""
        rows, scores = tile.rows, scores_of(tile, self._scale, mask)
        grad_q, grad_k, grad_v = attend_backward(
            rows_of(self._grad, rows), rows_of(self._q, rows), rows_of(k, tile.keys), rows_of(v, tile.keys),
            rows_of(self._out, rows), rows_of(self._lse, rows, 2), scores,
        )  # fmt: skip
        self._add(rows, grad_q)
        return grad_k, grad_v

    def add_pieces(self, pieces: Pieces, k: Tensor, v: Tensor, mask: Tensor | None) -> Iterator[Part]:
        """The gradients of the keys and values that are seen of a block, by the kernels of `Rows.add_pieces`.

        They are computed while they are asked for, so that those of one tile are there at a time.
        """
        rows, keys = pieces.rows, pieces.keys
        q, of_k, of_v = rows_of(self._q, rows), rows_of(k, keys), rows_of(v, keys)
        kernel = _kernel_of(pieces, q, of_k, of_v, mask)
        if kernel is None:
            for tile in pieces.tiles:
                yield tile.keys, *self.add(tile, k, v, mask)
            return
        lse = rows_of(self._lse, rows, 2)
        if not self._is_finite:
            # Here queries that see nothing are in the call, with a weight of 0 for each key.
            lse = lse.masked_fill(lse == float("-inf"), 0)
        scores = Scores(self._scale, None if mask is None else rows_of(mask, keys))
        operands = rows_of(self._grad, rows), q, of_k, of_v, rows_of(self._out, rows), lse
        grad_q, grad_k, grad_v = kernel.backward(*operands, scores, pieces)
        self._add(rows, grad_q)
        yield keys, grad_k, grad_v

    def _add(self, rows: slice, grad_q: Tensor) -> None:
        """Adds gradients [B, rows, H, D]."""
        if self._grad_q is None and grad_q.size(1) == self._q.size(1):
            self._grad_q = grad_q.to(accumulator_dtype(self._q.dtype))
            return
        of_rows = rows_of(self._sum(), rows)
        of_rows += grad_q

    def result(self) -> Tensor:
        """The gradient of q [B, S_q, H, D], in its dtype."""
        return self._sum().to(self._q.dtype)

    def _sum(self) -> Tensor:
        if self._grad_q is None:
            self._grad_q = self._q.new_zeros(self._q.shape, dtype=accumulator_dtype(self._q.dtype))
        return self._grad_q


def make_operators(
    name: str, mask: str, options: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> torch.library.Library:
    """The operators `name` and `name_backward`, for as long as the result lives.

    As operators of their own they are opaque to torch.compile, and selective checkpointing keeps what they return
    instead of computing and sending everything again. An operator takes plain numbers and names.

    Args:
        mask, options: what they take beside q, k and v, as torch writes it.
        forward: from q, k, v, mask and the options to the output [B, S_q, H, D] and the log-sum-exp [B, H, S_q].
        backward: from the gradient, q, k, v, mask, output, log-sum-exp and the options to the gradients of q, k and v.
    """
    library = torch.library.Library("opensora_accel", "FRAGMENT")
    library.define(f"{name}(Tensor q, Tensor k, Tensor v, {mask}, {options}) -> (Tensor, Tensor)")
    library.define(
        f"{name}_backward(Tensor grad, Tensor q, Tensor k, Tensor v, {mask}, Tensor out, Tensor lse, {options}) -> "
        "(Tensor, Tensor, Tensor)"
    )
    library.impl(name, forward, "CompositeExplicitAutograd")
    library.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"opensora_accel::{name}", _fake_forward)
    torch.library.register_fake(f"opensora_accel::{name}_backward", _fake_backward)
    return library


def _fake_forward(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes only: torch.compile and fake tensors ask for them, and nothing is sent."""
    batch, tokens, heads, _dim = q.shape
    lse = q.new_empty((batch, heads, tokens), dtype=accumulator_dtype(q.dtype))
    return q.new_empty((batch, tokens, heads, v.size(3))), lse


def _fake_backward(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Grads:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def add_parts(grads: tuple[Tensor, Tensor], parts: Iterable[Part]) -> None:
    """Adds gradients of runs of keys and values to those [B, S_kv, H_kv, D] of a block, in place."""
    for keys, *of_run in parts:
        for grad, part in zip(grads, of_run, strict=True):
            of_keys = rows_of(grad, keys)
            of_keys += part


def _kernel_of(pieces: Pieces, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> PiecesKernel | None:
    """The kernel that takes all pieces of these queries and keys at once; None for a call for each tile."""
    if q.numel() == 0 or k.numel() == 0:
        return None
    return choose_for_pieces(Problem.of(q, k, v, mask), pieces.facts).kernel


def scores_of(tile: Tile, scale: float, mask: Tensor | None) -> Scores:
    """How a tile's products become scores; mask: [B, S_kv], of the block that the tile is of."""
    return Scores(scale, None if mask is None else rows_of(mask, tile.keys), tile.causal, tile.reversed)


def rows_of(tensor: Tensor, rows: slice, dim: int = 1) -> Tensor:
    """Rows along a dim of a tensor [B, S, ...]: a view, or the tensor itself where they are all of it (quicker)."""
    if rows.stop - rows.start == tensor.size(dim):
        return tensor
    return tensor.narrow(dim, rows.start, rows.stop - rows.start)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results are added up in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
