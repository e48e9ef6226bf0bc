"""Blind: how near the planner comes to steps that it has not seen, on this machine, after calibration.

Forty steps of small transformers of four families (Wan, HunyuanVideo, LTX-Video, CogVideoX) on 1, 2 and 4 ranks: each
way to shard, checkpoints, offload, bf16. In order:

    1. `opensora-accel doctor --calibrate` measures this machine, on none of these models, and steps of two more
       tell what a process holds beside its tensors
    2. all forecasts are written to a file, and its SHA-256 is printed
    3. only then anything is measured, all steps in turn, several times; then the memory of each in new processes

A step's time is that of its fastest turn, and of the turn the fastest step: what else the machine does only adds to it.
Beside each error stands what the step itself varies by: its fastest turn in odd rounds against that in even ones.
Process memory is what the system says that a rank's process holds at most (Linux); more than half of it is not the
step's, and the table has the error as a share of the step's part too.

Two settings of glibc's allocator keep out what no GPU has. While times are measured it returns no memory to the system,
as CUDA's caching allocator does not: FSDP2 in bf16 else spends a sixth of a small step on page faults. While memory is
measured each tensor is a mapping of its own: else what a process holds is mostly the fragments of a heap.

Claims: of times, median error at most 6 %, worst 20 %, rank correlation at least 0.9, and of 90 % intervals 85 to 95 %
hold; of process memory, median error at most 1 %, worst 4 %. On a machine that does other things too the clock on the
wall says little: the table says so by what steps vary.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import Report, make_claim, make_table
from ranks import Job, Ranks, World

from opensora_accel import Plan, parallel_states
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER
from opensora_accel.observe import Run
from opensora_accel.observe.meshes import MeshShape
from opensora_accel.planner.cost import Placement
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.models import MODELS, Clip
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.search import communication_buffer_bytes, simulated
from opensora_accel.planner.trace import Trace
from opensora_accel.planner.workload import Workload, workload_of_model

WARM_UP_STEPS = 2
# Read by glibc where a process starts.
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 * 2**30), "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30)}
MAPS_TENSORS = {"MALLOC_MMAP_THRESHOLD_": str(64 * 2**10)}


@dataclass(frozen=True)
class Family:
    """A published model, made small: its arguments, its clip in latents, and the tokens of its caption."""

    published: str
    heads: int
    frames: int
    height: int
    width: int
    text_tokens: int
    arguments: Mapping[str, Any]


FAMILIES = {
    "Wan": Family(
        "wan2.1-1.3b", 6, 4, 16, 32, 32, {"attention_head_dim": 64, "ffn_dim": 1536, "num_layers": 3, "freq_dim": 64}
    ),
    "HunyuanVideo": Family(
        "hunyuan-video", 4, 4, 16, 24, 16,
        {"attention_head_dim": 48, "num_layers": 1, "num_single_layers": 2, "num_refiner_layers": 1,
         "rope_axes_dim": (16, 16, 16)},
    ),
    "LTX-Video": Family(
        "ltx-video", 8, 5, 12, 16, 16, {"attention_head_dim": 32, "cross_attention_dim": 256, "num_layers": 4}
    ),
    "CogVideoX": Family(
        "cogvideox-2b", 4, 4, 16, 24, 16, {"attention_head_dim": 48, "num_layers": 3, "max_text_seq_length": 16}
    ),
}  # fmt: skip
# None of these: what a process holds beside its tensors is the mean of what steps of these tell.
OTHERS = {
    "another Wan": Family(
        "wan2.1-1.3b", 3, 4, 16, 24, 24, {"attention_head_dim": 64, "ffn_dim": 640, "num_layers": 2, "freq_dim": 32}
    ),
    "another HunyuanVideo": Family(
        "hunyuan-video", 3, 4, 16, 16, 24,
        {"attention_head_dim": 64, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
         "rope_axes_dim": (16, 24, 24)},
    ),
}  # fmt: skip
_EACH = (
    Plan(),
    Plan(checkpoint="full"),
    Plan(checkpoint="selective"),
    Plan(ulysses=2),
    Plan(ring=2, checkpoint="full"),
    Plan(dp_shard=2, sharding="zero3", checkpoint="full"),
    Plan(dp_shard=2, ulysses=2, sharding="zero3"),
)
PLANS: tuple[tuple[str, Plan], ...] = (
    *((family, plan) for family in FAMILIES for plan in _EACH),
    ("Wan", Plan(checkpoint="full", offload=1.0)),
    ("CogVideoX", Plan(checkpoint="full", offload=1.0)),
    ("Wan", Plan(precision="bf16")),
    ("HunyuanVideo", Plan(precision="bf16", checkpoint="full")),
    ("LTX-Video", Plan(dp_shard=2, sharding="zero2")),
    ("HunyuanVideo", Plan(dp_replicate=2)),
    ("Wan", Plan(dp_replicate=2, dp_shard=2, sharding="zero3")),
    ("CogVideoX", Plan(dp_replicate=2, dp_shard=2, sharding="zero2", checkpoint="full")),
    ("LTX-Video", Plan(ring=2, ulysses=2)),
    ("HunyuanVideo", Plan(ulysses=4, checkpoint="full")),
    ("Wan", Plan(mlp_chunks=4)),
    ("LTX-Video", Plan(dp_replicate=4)),
)


def workload_of(name: str) -> Workload:
    """A family's step, as the trainer steps a model: what is foreseen is what runs."""
    family = _family(name)
    published = MODELS[family.published]
    clip = Clip(1, published.channels, family.frames, family.height, family.width, family.text_tokens)
    return workload_of_model(
        name,
        partial(_build, name),
        partial(published.inputs, clip),
        num_tokens=clip.frames * clip.height * clip.width,
        num_heads=family.heads,
        fused_optimizer=False,
        architecture="cpu",
    )


