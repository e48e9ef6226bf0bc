"""How near the planner's simulated step comes to the measured one, on this machine, after calibration.

Claims, over 3 models on 1 to 4 ranks and 18 Plans: rank correlation at least 0.9, median error at most 10 %, and the
interval holds what was measured in at least 90 %. The hardware file is measured first, by `opensora-accel doctor
--calibrate` on as many ranks, on none of these models. A step counts with its fastest turn.

On a machine that does other things too the clock on the wall says nothing. With --processor a step is the seconds of
the processor of all ranks, over the cores that work for them. That is the wall's time of a quiet machine, less what
ranks wait for each other; links are then those of the CPU's data, because they cannot be measured either.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Report, make_claim, make_table
from plan_step import CHANNELS, TEXT_WIDTH, Sizes, num_workers
from ranks import Job, Ranks

from opensora_accel import Plan
from opensora_accel.planner.cost import Placement
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.search import simulated
from opensora_accel.planner.workload import Workload, workload_of_model

MODELS = {
    "wide": Sizes(
        heads=6, head_dim=64, feed_forward=1536, layers=3, frames=4, height=16, width=32, text_tokens=32
    ),
    "long": Sizes(heads=4, head_dim=32, feed_forward=512, layers=2, frames=8, height=32, width=32),
    "deep": Sizes(heads=8, head_dim=24, feed_forward=768, layers=8, frames=4, height=16, width=24),
}
# Each with a model; several models for some plans, so that both matter.
PLANS: tuple[tuple[str, Plan], ...] = (
    ("wide", Plan()),
    ("long", Plan()),
    ("deep", Plan()),
    ("wide", Plan(checkpoint="full")),
    ("long", Plan(checkpoint="selective")),
    ("deep", Plan(checkpoint="full", offload=1.0)),
    ("wide", Plan(mlp_chunks=4)),
    ("wide", Plan(ulysses=2)),
    ("long", Plan(ulysses=2, checkpoint="full")),
    ("long", Plan(ring=2)),
    ("deep", Plan(dp_replicate=2)),
    ("wide", Plan(dp_shard=2, sharding="zero3", checkpoint="full")),
    ("deep", Plan(dp_shard=2, sharding="zero2")),
    ("long", Plan(ulysses=4)),
    ("wide", Plan(dp_shard=2, ulysses=2, sharding="zero3")),
    ("long", Plan(ring=2, ulysses=2, checkpoint="full")),
    ("deep", Plan(dp_replicate=4)),
    ("deep", Plan(dp_replicate=2, ulysses=2, checkpoint="full")),
)


def workload_of(sizes: Sizes) -> Workload:
    """What `plan_step.PlanStep` trains."""

    def inputs(_model: torch.nn.Module, dtype: torch.dtype) -> Mapping[str, Any]:
        return {
            "hidden_states": torch.randn(1, CHANNELS, sizes.frames, sizes.height, sizes.width, dtype=dtype),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": torch.randn(1, sizes.text_tokens, TEXT_WIDTH, dtype=dtype),
            "return_dict": False,
        }

    return workload_of_model(
        "small Wan",
        sizes.build,
        inputs,
        num_tokens=sizes.tokens,
        num_heads=sizes.heads,
        fused_optimizer=False,
        architecture="cpu",
    )


def forecast(sizes: Sizes, plan: Plan, hardware: Hardware) -> dict[str, Any]:
    """Milliseconds of a step, [low, high] and between them, and what the step consists of."""
    trace = trace_step(workload_of(sizes), plan)
    placement = Placement.on(hardware, plan.world_size)
    low, middle, high = (
        simulated(trace, each, placement) for each in (hardware.bound(-1), hardware, hardware.bound(+1))
    )
    parts = {name: 1e3 * seconds for name, seconds in middle.critical_s.items()}
    return {
        "low_ms": 1e3 * low.step_s, "forecast_ms": 1e3 * middle.step_s, "high_ms": 1e3 * high.step_s, "parts_ms": parts,
    }  # fmt: skip


def calibrated(num_ranks: int, folder: Path) -> Hardware:
    """This machine, measured in processes of its own."""
    path = folder / "hardware.json"
    launch = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(num_ranks), "-m", "opensora_accel.cli", "doctor", "--calibrate", str(path)),
    ]
    subprocess.run(launch, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return Hardware.load(path)


def measure(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Adds the fastest turn of every row, all rows in turn."""
    with ExitStack() as running:
        worlds = {
            ranks: running.enter_context(
                Ranks(Job("plan_step", num_ranks=ranks, device="cpu", limit_s=600.0))
            )
            for ranks in sorted({row["ranks"] for row in rows})
        }

        def turn(row: dict[str, Any]) -> float:
            task = {"do": "turn", "calls": options.calls, "plan": row["plan"], "sizes": row["sizes"]}
            outcome = worlds[row["ranks"]].run(task)
            if outcome.status != "done":
                raise RuntimeError(f"{row['plan_text']}: {outcome.status}: {outcome.reason}")
            workers = num_workers(row["ranks"], "cpu")
            row.setdefault("processor_ms", []).append(1e3 * outcome.found["cpu_s"] / workers)
            return float(outcome.found["step_ms"])

        # Each turn warms up by itself.
        for number in range(options.rounds):
            harness.say(f"round {number + 1} of {options.rounds}")
            for row in rows:
                row.setdefault("turns_ms", []).append(turn(row))
    for row in rows:
        row["measured_ms"] = min(row["processor_ms"] if options.processor else row["turns_ms"])


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: of two orders of the same things."""

    def places(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=lambda i: values[i])
        return [float(order.index(i)) for i in range(len(values))]

    return statistics.correlation(places(one), places(other))


def main(arguments: Sequence[str] | None = None) -> int:
    """0; claims that do not hold are printed and stored."""
    # What is forecast is measured on this CPU: nothing is to take a GPU for it that is there too.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    parser = harness.make_parser("forecast", __doc__, rounds=5)
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", help="a calibrated file, in place of measuring one"
    )
    parser.add_argument("--calls", type=int, default=2, help="steps of a turn (2)")
    parser.add_argument(
        "--processor", action="store_true", help="seconds of the processor, where others use it too"
    )
    parser.add_argument("--most-ranks", type=int, default=4, help="plans of at most so many ranks (4)")
    usual: dict[str, Any] = {"cpu": {}, "cuda": {}, "quick": {"rounds": 2, "calls": 1, "most_ranks": 1}}
    options = harness.parse_options(parser, arguments, usual)
    from opensora_accel.planner.candidates import describe

    rows: list[dict[str, Any]] = [
        {
            "model": model, "plan": plan.to_dict(), "plan_text": describe(plan), "ranks": plan.world_size,
            "sizes": dataclasses.asdict(MODELS[model]),
        }
        for model, plan in PLANS
        if plan.world_size <= options.most_ranks and options.only in f"{model} {describe(plan)}"
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        hardware = (
            Hardware.load(options.hardware)
            if options.hardware
            else calibrated(options.most_ranks, Path(folder))
        )
    if options.processor:
        hardware = dataclasses.replace(
            hardware,
            crowding={},
            collectives={},
            within=Hardware.named("cpu").within,
            ranks_per_node=options.most_ranks,
        )
    harness.say("measuring")
    measure(rows, options)
    for row in rows:
        row |= forecast(MODELS[row["model"]], Plan.from_dict(row["plan"]), hardware)
        row["error"] = row["forecast_ms"] / row["measured_ms"] - 1
        row["holds"] = row["low_ms"] <= row["measured_ms"] <= row["high_ms"]
    report = Report(options, launch_us=1e6 * hardware.launch_s, crowding=hardware.crowding)
    report.result["forecasts"] = rows
    columns = {
        "model": "model", "plan": "plan_text", "ranks": "ranks", "measured ms": "measured_ms",
        "forecast ms": "forecast_ms",
        "low": "low_ms", "high": "high_ms", "error": "error", "holds": "holds",
    }  # fmt: skip
    claims = report.result["claims"]
    measured, told = ([row[name] for row in rows] for name in ("measured_ms", "forecast_ms"))
    if len(rows) > 2:
        claims.append(make_claim("rank correlation", rank_correlation(measured, told), "at least", 0.9))
    claims.append(
        make_claim("median error", statistics.median(abs(row["error"]) for row in rows), "at most", 0.1)
    )
    held = sum(row["holds"] for row in rows) / len(rows)
    claims.append(make_claim("share of intervals that hold the measured step", held, "at least", 0.9))
    report.show(make_table("Steps, measured and forecast", columns, rows))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
