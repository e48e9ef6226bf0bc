"""What is attended to: sizes, inputs, and plain full attention in fp64 as the truth.

B batch, S sequence, H heads, D head dim, P ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.attention.balance import TokenLayout, positions

GRADIENTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Problem:
    """One attention over the whole sequence, before it is spread over ranks."""

    name: str
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 2
    dtype: str = "float64"
    causal: bool = False
    masked: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def options(self) -> set[str]:
        """What an interface must offer for this problem to be put to it."""
        asked = {
            "causal": self.causal,
            "key mask": self.masked,
            "grouped heads": self.heads != self.kv_heads,
            "S_kv ≠ S_q": self.queries != self.keys,
        }
        return {name for name, is_asked in asked.items() if is_asked}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class World:
    """The ranks that share the sequence."""

    rank: int
    num_ranks: int
    device: torch.device
    group: dist.ProcessGroup

    def rows(self, total: int, layout: TokenLayout) -> Tensor:
        """Places in the sequence of this rank's tokens."""
        return positions(total, self.num_ranks, self.rank, layout)


@dataclass(frozen=True)
class Whole:
    """Inputs and outer gradient over the whole sequence, [B, S, H, D], equal on all ranks."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    mask: Tensor | None
    """[B, S_kv], true where a key may be seen; every query sees one at least."""


def make_whole(problem: Problem, device: torch.device) -> Whole:
    """Drawn on the host, so that every rank draws the same, and rounded to the problem's dtype."""
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int, heads: int) -> Tensor:
        shape = (problem.batch, tokens, heads, problem.head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, problem.torch_dtype)

    q, grad = (draw(problem.queries, problem.heads) for _ in "qg")
    k, v = (draw(problem.keys, problem.kv_heads) for _ in "kv")
    mask = None
    if problem.masked:
        mask = torch.rand(problem.batch, problem.keys, generator=generator) < 0.7
        mask[:, 0] = True
        mask = mask.to(device)
    return Whole(q, k, v, grad, mask)


def full_attention(problem: Problem, whole: Whole) -> dict[str, Tensor]:
    """out, dq, dk, dv of softmax(q kᵀ/√D) v on one device in fp64, written out."""
    q, k, v = (t.double().requires_grad_() for t in (whole.q, whole.k, whole.v))
    group_size = problem.heads // problem.kv_heads
    keys, values = (t.repeat_interleave(group_size, dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) / problem.head_dim**0.5
    if whole.mask is not None:
        scores = scores.masked_fill(~whole.mask[:, None, None, :], -torch.inf)
    if problem.causal:
        later = torch.ones(problem.queries, problem.keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), values)
    gradients = torch.autograd.grad(out, (q, k, v), whole.grad.double())
    return dict(zip(GRADIENTS, (out.detach(), *gradients), strict=True))
