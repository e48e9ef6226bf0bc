"""How a training step scales over ranks: strong (one clip on more ranks) and weak (as much for each rank).

Strong: ulysses, ring, and both where there are 4 ranks, against one rank, on the same clip. Weak: the same with a clip
that is as many times longer, and beside them data parallel ranks with a clip each, whole (DDP) and sharded (FSDP2).
Work is counted in FLOPs, as attention to a clip of twice the length is four times the work: efficiency is work over
time, for each rank, in units of one rank's. All ranks of all world sizes take turns.

Claim: the calls and bytes that the ranks were seen to send are those that the Plan sends in a simulated world, and in
strong scaling a rank's peak of live bytes is below that of one rank alone. Times are figures of this machine.

Where there are more ranks than cores, a row says so; beside its efficiency stands the one of what the cores permit.
Beyond the ranks that this machine has, rows are SIMULATED: calls, bytes and FLOPs are counted on tensors without
values, times follow from the fit (`scaling_fit.py`) and from a link, the fitted one or one that is given.

    python tools/bench/scaling.py --strong --link-gigabytes 50 --link-microseconds 10
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import harness
import torch
from harness import Report, make_claim, make_table
from pictures import draw_scaling
from plan_step import (
    ON_GPU,
    QUICK,
    Sizes,
    accounting,
    add_size_options,
    count_simulated,
    measure_plans,
    num_workers,
    sizes_from,
)
from scaling_fit import Link, Mode, Point, fit_link, serial_share, simulated_time

from opensora_accel import Plan

ONE = "one rank"
Row = dict[str, Any]


def strategies(mode: Mode, num_ranks: int) -> dict[str, Plan]:
    """The plans of so many ranks, by name."""
    if num_ranks == 1:
        return {ONE: Plan()}
    plans = {"ulysses": Plan(ulysses=num_ranks), "ring": Plan(ring=num_ranks)}
    if num_ranks >= 4 and num_ranks % 2 == 0:
        plans["ring × ulysses"] = Plan(ring=num_ranks // 2, ulysses=2)
    if mode == "weak":
        plans["data parallel"] = Plan(dp_replicate=num_ranks)
        plans["data parallel, sharded"] = Plan(dp_shard=num_ranks, sharding="zero3")
    return plans


def sizes_of(mode: Mode, plan: Plan, base: Sizes) -> Sizes:
    """In weak scaling, ranks that share a clip have one of as many times the frames."""
    return dataclasses.replace(base, frames=base.frames * plan.sequence) if mode == "weak" else base


def count(mode: Mode, name: str, plan: Plan, base: Sizes) -> Row:
    """What needs no clock: calls and bytes by axis, FLOPs, and how much of the work is useful."""
    sizes, ranks = sizes_of(mode, plan, base), plan.world_size
    counted = count_simulated(plan, sizes)
    one = count_simulated(Plan(), base)["rank_flops"]
    # The same clips, each on one rank.
    useful = plan.data * count_simulated(Plan(), sizes)["rank_flops"] if ranks > 1 else one
    return {
        "strategy": name,
        "ranks": ranks,
        "plan": plan.to_dict(),
        "sizes": dataclasses.asdict(sizes),
        "tokens": sizes.tokens * plan.data // ranks,
        **counted,
        "rank_gflops": counted["rank_flops"] / 1e9,
        "work": useful / one,
        "useful": useful / (ranks * counted["rank_flops"]),
        "sends": "; ".join(
            f"{kind}: {axis['calls']} × {axis['sent_bytes'] / axis['calls'] / 2**20:.3g}"
            for kind, axis in counted["by_axis"].items()
            if axis["sent_bytes"]
        ),
    }


def measure(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Adds to each row what its ranks found when they looked closely, its times, and its efficiency."""
    times = measure_plans(rows, options)
    for row, own in zip(rows, times, strict=True):
        speed_up = [row["work"] * one / each for one, each in zip(times[0], own, strict=True)]
        row["efficiency"] = harness.spread([each / row["ranks"] for each in speed_up])
        row["of_workers"] = harness.spread([each / row["workers"] for each in speed_up])


def point_of(row: Row, one: Row) -> Point:
    step_s, seen = row["seen"]["profiled_step_s"], row["seen"]
    return Point(
        row["ranks"],
        row["workers"],
        row["work"],
        row["step_ms"]["median"] / one["step_ms"]["median"],
        seen["network_s"] / step_s,
        seen["waited_s"] / step_s,
    )


def fair(rows: Sequence[Row]) -> list[Row]:
    """Those of several ranks where each has a core or GPU: ranks that share one wait for that reason alone."""
    return [row for row in rows if 1 < row["ranks"] == row["workers"]]


