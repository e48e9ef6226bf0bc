"""Pieces that stand in order, by the forms of flash kernels for samples of different lengths.

Such a form is told where each sample's queries and keys start, and reads from one start to the next. Clips of 3 and 2
tokens, one behind the other, start at 0 and 3. What is in no piece belongs to a sample as well, so queries that see
nothing are one without keys, and keys that nobody sees one without queries. Three pieces with a gap of two queries and
of one key, where the last clip is causal:

    # # . . . . .        queries of    3 2 0 2    start at  0 3 5 5 7
    # # . . . . .        keys of       2 0 1 4    start at  0 2 2 3 7
    # # . . . . .
    . . . . . . .        A call has one kind of piece: full ones, or causal ones, whose last query sees all keys.
    . . . . . . .        Pieces of the other kind are gaps to it, and neither call has queries of the other.
    . . . # # # .
    . . . # # # #

What kernels leave of a gap differs: log-sum-exps of +inf (flash-attn 2 and torch) or −inf (flash-attn 3), gradients of
0 or none written at all. It is never read.

Source: mha_varlen_fwd and mha_varlen_bwd in csrc/flash_attn/flash_api.cpp of Dao-AILab/flash-attention v2.8.3, mask.h
there (a causal mask ends in the corner of the last query and key), and hopper/flash_attn_interface.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora_accel.attention.kernels.base import Grads, Problem, Scores, dense_rows
from opensora_accel.attention.kernels.cuda import FlashKernel, unused_seed
from opensora_accel.attention.kernels.flash_attn import (
    FlashAttn2Kernel,
    FlashAttn3Kernel,
    FlashAttnKernel,
    gradients_of,
    outputs_of,
)
from opensora_accel.attention.slices import Kind, PieceFacts, Pieces


class Samples(NamedTuple):
    """Where the samples of a call start.

    Args:
        q_starts, k_starts: [N + 1], int32, of N samples.
        longest_q, longest_k: how many queries and keys a sample has at most.
        in_gap_q, in_gap_k: [B, S], true for queries and keys that the call has nothing of; None where there are none.
    """

    q_starts: Tensor
    k_starts: Tensor
    longest_q: int
    longest_k: int
    in_gap_q: Tensor | None
    in_gap_k: Tensor | None


class _VarlenKernel:
    """What the three share: rows of all samples one behind the other, a call for each kind of piece."""

    name = ""

    def refuses(self, problem: Problem, facts: PieceFacts) -> str | None:
        if others := sorted(facts.kinds - {"full", "causal"}):
            return f"it knows full and causal pieces, and some are {' and '.join(others)}"
        if not facts.in_order:
            return "pieces have queries or keys in common, or stand in another order by their keys"
        if problem.masked:
            return "it takes no key mask"
        return self._unfit(problem)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pieces: Pieces
    ) -> tuple[Tensor, Tensor]:
        """[B, S, H, D] → output [B, S_q, H, D], log-sum-exp [B, H, S_q]."""
        out: Tensor | None = None
        lse: Tensor | None = None
        of_q, of_k, of_v = (_rows(tensor) for tensor in (q, k, v))
        for causal, samples in _calls(pieces, q):
            part, part_lse = self._forward(of_q, of_k, of_v, samples, scores.scale, causal)
            part, part_lse = (
                part.unflatten(0, q.shape[:2]),
                part_lse.unflatten(1, q.shape[:2]).transpose(0, 1),
            )
            if out is None or lse is None:
                out, lse = part, part_lse
                continue
            # Only if there are both kinds: the rows of each stand in a gap of the other.
            assert samples.in_gap_q is not None
            out = torch.where(samples.in_gap_q[:, :, None, None], out, part)
            lse = torch.where(samples.in_gap_q[:, None, :], lse, part_lse)
        assert out is not None and lse is not None
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scores: Scores,
        pieces: Pieces,
    ) -> Grads:
        """grad, out: [B, S_q, H, D]; lse: [B, H, S_q] → gradients [B, S, H, D] of q, k and v."""
        # [B, H, S_q] → [H, B·S_q], in one piece: kernels read it through its pointer.
        of_heads = lse.transpose(0, 1).flatten(1).contiguous()
        of_grad, of_q, of_k, of_v, of_out = (_rows(tensor) for tensor in (grad, q, k, v, out))
        sums: list[Tensor] = []
        for causal, samples in _calls(pieces, q):
            gaps = samples.in_gap_q, samples.in_gap_k, samples.in_gap_k
            operands = of_grad, of_q, of_k, of_v, of_out, of_heads
            grads = self._backward(*operands, samples, scores.scale, causal)
            for number, (part, like, in_gap) in enumerate(zip(grads, (q, k, v), gaps, strict=True)):
                part = part.unflatten(0, like.shape[:2])
                part = part if in_gap is None else part.masked_fill(in_gap[:, :, None, None], 0)
                if number < len(sums):
                    sums[number] = sums[number] + part  # exact, as one of the two is 0
                else:
                    sums.append(part)
        grad_q, grad_k, grad_v = sums
        return grad_q, grad_k, grad_v

    def _unfit(self, problem: Problem) -> str | None:
        """Why the kernel cannot take the tensors."""
        raise NotImplementedError

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, samples: Samples, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Rows [B·S, H, D] → output [B·S_q, H, D], log-sum-exp [H, B·S_q]."""
        raise NotImplementedError

    def _backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        samples: Samples,
        scale: float,
        causal: bool,
    ) -> Sequence[Tensor]:
        """Rows [B·S, H, D] and the log-sum-exp [H, B·S_q] → gradients of q, k and v."""
        raise NotImplementedError


