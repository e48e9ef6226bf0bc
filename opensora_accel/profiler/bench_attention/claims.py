"""What the benchmark claims of ours, and whether one run's figures bear it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opensora_accel.profiler.bench_attention import ours
from opensora_accel.profiler.bench_attention.plan import of_ours
from opensora_accel.profiler.bench_attention.results import Row

LEAST_RATIOS = {
    ("diffusers ulysses", "full"): 1.2,
    ("torch context_parallel", "full"): 2.0,
}
"""Time of the side over ours. Every other side: not below 1 by more than the spread."""
LEAST_ZIGZAG_GAIN = 1.15
RING_TENSORS = {"float32": 6, "bfloat16": 8}
"""That a ring sends, in units of the local q, for each rank but one: k and v twice, their fp32 gradients once."""
OUR_ULYSSES_COLLECTIVES, THEIR_ULYSSES_COLLECTIVES = 4, 8
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "at most": lambda value, threshold: value <= threshold,
    "at least": lambda value, threshold: value >= threshold,
    "exactly": lambda value, threshold: abs(value - threshold) < 1e-9,
}


def claims(errors: Sequence[Row], counted: Sequence[Row], times: Sequence[Row]) -> list[dict[str, Any]]:
    """Each with its value, its threshold, and whether it held; only those that this run measured."""
    return [*_error_claims(errors), *_byte_claims(counted), *_time_claims(times)]


def _claim(what: str, value: float | None, comparison: str, threshold: float) -> dict[str, Any]:
    held = value is not None and COMPARISONS[comparison](value, threshold)
    return {"claim": what, "comparison": comparison, "threshold": threshold, "value": value, "held": held}


def _error_claims(errors: Sequence[Row]) -> Iterator[dict[str, Any]]:
    asked = [
        row for row in errors if of_ours(row["side"]) and row["status"] not in ("not offered", "skipped")
    ]
    for side in dict.fromkeys(row["side"] for row in asked):
        rows = [row for row in asked if row["side"] == side]
        worst = [row.get("worst") for row in rows]
        value = None if None in worst else max(error for error in worst if error is not None)
        what = f"{side}: gradient error against full attention, {len(rows)} cases"
        yield _claim(what, value, "at most", rows[0].get("tolerance", 0.0))


def _byte_claims(counted: Sequence[Row]) -> Iterator[dict[str, Any]]:
    done = [row for row in counted if row["status"] == "done"]
    for side in dict.fromkeys(row["side"] for row in done):
        rows = [row for row in done if row["side"] == side]
        ranks = ", ".join(dict.fromkeys(str(row["ranks"]) for row in rows))
        if side in (ours.RING, ours.ZIGZAG, ours.STRIPED):
            for dtype, threshold in RING_TENSORS.items():
                sent = [
                    row["sent_in_q"] / (row["ranks"] - 1) for row in rows if row["problem"]["dtype"] == dtype
                ]
                what = (
                    f"{side}, {dtype}, {ranks} ranks: bytes sent, over the local q's, for each rank but one"
                )
                yield _claim(what, max(sent, key=lambda value: abs(value - threshold)), "exactly", threshold)
        elif side == ours.ULYSSES:
            most = max(row["collectives"] for row in rows)
            yield _claim(f"{side}, {ranks} ranks: collectives", most, "exactly", OUR_ULYSSES_COLLECTIVES)
        elif side.endswith(" ulysses"):
            least = min(row["collectives"] for row in rows)
            yield _claim(f"{side}, {ranks} ranks: collectives", least, "at least", THEIR_ULYSSES_COLLECTIVES)


def _time_claims(times: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for row in (row for row in times if row["status"] == "done"):
        side, problem, ratio = row["side"], row["problem"]["name"], row["ratio"]
        where = f"{row['ranks']} ranks, {problem}"
        if side == ours.ZIGZAG:
            # The table's ratio is that of the zigzag to the contiguous ring: the claim is of its inverse.
            gain = 1 / ratio["median"]
            yield _claim(f"{where}: contiguous ring over zigzag", gain, "at least", LEAST_ZIGZAG_GAIN)
        elif (side, problem) in LEAST_RATIOS:
            what = f"{where}: {side} over {row['beside']}"
            yield _claim(what, ratio["median"], "at least", LEAST_RATIOS[side, problem])
        elif not of_ours(side):
            what = f"{where}: {side} over {row['beside']}, upper quartile"
            yield _claim(what, ratio["q3"], "at least", 1.0)
