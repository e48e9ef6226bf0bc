"""Whether the plan that the planner's search chooses is the best of all that there are, under the planner's own model.

Claims, for each case: the chosen plan is within 1 % of the best of all candidates, the search took at most 60 s, and no
traced plan beats the floor of its kind (opensora_accel/planner/evidence.py).

Every candidate that may fit, by the low end of its estimated memory, is traced and simulated. Where a case has more
GPUs than --every, a candidate is left out as well that cannot be faster than the chosen one by 1 %: because plans of
the same degrees have the same kernels and exchanges, and one of them was traced. The table counts both, and "bound" is
the least that any candidate takes: of those that were traced their seconds, of those left out their floors. What is
estimated at three times the chosen plan's seconds or more is left out too, and counted: rings of hundreds of ranks, on
which no estimate was more than a third off. With --minutes it may end before, and the table has how many were left.

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
WITHIN = 1.01
# Times the chosen plan's seconds: no estimate is that far off.
_HOPELESS = 3.0


@dataclass
class Exhaustion:
    """What tracing all candidates found."""

    best_s: float
    best: str
    traced: int
    # The least of the traced ones that fit and of the floors of those left out.
    bound_s: float
    # Candidates that were not traced: they cannot fit, are far too slow by estimate, cannot be faster by 1 % by their
    # floor, or there was no time.
    too_large: int
    too_slow: int
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
    chosen = outcome.best
    assert chosen is not None, "nothing fits"

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
    too_large, too_slow = len(untraced) - len(left), 0
    if not is_every:
        hopeful = [each for each in left if each.seconds_per_sample < _HOPELESS * chosen.seconds_per_sample]
        too_slow, left = len(left) - len(hopeful), hopeful
    # The fastest first: each one's floor leaves others out.
    left.sort(key=lambda each: each.seconds_per_sample)

    def floor_of(each: Candidate) -> float:
        return floors.of(each) / each.samples

    def can_win(each: Candidate) -> bool:
        return is_every or floor_of(each) < chosen.seconds_per_sample / WITHIN

    while left and time.perf_counter() - start < limit_s:
        winners = [each for each in left if can_win(each)]
        if not winners and len(plans) >= fewest:
            break
        # One of each degrees first, and of all the fastest.
        each = left[0] if is_every or not winners else min(winners, key=floor_of)
        left.remove(each)
        note(exact(request, each.plan, each.passes))
        harness.say(
            f"{len(plans)} traced, {len([*filter(can_win, left)])} may win: best {best_s:.5g} s, {best}"
        )
    remaining = [each for each in left if can_win(each)]
    bound_s = min([best_s, *(floor_of(each) for each in left if not can_win(each))])
    return Exhaustion(
        best_s, best, len(plans), bound_s, too_large, too_slow, len(left) - len(remaining), len(remaining), over,
        time.perf_counter() - start, plans,
    )  # fmt: skip


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
        "over_best": chosen.seconds_per_sample / found.best_s, "over_bound": chosen.seconds_per_sample / found.bound_s,
        "difference_percent": 100 * (chosen.seconds_per_sample / found.best_s - 1),
        "most_percent": 100 * (chosen.seconds_per_sample / found.bound_s - 1),
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
    for name in ("device", "only", "rounds", "picture"):
        if f"--{name}" in (sys.argv if arguments is None else arguments):
            parser.error(
                f"--{name} means nothing here: nothing is timed in turns; --cases takes some of them"
            )
    report = Report(options, model=options.model)
    report.result["cases"] = rows = []
    claims = report.result["claims"]
    for name in options.cases:
        row = measure(name, options)
        rows.append(row)
        gpus = f"{row['gpus']} GPUs"
        claims.append(make_claim(f"chosen over the best traced, {gpus}", row["over_best"], "at most", WITHIN))
        claims.append(make_claim(f"chosen over the bound, {gpus}", row["over_bound"], "at most", WITHIN))
        claims.append(make_claim(f"seconds of the search, {gpus}", row["search_s"], "at most", 60))
        claims.append(
            make_claim(f"least time over its floor, {gpus}", row["least_over_floor"], "at least", 1.0)
        )
        claims.append(make_claim(f"candidates that were left, {gpus}", row["left"], "exactly", 0))
        report.save()
    columns = {
        "GPUs": "gpus", "candidates": "candidates", "cannot fit": "too_large", "too slow": "too_slow",
        "traced": "traced", "out by floor": "by_floor", "left": "left",
        "best by exhaustion": "best", "s a sample": "best_s",
        "chosen": "chosen", "s": "chosen_s",
        "over best %": "difference_percent", "over bound %": "most_percent",
        "traced by search": "traced_by_search", "search s": "search_s",
    }  # fmt: skip
    report.show(make_table(f"The chosen plan of {options.model} (simulated)", columns, rows))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
