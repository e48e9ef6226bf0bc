"""What an attention benchmark compares: a problem, and a side that solves it over ranks.

B batch, S sequence, H heads, D head dim, P ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from ranks import World
from torch import Tensor

from opensora_accel.attention.balance import TokenLayout, positions

CAUSAL, MASK, GROUPED, CROSS = "causal", "key mask", "grouped heads", "S_kv ≠ S_q"
# That a problem may ask of an interface. Sizes that do not divide are none: every interface takes them, or raises.
EVERYTHING = frozenset({CAUSAL, MASK, GROUPED, CROSS})
# What is said of a problem that is not put to a side: its interface lacks it, or the side does not run here.
NOT_OFFERED, SKIPPED = "not offered", "skipped"


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
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Attention:
    """A side, ready for one problem on one rank."""

    # This rank's q [B, S_q/P, H, D], k and v [B, S_kv/P, H_kv, D] → out [B, S_q/P, H, D].
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    # What a user enters once for a whole training step; it is never timed.
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


# Backward has several of them at once.
MOST_SCORES_BYTES = 4 * 10**9


@dataclass(frozen=True)
class Side:
    """One implementation, called as its own documentation says, and what its interface has."""

    name: str
    # The tensor is the whole key mask [B, S_kv]. What the side needs is imported here, and not before.
    make: Callable[[World, Problem, Tensor | None], Attention]
    # Or "ours", or "best case".
    kind: str = "peer"
    # The distribution whose version is reported. Those of `peers.INSTALLS` have an environment of their own.
    package: str = "torch"
    offers: frozenset[str] = EVERYTHING
    # How the sequence is spread in a causal problem; it is contiguous in every other.
    causal_layout: TokenLayout = "contiguous"
    causal_only: bool = False
    # The finest that it computes in, on a CPU, ...
    dtype: str = "float64"
    # ... and on a GPU, where flash kernels know bf16 and fp16 only.
    cuda_dtype: str = "float64"
    # The side of ours that this one is timed beside; a causal problem that is balanced, beside our zigzag.
    beside: str | None = None
    # It lays its ranks out in pairs, and asks for two pairs at least.
    in_pairs: bool = False
    # Its kernel holds the scores of all queries of a rank and all keys at once.
    holds_scores: bool = False

    def layout(self, problem: Problem) -> TokenLayout:
        return self.causal_layout if problem.causal else "contiguous"

    def refusal(self, problem: Problem, num_ranks: int) -> str | None:
        """Why the problem is not put to this side, if it is not."""
        asked = {
            CAUSAL: problem.causal,
            MASK: problem.masked,
            GROUPED: problem.heads != problem.kv_heads,
            CROSS: problem.queries != problem.keys,
        }
        missing = sorted(name for name, is_asked in asked.items() if is_asked and name not in self.offers)
        if missing:
            return f"its interface has no {' and no '.join(missing)}"
        if self.causal_only and not problem.causal:
            return "its layout is for causal attention"
        if self.in_pairs and (num_ranks % 2 or num_ranks < 4):
            return "a ring of pairs needs 4, 6, … ranks"
        scores_bytes = 4 * problem.batch * problem.heads * problem.queries * problem.keys // num_ranks
        if self.holds_scores and scores_bytes > MOST_SCORES_BYTES:
            return f"it would hold {scores_bytes / 1e9:.0f} GB of scores"
        return None


def rows_of(world: World, total: int, layout: TokenLayout) -> Tensor:
    """Places in the whole sequence of this rank's tokens."""
    return positions(total, world.num_ranks, world.rank, layout)


def share_of_mask(world: World, mask: Tensor | None, layout: TokenLayout = "contiguous") -> Tensor | None:
    """This rank's part [B, S_kv/P] of the whole key mask [B, S_kv]."""
    return None if mask is None else mask[:, rows_of(world, mask.size(1), layout)]


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """torch's own kernel on [B, S, H, D]: what every Ulysses here, ours too, attends with locally."""
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None, None, :],
        is_causal=causal,
        enable_gqa=q.size(2) != k.size(2),
    ).transpose(1, 2)


def cpu_flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """torch's flash kernel for CPUs: q, k, v [B, H, S, D] → out [B, H, S, D], log-sum-exp [B, H, S]."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)


def cpu_flash_backward(
    grad: Tensor, *saved: Tensor, causal: bool = False, **options: Any
) -> tuple[Tensor, ...]:
    """dq, dk, dv [B, H, S, D] from the gradient of out and q, k, v, out, log-sum-exp."""
    operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return operation(grad, *saved, 0.0, causal, **options)