class VarlenFlashKernel(_VarlenKernel):
    """`aten::_flash_attention_forward` with cumulative lengths."""

    name = "aten flash, varlen"

    def _unfit(self, problem: Problem) -> str | None:
        unfit = FlashKernel().refuses(problem)
        if unfit is None and torch.version.hip:
            return "only NVIDIA's build is known to lay out the log-sum-exp as it is read here"
        return unfit

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, samples: Samples, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, *samples[:4], 0.0, causal, False),
            scale=scale,
        )
        return out, lse

    def _backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        samples: Samples,
        scale: float,
        causal: bool,
    ) -> Sequence[Tensor]:
        seed = unused_seed(q)
        grads: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
            *(grad, q, k, v, out, lse, *samples[:4], 0.0, causal, seed, seed),
            scale=scale,
        )
        return grads


class _LibraryKernel(_VarlenKernel):
    """The flash-attn library's, by the functions below its autograd."""

    _library: FlashAttnKernel

    def release(self) -> str:
        """Which release was found, and its interface."""
        return self._library.varlen_release().name

    def _unfit(self, problem: Problem) -> str | None:
        return self._library.refuses(problem) or self._library.varlen_release().problem

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, samples: Samples, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        given = {"q": q, "k": k, "v": v, **_named(samples), "softmax_scale": scale, "causal": causal}
        return outputs_of(self._library.varlen_release(), **given)

    def _backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        samples: Samples,
        scale: float,
        causal: bool,
    ) -> Sequence[Tensor]:
        operands = {"dout": grad, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, **_named(samples)}
        return gradients_of(self._library.varlen_release(), operands, scale, causal)


class VarlenFlashAttn3Kernel(_LibraryKernel):
    """As `FlashAttn3Kernel`."""

    name = "flash-attn 3, varlen"
    _library = FlashAttn3Kernel()


class VarlenFlashAttn2Kernel(_LibraryKernel):
    """As `FlashAttn2Kernel`."""

    name = "flash-attn 2, varlen"
    _library = FlashAttn2Kernel()


def _named(samples: Samples) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, samples[:4], strict=True))


def _rows(tensor: Tensor) -> Tensor:
    """[B, S, H, D] → [B·S, H, D], of dense rows."""
    return dense_rows(tensor.flatten(0, 1))


def _calls(pieces: Pieces, q: Tensor) -> list[tuple[bool, Samples]]:
    """Whether each call is causal, and its samples on the device of q [B, S_q, H, D]; the first always has pieces."""
    kinds: list[Kind] = ["full", "causal"]
    calls = []
    for kind in kinds:
        if kind in pieces.facts.kinds:
            what = (kind, q.size(0), q.device)
            calls.append(
                (kind == "causal", pieces.kept(("varlen", *what), partial(samples_of, pieces, *what)))
            )
    return calls


def samples_of(pieces: Pieces, kind: Kind, batch: int, device: torch.device) -> Samples:
    """The pieces of one kind as samples, with the gaps before, between and behind them, for each of `batch` rows."""
    chosen = [(piece.queries, piece.keys) for piece in pieces.pieces if piece.kind == kind]
    longest_q, longest_k = (max(len(pair[side]) for pair in chosen) for side in (0, 1))
    sizes: list[tuple[int, int]] = []
    at_q = at_k = 0
    ends = range(pieces.num_rows, pieces.num_rows), range(pieces.num_keys, pieces.num_keys)
    for queries, keys in [*chosen, ends]:
        # Cut to the size of pieces: of the longest sample a kernel starts as many programs for every other one.
        sizes += [(size, 0) for size in _cut(queries.start - at_q, longest_q)]
        sizes += [(0, size) for size in _cut(keys.start - at_k, longest_k)]
        sizes += [(len(queries), len(keys))] * bool(queries)
        at_q, at_k = queries.stop, keys.stop
    table = torch.tensor([(0, 0), *(sizes * batch)]).cumsum(0).to(torch.int32)
    in_gap_q, in_gap_k = (
        _in_gap([pair[side] for pair in chosen], batch, total, device)
        for side, total in enumerate((pieces.num_rows, pieces.num_keys))
    )
    # Where the longest sample has one query, flash-attn 2 takes it that all have, and lays out grouped heads so.
    q_starts, k_starts = (table[:, side].contiguous().to(device) for side in (0, 1))
    return Samples(q_starts, k_starts, max(longest_q, 2), longest_k, in_gap_q, in_gap_k)


def _cut(size: int, most: int) -> list[int]:
    """A gap of this size as gaps of at most `most`."""
    return [min(most, size - start) for start in range(0, size, most)]


def _in_gap(runs: Sequence[range], batch: int, total: int, device: torch.device) -> Tensor | None:
    """[B, total]: true outside of the runs; None where they are all."""
    in_gap = torch.ones(total, dtype=torch.bool)
    for run in runs:
        in_gap[run.start : run.stop] = False
    return in_gap.expand(batch, total).to(device) if in_gap.any() else None
