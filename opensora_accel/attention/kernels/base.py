"""What a kernel is asked, and what it must answer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from opensora_accel.attention.slices import PieceFacts, Pieces

Grads = tuple[Tensor, Tensor, Tensor]


class Problem(NamedTuple):
    """The facts of one call that decide which kernels can take it."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    grouped: bool
    masked: bool
    deterministic: bool
    # One query or one key.
    single: bool = False
    causal: bool = False

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Problem:
        """The problem of q [B, S_q, H, D], k and v [B, S_kv, H_kv, D] and a mask [B, S_kv]."""
        return cls(
            device=q.device,
            dtype=q.dtype,
            head_dim=q.size(3),
            value_dim=v.size(3),
            grouped=q.size(2) != k.size(2),
            masked=mask is not None,
            deterministic=is_deterministic(),
            single=1 in (q.size(1), k.size(1)),
            causal=causal,
        )


def is_deterministic() -> bool:
    """Whether a backward has to give the same bits every time; torch's own kernels only warn with `warn_only=True`."""
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not only_warns


class Scores(NamedTuple):
    """How products of queries and keys become scores: times `scale`, and −inf where a key is not seen."""

    scale: float
    # [B, S_kv], true where a key may be seen.
    mask: Tensor | None = None
    # Query i sees keys 0…i, of as many; if they are reversed, from key i on.
    causal: bool = False
    reversed: bool = False

    def from_the_end(self) -> Scores:
        """Those of the queries and keys in reverse order."""
        return self._replace(mask=None if self.mask is None else self.mask.flip(1), reversed=False)


class Kernel(Protocol):
    """Softmax attention of one block of keys; q [B, S_q, H, D], k and v [B, S_kv, H_kv, D], none of them empty.

    Rows that see no key may hold anything: the caller knows them.
    """

    name: str

    def refuses(self, problem: Problem) -> str | None:
        """Why it cannot take the problem; None if it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Output [B, S_q, H, D_v] and log-sum-exp [B, H, S_q], fp32 or fp64."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        """Gradients of q, k and v through this block, in their shapes.

        `grad` and `out` [B, S_q, H, D_v] and `lse` [B, H, S_q] are those of all blocks together.
        """
        ...


class PiecesKernel(Protocol):
    """Softmax attention over all pieces of one block of keys, in one call or one for each kind of piece.

    q [B, S_q, H, D] are the queries `pieces.rows`, k and v [B, S_kv, H_kv, D] the keys `pieces.keys`. Queries in no
    piece may have any output and log-sum-exp: the caller knows them.
    """

    name: str

    def refuses(self, problem: Problem, facts: PieceFacts) -> str | None:
        """Why it cannot take them; None if it can."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pieces: Pieces
    ) -> tuple[Tensor, Tensor]:
        """As `Kernel.forward`; the scores have no triangle."""
        ...

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
        """As `Kernel.backward`: 0 for queries and keys in no piece. `lse` is finite, as it is there."""
        ...


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor [..., D] with a last dim that lies in one piece, as every fused kernel assumes.

    Below autograd, where kernels are called for their log-sum-exp, torch does not see to it. The gradient of a plain
    sum, one number expanded, and a transposed or thinned-out tensor do not lie so; torch's kernel for CPUs then reads
    other numbers without a word.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def expand_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """[B, S, H_kv, D] → [B, S, H, D], each key head repeated for its group of query heads."""
    return tensor.repeat_interleave(num_heads // tensor.size(2), 2)


def sum_groups(grad: Tensor, num_heads: int) -> Tensor:
    """The gradient of `expand_heads`: [B, S, H, D] → [B, S, H_kv, D], summed over each group of query heads."""
    return grad if grad.size(2) == num_heads else grad.unflatten(2, (num_heads, -1)).sum(3)


def key_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, S_kv] of 0 where a key may be seen and −inf where not."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
