"""Whether the plan that the planner's search chooses is the best of all that there are, under the planner's own model.

Claims, for each case: the chosen plan is within 1 % of the best by exhaustion, the search took at most 60 s, and no
traced plan beats the floor of its kind (opensora_accel/planner/evidence.py).

Exhaustion traces and simulates every candidate that may fit: by the low end of its estimated memory. Where --every has
fewer GPUs than a case, a candidate is left out as well whose floor is not below the best: plans of the same degrees,
pieces of the MLP and checkpoints have the same kernels and exchanges, and one of them was traced. Nothing else is left
out: the estimates of time exclude none. With --minutes it may end before, and the table has how many were left.

Nothing of this is measured on a GPU: all seconds of steps are simulated.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import harness
from harness import Report, make_claim, make_table

from opensora_accel.planner.candidates import Candidate, Outcome, Request, describe
from opensora_accel.planner.evidence import Floors
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.models import named_workload
from opensora_accel.planner.search import exact, search

CASES = {"8": (8, "h100x8"), "64": (64, "h100x8-ib400"), "1024": (1024, "h100x8-ib400")}
# On 1,024 GPUs.
FEWEST_TRACED = 200


@dataclass
class Exhaustion:
    """What tracing all candidates found."""

    best_s: float
    best: str
    traced: int
    # Candidates that were not traced: they cannot fit, their floor is not below the best, or there was no time.
    too_large: int
    by_floor: int
    left: int
    # The least of a traced plan's seconds over the floor that plans like it had told before.
    least_over_floor: float
    seconds: float
    plans: list[dict[str, Any]] = field(default_factory=list)


def exhaust(
    outcome: Outcome, *, is_every: bool, fewest: int = 0, limit_s: float = float("inf")
) -> Exhaustion:
    """Traces all candidates of a search, or those that floors leave.

    Args:
        is_every: whether floors leave none out.
        fewest: so many are traced, although floors leave them out.
    """
    request, start = outcome.request, time.perf_counter()
    floors, best_s, best, over = Floors(request.hardware), float("inf"), "", float("inf")
    plans: list[dict[str, Any]] = []

    def note(candidate: Candidate) -> None:
        nonlocal best_s, best, over
        seconds, floor = candidate.expected_s, floors.of(candidate)
        over = min(over, seconds / floor if floor else over)
        floors.note(candidate)
        if candidate.fits and candidate.seconds_per_sample < best_s:
            best_s, best = candidate.seconds_per_sample, describe(candidate.plan)
        plans.append(
            {
                "plan": describe(candidate.plan),
                "seconds_per_sample": candidate.seconds_per_sample,
                "fits": candidate.fits,
            }
        )

    for each in outcome.candidates:
        if each.is_traced:
            note(each)
    untraced = [each for each in outcome.candidates if not each.is_traced]
    left = [each for each in untraced if each.memory_bytes[0] <= request.hardware.memory_bytes]
    too_large, by_floor = len(untraced) - len(left), 0
    # The fastest first: each one's floor leaves others out.
    left.sort(key=lambda each: each.seconds_per_sample)
    while left and time.perf_counter() - start < limit_s:
        candidates = [each for each in left if floors.of(each) / each.samples < best_s]
        if not is_every and not candidates and len(plans) >= fewest:
            by_floor, left = len(left), []
            break
        each = candidates[0] if candidates and not is_every else left[0]
        left.remove(each)
        note(exact(request, each.plan, each.passes))
        harness.say(
            f"{len(plans)} traced, {len(left)} left, {len(candidates)} of them by floor: best {best_s:.5g} s, {best}"
        )
    if not is_every:
        remaining = [each for each in left if floors.of(each) / each.samples < best_s]
        by_floor, left = by_floor + len(left) - len(remaining), remaining
    return Exhaustion(
        best_s, best, len(plans), too_large, by_floor, len(left), over, time.perf_counter() - start, plans
    )


def measure(name: str, options: Any) -> dict[str, Any]:
    """One case."""
    num_gpus, hardware = CASES[name]
    workload = named_workload(
        options.model, frames=options.frames, height=options.height, width=options.width
    )
    request = Request(((workload, 1.0),), Hardware.named(hardware), num_gpus)
    start = time.perf_counter()
    outcome = search(request)
    search_s = time.perf_counter() - start
    chosen = outcome.best
    assert chosen is not None, "nothing fits"
    harness.say(
        f"{name}: chosen {describe(chosen.plan)}, {chosen.seconds_per_sample:.5g} s, in {search_s:.1f} s"
    )
    every = num_gpus <= options.every
    fewest = FEWEST_TRACED if num_gpus >= 1024 else 0
    found = exhaust(outcome, is_every=every, fewest=fewest, limit_s=60 * options.minutes)
    return {
        "gpus": num_gpus, "hardware": hardware, "candidates": len(outcome.candidates),
        "traced_by_search": sum(each.is_traced for each in outcome.candidates),
        "may_win": len(outcome.may_win), "search_s": search_s,
        "chosen": describe(chosen.plan), "chosen_s": chosen.seconds_per_sample,
        "difference": chosen.seconds_per_sample / found.best_s - 1, "difference_percent":
        100 * (chosen.seconds_per_sample / found.best_s - 1),
        **vars(found),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """0; claims that do not hold are printed and stored."""
    parser = harness.make_parser("plan_search", __doc__, rounds=2)
    add = parser.add_argument
    add("--model", default="wan2.1-14b", help="a published model (wan2.1-14b)")
    add("--frames", type=int, default=81)
    add("--height", type=int, default=720)
    add("--width", type=int, default=1280)
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help="numbers of GPUs (all)")
    add("--every", type=int, default=8, help="trace all on so many GPUs and fewer, whatever floors say (8)")
    add("--minutes", type=float, default=float("inf"), help="of exhaustion in each case (no end)")
    options = harness.parse_options(parser, arguments, {"cpu": {}, "cuda": {}, "quick": {"minutes": 0.5}})
    report = Report(options, model=options.model)
    report.result["cases"] = rows = []
    claims = report.result["claims"]
    for name in options.cases:
        row = measure(name, options)
        rows.append(row)
        gpus = f"{row['gpus']} GPUs"
        claims.append(
            make_claim(f"chosen over best by exhaustion, {gpus}", 1 + row["difference"], "at most", 1.01)
        )
        claims.append(make_claim(f"seconds of the search, {gpus}", row["search_s"], "at most", 60))
        claims.append(
            make_claim(f"least time over its floor, {gpus}", row["least_over_floor"], "at least", 1.0)
        )
        claims.append(make_claim(f"candidates that were left, {gpus}", row["left"], "exactly", 0))
        report.save()
    columns = {
        "GPUs": "gpus", "candidates": "candidates", "cannot fit": "too_large", "traced": "traced",
        "out by floor": "by_floor", "left": "left", "best by exhaustion": "best", "s a sample": "best_s",
        "chosen": "chosen", "s": "chosen_s", "difference %": "difference_percent",
        "traced by search": "traced_by_search", "search s": "search_s",
    }  # fmt: skip
    report.show(make_table(f"The chosen plan of {options.model} (simulated)", columns, rows))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
