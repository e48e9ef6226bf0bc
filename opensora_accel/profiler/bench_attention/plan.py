"""What is put to which side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from opensora_accel.profiler.bench_attention import ours
from opensora_accel.profiler.bench_attention.problem import Problem
from opensora_accel.profiler.bench_attention.rank import Task
from opensora_accel.profiler.bench_attention.side import Side

# 96 tokens and 12 heads divide by 2, 3 and 4 ranks, and the tokens by twice as many, which a zigzag needs. The
# tokens outnumber the head dim on every rank: torch's `context_parallel` returns other shapes otherwise.
_SELF = Problem("self", queries=96, keys=96, heads=12, kv_heads=12, head_dim=8)
CASES: tuple[Problem, ...] = (
    _SELF,
    dataclasses.replace(_SELF, name="causal", causal=True),
    dataclasses.replace(_SELF, name="uneven tokens", queries=97, keys=97),
    dataclasses.replace(_SELF, name="S_kv ≠ S_q", keys=60),
    dataclasses.replace(_SELF, name="uneven heads", heads=7, kv_heads=7),
    dataclasses.replace(_SELF, name="grouped heads", heads=24),
    dataclasses.replace(_SELF, name="key mask", masked=True),
)
"""For gradient errors. Seven heads are no multiple of 2, 3 or 4."""

COUNTED_DTYPES = ("float32", "bfloat16")
_COUNTED = Problem("counted", queries=384, keys=384, heads=12, kv_heads=12, head_dim=32, batch=1)


def error_tasks(side: Side, num_ranks: int, device: str) -> Iterator[tuple[Task, str | None]]:
    """Every case, and why it is not put to the side, if it is not."""
    dtype = side.cuda_dtype if device == "cuda" else side.dtype
    for case in CASES:
        problem = dataclasses.replace(case, dtype=dtype)
        yield Task("errors", (side.name,), problem), side.refusal(problem, num_ranks)


def byte_tasks(side: Side, num_ranks: int) -> Iterator[tuple[Task, str | None]]:
    for dtype in COUNTED_DTYPES:
        problem = dataclasses.replace(_COUNTED, dtype=dtype, causal=side.causal_only)
        yield Task("bytes", (side.name,), problem), side.refusal(problem, num_ranks)


def time_tasks(side: Side, num_ranks: int, full: Problem, rounds: int) -> Iterator[tuple[Task, str | None]]:
    """The side beside ours of its kind: every query sees every key, and then causal."""
    if side.beside is None:
        return
    causal = dataclasses.replace(full, name="causal", causal=True)
    beside = {full: side.beside, causal: side.beside_causal or side.beside}
    for problem, other in beside.items():
        if not side.causal_only or problem.causal:
            task = Task("times", (other, side.name), problem, rounds)
            yield task, side.refusal(problem, num_ranks)


def of_ours(name: str) -> bool:
    return name in {side.name for side in ours.SIDES}


def chosen(sides: Sequence[Side], only: str) -> list[Side]:
    return [side for side in sides if only in side.name]
