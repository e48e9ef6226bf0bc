"""A side of the benchmark: one way to attend over ranks, as its own documentation says to call it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from opensora_accel.profiler.bench_attention.problem import Problem, TokenLayout, World

CAUSAL, MASK, GROUPED, CROSS = "causal", "key mask", "grouped heads", "S_kv ≠ S_q"
EVERYTHING = frozenset({CAUSAL, MASK, GROUPED, CROSS})
"""That a problem may ask of an interface. Sizes that do not divide are none: every interface takes them, or raises."""


@dataclass(frozen=True)
class Attention:
    """A side, ready for one problem."""

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    """This rank's q [B, S_q/P, H, D], k and v [B, S_kv/P, H_kv, D] → out [B, S_q/P, H, D]."""
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """What a user enters once for a whole training step; never within a measured time."""


@dataclass(frozen=True)
class Side:
    """One implementation, and what its interface has."""

    name: str
    make: Callable[[World, Problem, Tensor | None], Attention]
    """The third is the whole key mask [B, S_kv]. What the side needs is imported here, and not before."""
    environment: str | None = None
    """A name in `environments.INSTALLS`, or None for the environment that the benchmark runs in."""
    package: str = "torch"
    """The distribution whose version is reported."""
    imports: str = "torch"
    """What has to import for the side to run; with a colon, an object of that module."""
    offers: frozenset[str] = EVERYTHING
    causal_layout: TokenLayout = "contiguous"
    """How the sequence is spread in a causal problem; it is contiguous in every other."""
    causal_only: bool = False
    dtype: str = "float64"
    """The finest that it computes in, on a CPU, ..."""
    cuda_dtype: str = "float64"
    """... and on a GPU, where flash kernels know bf16 and fp16 only."""
    beside: str | None = None
    """Of ours, the one that this is timed beside."""
    beside_causal: str | None = None
    """The same for a causal problem, where it is another."""
    num_ranks_rule: Callable[[int], str | None] = lambda num_ranks: None
    """Why it does not run on so many ranks."""

    def layout(self, problem: Problem) -> TokenLayout:
        return self.causal_layout if problem.causal else "contiguous"

    def refusal(self, problem: Problem, num_ranks: int) -> str | None:
        """Why the problem is not put to it, if it is not."""
        missing = sorted(problem.options - self.offers)
        if missing:
            return f"its interface has no {' and no '.join(missing)}"
        if self.causal_only and not problem.causal:
            return "its layout is for causal attention"
        return self.num_ranks_rule(num_ranks)

    def check_import(self) -> None:
        """Raises whatever the package raises."""
        module, _, name = self.imports.partition(":")
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            raise ImportError(f"{module} has no {name}")


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
