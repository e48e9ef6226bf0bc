"""What each way to save memory saves, and what it costs in time, on one model: by accounting and by measurement.

A small Wan is trained with one clip for each data rank, plainly and with one technique at a time. Measured are the peak
of live bytes of a rank by kind (`MemoryTimeline`), and the time in turns with the plain step. Accounted is what the
profiler says beforehand, from the plain step alone, that a step of the other Plan would need (`fitting.StepMemory`),
which is what a person is told when memory has run out.

Time paid is of all devices: two ranks that share a clip and take 0.6 of one rank's time pay 1.2 times as much for it.
Sharding is compared with whole parameters on as many data ranks. On a CPU bf16 is computed by other kernels and copies
to the host do not run beside compute, so there times are figures and no claims.

Claim: each technique lowers a rank's peak, and accounting is within 10 % of what is measured; for bf16 it is a lower
bound, because it cannot know what the model computes in fp32 anyway.

    python tools/bench/techniques.py --only checkpoint
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import harness
from harness import Report, make_claim, make_table
from pictures import draw_techniques
from plan_step import ON_GPU, QUICK, accounting, add_size_options, measure_plans, num_workers, sizes_from

from opensora_accel import Plan

NONE, WHOLE = "none", "whole parameters on 2"
# By name: the plan, and what it is compared with.
TECHNIQUES: dict[str, tuple[Plan, str]] = {
    NONE: (Plan(), NONE),
    "checkpoint full": (Plan(checkpoint="full"), NONE),
    "checkpoint selective": (Plan(checkpoint="selective"), NONE),
    "checkpoint full, offload 0.5": (Plan(checkpoint="full", offload=0.5), NONE),
    "checkpoint full, offload 1.0": (Plan(checkpoint="full", offload=1.0), NONE),
    "mlp_chunks 2": (Plan(mlp_chunks=2), NONE),
    "mlp_chunks 4": (Plan(mlp_chunks=4), NONE),
    "bf16": (Plan(precision="bf16"), NONE),
    "ulysses 2": (Plan(ulysses=2), NONE),
    "ring 2": (Plan(ring=2), NONE),
    "ring 4": (Plan(ring=4), NONE),
    WHOLE: (Plan(dp_replicate=2), WHOLE),
    "zero2": (Plan(dp_shard=2, sharding="zero2"), WHOLE),
    "zero3": (Plan(dp_shard=2, sharding="zero3"), WHOLE),
}
MOST_DEVIATION = 0.10


def compare(rows: Sequence[dict[str, Any]], times: Sequence[Sequence[float]]) -> None:
    """Adds to each row memory saved, accounted and measured, and time paid, against the one it is compared with."""
    place = {row["strategy"]: at for at, row in enumerate(rows)}
    for row, own in zip(rows, times, strict=True):
        other = rows[place[row["against"]]]
        plan, other_plan = Plan.from_dict(row["plan"]), Plan.from_dict(other["plan"])
        peak, before = row["seen"]["peak_bytes"], other["seen"]["peak_bytes"]
        row["saved"] = 1 - peak / before
        row["accounted_bytes"] = accounting(other["seen"]["accounting"]).needs(plan)
        row["deviation"] = row["accounted_bytes"] / peak - 1
        devices = (row["workers"] / plan.data) / (other["workers"] / other_plan.data)
        row["paid"] = harness.spread(
            [devices * mine / theirs for mine, theirs in zip(own, times[place[row["against"]]], strict=True)]
        )
        row["kinds"] = ", ".join(
            f"{kind} {size / 2**20:.1f}"
            for kind, size in row["seen"]["bytes_by_kind"].items()
            if size >= 2**16
        )


MEMORY = {
    "technique": "strategy",
    "ranks": "ranks",
    "against": "against",
    "peak MiB": "seen.peak_bytes",
    "saved": "saved",
    "accounted MiB": "accounted_bytes",
    "deviation": "deviation",
    "at": "seen.peak_place",
    "by kind, MiB": "kinds",
}
TIME = {
    "technique": "strategy",
    "ranks": "ranks",
    "against": "against",
    "step ms": "step_ms",
    "time paid": "paid",
    "CPU s": "cpu_s",
    "": "note",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0; claims that do not hold are printed and stored."""
    parser = harness.make_parser("techniques", __doc__, rounds=9)
    parser.add_argument(
        "--most-ranks", type=int, help="techniques on at most so many (default: the GPUs; 4 on a CPU)"
    )
    add_size_options(parser)
    small = {"layers": 12, "frames": 4}  # enough blocks for a half of them to matter
    usual: dict[str, Any] = {
        "cpu": {"most_ranks": 4, **small},
        "cuda": ON_GPU,
        "quick": {**QUICK, "most_ranks": 2},
    }
    options = harness.parse_options(parser, arguments, usual)
    if options.device == "cuda":
        import torch

        options.most_ranks = min(options.most_ranks or 4, torch.cuda.device_count())
    sizes = sizes_from(options)
    chosen = {name for name in TECHNIQUES if options.only in name}
    if not chosen:
        parser.error(f"--only {options.only!r} is in no technique's name; they are {', '.join(TECHNIQUES)}")
    chosen |= {TECHNIQUES[name][1] for name in chosen}
    rows: list[dict[str, Any]] = [
        {
            "strategy": name,
            "against": against,
            "ranks": plan.world_size,
            "plan": plan.to_dict(),
            "sizes": dataclasses.asdict(sizes),
        }
        for name, (plan, against) in TECHNIQUES.items()
        if name in chosen and plan.world_size <= options.most_ranks
    ]
    report = Report(options, sizes=dataclasses.asdict(sizes), workers=num_workers(2**20, options.device))
    compare(rows, measure_plans(rows, options))
    report.result["techniques"] = rows
    claims = report.result["claims"]
    for row in rows:
        if row["strategy"] != row["against"]:
            claims.append(make_claim(f"{row['strategy']}: memory saved", row["saved"], "above", 0.0))
        name, deviation = row["strategy"], row["deviation"]
        if Plan.from_dict(row["plan"]).precision == "bf16":
            claims.append(make_claim(f"{name}: accounting is a lower bound, less", deviation, "at most", 0.0))
        else:
            what = f"{name}: accounting deviates by"
            claims.append(make_claim(what, abs(deviation), "at most", MOST_DEVIATION))
    report.show(make_table("Memory of a rank at its peak", MEMORY, rows))
    notes = [
        "time paid: of all devices for each clip, over that of what it is compared with; turns of the same round"
    ]
    report.show(make_table("Time", TIME, rows, notes))
    report.finish(draw_techniques)
    return 0


if __name__ == "__main__":
    sys.exit(main())