def _family(name: str) -> Family:
    return OTHERS.get(name) or FAMILIES[name]


def _build(name: str) -> torch.nn.Module:
    import diffusers

    family = _family(name)
    torch.manual_seed(0)
    arguments = {"num_attention_heads": family.heads, **family.arguments}
    model: torch.nn.Module = getattr(diffusers, MODELS[family.published].class_name)(**arguments)
    return model


def forecast(name: str, plan: Plan, hardware: Hardware, beside_mb: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of a step: the low end, the middle and the high end; and megabytes of a rank's process.

    Args:
        beside_mb: by precision, what a process holds beside its tensors.
    """
    trace = trace_step(workload_of(name), plan)
    placement = Placement.on(hardware, plan.world_size)
    low, middle, high = (
        1e3 * simulated(trace, each, placement).step_s
        for each in (hardware.bound(-1), hardware, hardware.bound(+1))
    )
    step_mb = _tensors_mb(trace) + communication_buffer_bytes(trace, hardware) / 1e6
    return {
        **{"low_ms": low, "forecast_ms": middle, "high_ms": high},
        **{"forecast_mb": beside_mb[plan.precision] + step_mb, "step_mb": step_mb},
    }


def _tensors_mb(trace: Trace) -> float:
    return (trace.peak_bytes + trace.host_bytes) / 1e6


def calibrated(num_ranks: int, folder: Path) -> Hardware:
    """This machine, measured in processes of its own."""
    path = folder / "hardware.json"
    launch = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(num_ranks), "-m", "opensora_accel.cli", "doctor", "--calibrate", str(path)),
    ]
    subprocess.run(
        launch,
        check=True,
        env=os.environ | KEEPS_MEMORY | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    return Hardware.load(path)


# ---- what the ranks are asked for


def run_task(world: World, task: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of a step, the slowest rank's, or a process's megabytes; what a turn builds is gone after it."""
    plan, workload = Plan.from_dict(task["plan"]), workload_of(task["model"])
    if "calls" not in task:
        return {"process_mb": world.largest({"process_mb": [_process_mb(plan, workload)]})["process_mb"][0]}
    each_ms = world.largest({"step_ms": _turn_ms(world, plan, workload, task["calls"])})["step_ms"]
    gc.collect()
    GLOBAL_ACTIVATION_MANAGER.close()
    parallel_states.reset()
    return {"step_ms": min(each_ms)}


def _turn_ms(world: World, plan: Plan, workload: Workload, calls: int) -> list[float]:
    step = _stepper(plan, workload)
    for _ in range(WARM_UP_STEPS):
        step()
    return [harness.time_ms(step, world.device) for _ in range(calls)]


def _stepper(plan: Plan, workload: Workload) -> Callable[[], None]:
    shape, rank = MeshShape.of(plan), dist.get_rank()
    model = workload.model_fn()
    one_pass = workload.prepare(model, Run(shape, rank, shape.data_rank(rank), shape.data_size))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])

    def step() -> None:
        one_pass(True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _process_mb(plan: Plan, workload: Workload) -> float:
    """The most that this process holds in a step that is not its first; afterwards it is of no further use."""
    step = _stepper(plan, workload)
    for _ in range(WARM_UP_STEPS):
        step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # The most so far is forgotten (proc(5), clear_refs).
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        step()
    (most,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(most) * 1024 / 1e6


def measure(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Adds the fastest turn of every row, all rows in turn, and what two halves of its turns differ by."""
    with ExitStack() as running:
        running.enter_context(_with_environment(KEEPS_MEMORY))
        worlds = {
            ranks: running.enter_context(Ranks(Job("forecast", num_ranks=ranks, device="cpu", limit_s=600.0)))
            for ranks in sorted({row["ranks"] for row in rows})
        }
        # Each turn warms up by itself.
        for number in range(options.rounds):
            harness.say(f"round {number + 1} of {options.rounds}")
            for row in rows:
                found = _outcome(worlds[row["ranks"]], row, calls=options.calls)
                row.setdefault("turns_ms", []).append(found["step_ms"])
    for row in rows:
        turns = row["turns_ms"]
        row["measured_ms"] = min(turns)
        row["varies"] = abs(min(turns[::2]) / min(turns[1::2]) - 1) if len(turns) > 1 else 0.0


def process_mb(row: Mapping[str, Any]) -> float:
    """Of a row's step, in new processes: the largest rank's."""
    with (
        _with_environment(MAPS_TENSORS),
        Ranks(Job("forecast", num_ranks=row["ranks"], device="cpu", limit_s=600.0)) as world,
    ):
        return _outcome(world, row)["process_mb"]


def beside_tensors_mb() -> dict[str, float]:
    """By precision, what processes of other models' steps hold beside their tensors."""
    found = {}
    for precision in ("fp32", "bf16"):
        plan, beside = Plan(precision=precision), []
        for name in OTHERS:
            row = {"model": name, "plan": plan.to_dict(), "plan_text": precision, "ranks": 1}
            beside.append(process_mb(row) - _tensors_mb(trace_step(workload_of(name), plan)))
        found[precision] = statistics.fmean(beside)
    return found


def _outcome(world: Ranks, row: Mapping[str, Any], **task: int) -> dict[str, float]:
    outcome = world.run({"plan": row["plan"], "model": row["model"], **task})
    if outcome.status != "done":
        raise RuntimeError(f"{row['model']}, {row['plan_text']}: {outcome.status}: {outcome.reason}")
    return {name: float(value) for name, value in outcome.found.items()}


@contextmanager
def _with_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """For processes that are started within it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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
    parser = harness.make_parser("forecast", __doc__, rounds=6)
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", help="a calibrated file, in place of measuring one"
    )
    parser.add_argument(
        "--calls", type=int, default=4, help="steps of a turn, of which the fastest counts (4)"
    )
    parser.add_argument("--most-ranks", type=int, default=4, help="plans of at most so many ranks (4)")
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, default=sys.platform == "linux",
        help="also the memory of processes, which Linux tells",
    )  # fmt: skip
    parser.add_argument(
        "--forecasts", type=Path, metavar="FILE", default=Path("runs/forecasts.json"),
        help="where forecasts are written before anything is measured (runs/forecasts.json)",
    )  # fmt: skip
    usual: dict[str, Any] = {"cpu": {}, "cuda": {}, "quick": {"rounds": 2, "calls": 1, "most_ranks": 1}}
    options = harness.parse_options(parser, arguments, usual)
    from opensora_accel.planner.candidates import describe

    rows: list[dict[str, Any]] = [
        {"model": model, "plan": plan.to_dict(), "plan_text": describe(plan), "ranks": plan.world_size}
        for model, plan in PLANS
        if plan.world_size <= options.most_ranks and options.only in f"{model} {describe(plan)}"
    ]
    with tempfile.TemporaryDirectory() as folder:
        hardware = (
            Hardware.load(options.hardware)
            if options.hardware
            else calibrated(options.most_ranks, Path(folder))
        )
    beside_mb = beside_tensors_mb() if options.memory else dict.fromkeys(("fp32", "bf16"), 0.0)
    for row in rows:
        row |= forecast(row["model"], Plan.from_dict(row["plan"]), hardware, beside_mb)
    written = json.dumps(rows, indent=1).encode()
    options.forecasts.parent.mkdir(parents=True, exist_ok=True)
    options.forecasts.write_bytes(written)
    digest = hashlib.sha256(written).hexdigest()
    harness.say(f"{len(rows)} forecasts in {options.forecasts}, SHA-256 {digest}; measuring")
    measure(rows, options)
    for row in rows:
        if options.memory:
            harness.say(f"memory of {row['model']}, {row['plan_text']}")
            row["process_mb"] = process_mb(row)
            row["memory_error"] = row["forecast_mb"] / row["process_mb"] - 1
            row["of_step"] = (row["forecast_mb"] - row["process_mb"]) / row["step_mb"]
        row["error"] = row["forecast_ms"] / row["measured_ms"] - 1
        row["holds"] = row["low_ms"] <= row["measured_ms"] <= row["high_ms"]
    report = Report(
        options,
        launch_us=1e6 * hardware.launch_s,
        crowding=hardware.crowding,
        beside_tensors_mb=beside_mb,
        forecasts_sha256=digest,
    )
    report.result["forecasts"] = rows
    columns = {
        "model": "model", "plan": "plan_text", "ranks": "ranks", "measured ms": "measured_ms", "varies": "varies",
        "forecast ms": "forecast_ms",
        "low": "low_ms", "high": "high_ms", "error": "error", "holds": "holds",
    }  # fmt: skip
    if options.memory:
        columns |= {"process MB": "process_mb", "forecast MB": "forecast_mb", "its error": "memory_error"}
        columns |= {"of the step's": "of_step"}
    claims = report.result["claims"]
    measured, told = ([row[name] for row in rows] for name in ("measured_ms", "forecast_ms"))
    errors = [abs(row["error"]) for row in rows]
    if len(rows) > 2:
        claims.append(make_claim("rank correlation", rank_correlation(measured, told), "at least", 0.9))
    claims.append(make_claim("median error", statistics.median(errors), "at most", 0.06))
    claims.append(make_claim("worst error", max(errors), "at most", 0.2))
    held = sum(row["holds"] for row in rows) / len(rows)
    claims.append(make_claim("share of intervals that hold the measured step", held, "at least", 0.85))
    claims.append(make_claim("share of intervals that hold the measured step", held, "at most", 0.95))
    if options.memory:
        errors = [abs(row["memory_error"]) for row in rows]
        claims.append(
            make_claim("median error of process memory", statistics.median(errors), "at most", 0.01)
        )
        claims.append(make_claim("worst error of process memory", max(errors), "at most", 0.04))
    report.show(make_table("Steps, measured and forecast", columns, rows))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
