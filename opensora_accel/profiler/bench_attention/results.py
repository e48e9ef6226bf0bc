"""Rows of the result: plain data, one for each side, rank count and problem."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from opensora_accel.profiler.bench_attention.launch import Outcome
from opensora_accel.profiler.bench_attention.problem import GRADIENTS
from opensora_accel.profiler.bench_attention.rank import Task

TOLERANCES = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 3e-2}
"""Largest error over largest value. Sums of 100 terms round to 1e-15, 1e-6 and 1e-2; what is wrong, is so by 0.1."""

PROGRAM = "opensora-accel bench attention"
NOT_OFFERED, SKIPPED = "not offered", "skipped"
Row = dict[str, Any]


def make_row(task: Task, num_ranks: int, outcome: Outcome) -> Row:
    side = task.sides[-1]
    row: Row = {
        "side": side,
        "ranks": num_ranks,
        "problem": task.problem.to_dict(),
        "status": outcome.status,
        "reason": outcome.reason,
        "command": f'{PROGRAM} --part {task.part} --only "{side}" --{_ranks_option(task)} {num_ranks}',
    }
    if outcome.status == "done":
        figures = {"errors": _errors, "bytes": _bytes, "times": _times}
        row |= figures[task.part](task, outcome.by_rank)
    return row


def _ranks_option(task: Task) -> str:
    return "time-ranks" if task.part == "times" else "ranks"


def _errors(task: Task, by_rank: Sequence[dict[str, float | None]]) -> Row:
    """The largest over ranks; None where any is not finite."""
    errors = {}
    for key in GRADIENTS:
        values = [found[key] for found in by_rank]
        errors[key] = None if None in values else max(value for value in values if value is not None)
    tolerance = TOLERANCES[task.problem.dtype]
    right = all(error is not None and error <= tolerance for error in errors.values())
    return {"errors": errors, "worst": _worst(errors), "right": right, "tolerance": tolerance}


def _worst(errors: dict[str, float | None]) -> float | None:
    values = [error for error in errors.values() if error is not None]
    return max(values) if len(values) == len(errors) else None


def _bytes(task: Task, by_rank: Sequence[Row]) -> Row:
    """Of the rank that sends most; what is kept, of the rank that keeps most."""
    busiest = max(by_rank, key=lambda found: found["sent_bytes"])
    q_bytes = max(found["q_bytes"] for found in by_rank)
    kept = max(found["kept_bytes"] for found in by_rank)
    in_q = {"sent_in_q": busiest["sent_bytes"] / q_bytes, "kept_in_q": kept / q_bytes}
    return {**busiest, "kept_bytes": kept, "q_bytes": q_bytes, **in_q}


def _times(task: Task, by_rank: Sequence[dict[str, list[float]]]) -> Row:
    ours, peer = (by_rank[0][name] for name in task.sides)
    return {
        "beside": task.sides[0],
        "ours_ms": spread(ours),
        "side_ms": spread(peer),
        "ratio": spread([theirs / our for our, theirs in zip(ours, peer, strict=True)]),
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": low, "q3": high, "rounds": list(values)}