def fit(mode: Mode, rows: Sequence[Row]) -> list[Row]:
    """For each strategy what limits it.

    It is fitted to the strategy's rows that are fair, or to those of all sequence strategies where it has none.
    """
    one, limits = rows[0], []
    for name in dict.fromkeys(row["strategy"] for row in rows[1:]):
        own = [row for row in rows if row["strategy"] == name]
        taken = fair(own) or [row for row in fair(rows) if "data" not in row["strategy"]] or own
        points = [point_of(row, one) for row in taken]
        most = [row["seen"] for row in taken if row["ranks"] == max(row["ranks"] for row in taken)]
        limits.append(
            {
                "strategy": name,
                "fitted_to": ", ".join(f"{row['strategy']} {row['ranks']}" for row in taken),
                "serial_share": serial_share(mode, points),
                "serial_without_communication": serial_share(
                    mode, [point.without_communication() for point in points]
                ),
                "network_share": statistics.fmean(
                    seen["network_s"] / seen["profiled_step_s"] for seen in most
                ),
                "waited_share": statistics.fmean(seen["waited_s"] / seen["profiled_step_s"] for seen in most),
                "imbalance": statistics.fmean(seen["imbalance"] for seen in most),
            }
        )
    return limits


def link_of(rows: Sequence[Row], options: argparse.Namespace) -> tuple[Link | None, str]:
    """The link that is given, or the fitted one, and where it is from."""
    # What was exposed of the network, in proportion to the profiled step, of the step without a profiler.
    transfers = [
        (
            row["calls"],
            row["sent_bytes"],
            row["seen"]["network_s"] / row["seen"]["profiled_step_s"] * row["step_ms"]["median"] / 1e3,
        )
        for row in fair(rows) or rows[1:]
    ]
    fitted = fit_link(transfers)
    if options.link_gigabytes is None:
        return fitted, "fitted to what was exposed here"
    latency_s = options.link_microseconds / 1e6
    return Link(latency_s, options.link_gigabytes * 1e9), "given"


def simulate(
    mode: Mode,
    rows: Sequence[Row],
    limits: Sequence[Row],
    link: Link,
    options: argparse.Namespace,
    base: Sizes,
) -> Iterator[Row]:
    """Rows of more ranks than there are: counted as the others, their times computed."""
    one, memory = rows[0], accounting(rows[0]["seen"]["accounting"])
    most = max(row["ranks"] for row in rows)
    for num_ranks in (number for number in options.simulate if number > most):
        for name, plan in strategies(mode, num_ranks).items():
            limit = next((each for each in limits if each["strategy"] == name), None)
            # A rank beyond the heads would have nothing to attend to.
            if limit is None or plan.ulysses > base.heads or limit["serial_without_communication"] is None:
                continue
            harness.say(f"counting {name} on {num_ranks} simulated ranks")
            row = count(mode, name, plan, base)
            point = Point(num_ranks, num_ranks, row["work"], 1.0, waited=limit["waited_share"])
            one_s = one["step_ms"]["median"] / 1e3
            transfer_s = link.seconds(row["calls"], row["sent_bytes"])
            seconds = simulated_time(mode, point, one_s, limit["serial_without_communication"], transfer_s)
            yield row | {
                "label": "SIMULATED",
                "step_ms": seconds * 1e3,
                "transfer_ms": transfer_s * 1e3,
                "efficiency": row["work"] / num_ranks * one_s / seconds,
                # Longer clips have as many times the tokens, and as many times more of what has tokens.
                "accounted_bytes": memory.needs(plan) if mode == "strong" or plan.sequence == 1 else None,
            }


COUNTED = {
    "strategy": "strategy",
    "ranks": "ranks",
    "tokens a rank": "tokens",
    "GFLOP a rank": "rank_gflops",
    "useful": "useful",
    "calls": "calls",
    "sent MiB": "sent_bytes",
    "peak MiB": "seen.peak_bytes",
    "collectives of a rank: number × MiB": "sends",
}
TIMED = {
    "strategy": "strategy",
    "ranks": "ranks",
    "step ms": "step_ms",
    "efficiency": "efficiency",
    "of what the cores permit": "of_workers",
    "CPU s": "cpu_s",
    "": "note",
}
LIMITS = {
    "strategy": "strategy",
    "fitted to": "fitted_to",
    "serial share": "serial_share",
    "without communication": "serial_without_communication",
    "network, of the step": "network_share",
    "waiting for ranks": "waited_share",
    "busiest over mean": "imbalance",
}
SIMULATED = {
    "": "label",
    "strategy": "strategy",
    "ranks": "ranks",
    "GFLOP a rank": "rank_gflops",
    "useful": "useful",
    "calls": "calls",
    "sent MiB": "sent_bytes",
    "accounted MiB": "accounted_bytes",
    "network ms": "transfer_ms",
    "step ms": "step_ms",
    "efficiency": "efficiency",
}


def study(mode: Mode, report: Report, options: argparse.Namespace, base: Sizes) -> list[dict[str, Any]]:
    """Counts and measures one kind of scaling; its claims."""
    rows: list[Row] = []
    for num_ranks in world_sizes(options.most_ranks):
        for name, plan in strategies(mode, num_ranks).items():
            if options.only in name or num_ranks == 1:
                harness.say(f"counting {name} on {num_ranks} rank(s)")
                rows.append(count(mode, name, plan, base))
    measure(rows, options)
    return tell(mode, rows, report, options, base)


def tell(
    mode: Mode, rows: list[Row], report: Report, options: argparse.Namespace, base: Sizes
) -> list[dict[str, Any]]:
    """Fits, simulates and shows what was measured; the claims."""
    limits = fit(mode, rows)
    link, source = link_of(rows, options)
    simulated = [] if link is None else [*simulate(mode, rows, limits, link, options, base)]
    fitted = None if link is None else dataclasses.asdict(link) | {"source": source}
    report.result[mode] = {"rows": rows, "limits": limits, "link": fitted, "simulated": simulated}
    unequal = [row for row in rows if row["seen"]["by_axis"] != row["by_axis"]]
    claims = [
        make_claim(
            f"{mode}: rows that send other than in a simulated world", float(len(unequal)), "exactly", 0
        )
    ]
    if mode == "strong":
        for row in rows[1:]:
            peak = row["seen"]["peak_bytes"] / rows[0]["seen"]["peak_bytes"]
            claims.append(
                make_claim(
                    f"peak of {row['strategy']} on {row['ranks']} ranks over one rank's", peak, "at most", 1
                )
            )
    report.show(make_table(f"{mode.capitalize()} scaling, counted", COUNTED, rows))
    notes = [
        "efficiency: work over time of each rank, in units of one rank's; medians and quartiles of turns"
    ]
    report.show(make_table(f"{mode.capitalize()} scaling, timed", TIMED, rows, notes))
    law = "Amdahl" if mode == "strong" else "Gustafson"
    report.show(make_table(f"{mode.capitalize()} scaling, what limits it ({law})", LIMITS, limits))
    if link is not None:
        notes = [
            f"link, {source}: {link.latency_s * 1e6:.4g} µs a call, {link.bytes_per_s / 1e9:.4g} GB/s; a core or GPU "
            "for every rank"
        ]
        report.show(
            make_table(
                f"{mode.capitalize()} scaling beyond this machine, SIMULATED", SIMULATED, simulated, notes
            )
        )
    return claims


def world_sizes(most: int) -> list[int]:
    """1, 2, 4, ... up to the most, which is always among them."""
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 where ranks send other than what the Plan sends in a simulated world."""
    parser = harness.make_parser("scaling", __doc__, rounds=9)
    add = parser.add_argument
    add("--strong", action="store_true", help="one clip on more ranks (default: strong and weak)")
    add("--weak", action="store_true", help="as much for each rank")
    add(
        "--most-ranks", type=int, help="world sizes are 1, 2, 4, ... up to it (default: the GPUs; 4 on a CPU)"
    )
    add("--simulate", type=int, nargs="*", default=[8, 16, 32, 64], metavar="P", help="ranks beyond these")
    add("--link-gigabytes", type=float, metavar="GB/S", help="of the simulated link (default: as fitted)")
    add("--link-microseconds", type=float, default=10.0, metavar="US", help="latency of a given link (10)")
    add_size_options(parser)
    usual: dict[str, Any] = {
        "cpu": {"most_ranks": 4},
        "cuda": {"most_ranks": torch.cuda.device_count(), **ON_GPU},
        "quick": {"most_ranks": 2, "simulate": [4], **QUICK},
    }
    options = harness.parse_options(parser, arguments, usual)
    if options.device == "cuda" and options.most_ranks > torch.cuda.device_count():
        parser.error(
            f"--most-ranks {options.most_ranks} needs as many GPUs; there are {torch.cuda.device_count()}"
        )
    base = sizes_from(options)
    report = Report(options, sizes=dataclasses.asdict(base), workers=num_workers(2**20, options.device))
    modes: list[Mode] = [mode for mode in ("strong", "weak") if getattr(options, mode)] or ["strong", "weak"]
    for mode in modes:
        report.result["claims"] += study(mode, report, options, base)
    report.finish(draw_scaling)
    wrong = [
        claim for claim in report.result["claims"] if claim["comparison"] == "exactly" and not claim["held"]
    ]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
