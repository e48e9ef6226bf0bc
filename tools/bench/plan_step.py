"""One training step of a small Wan under a Plan: what it counts, what it takes, and where its time goes.

The Plan is applied as the trainer applies it (policy, checkpointing, DDP or FSDP2, precision), and the step is forward,
loss, backward and AdamW. Each data rank has one clip. What is built for one turn is gone after it, so that plans can
take turns in the same processes.

B clips (one a data rank), S = frames × height/2 × width/2 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from ranks import Job, Ranks, World
from torch.nn import functional

from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER
from opensora_accel.observe import CollectiveRecorder
from opensora_accel.observe.fitting import BlockMemory, StepMemory
from opensora_accel.observe.flops import FlopCounter
from opensora_accel.observe.meshes import MeshShape, Run, group_of
from opensora_accel.observe.owners import Owner, arena_memory
from opensora_accel.profiler import LiveBytes, explain_out_of_memory, profile
from opensora_accel.profiler.analyse import analyse
from opensora_accel.verify.communication.record_step import record_step
from shardformer import blocks_of, parallelize
from shardformer.engine import weight_dtype
from shardformer.paths import find
from shardformer.policy import find_policy

CHANNELS, TEXT_WIDTH = 16, 32
# A kind of memory beside the profiler's: the clip, and DDP's buckets.
MADE_BEFORE = "made before the step"
# Before a turn is timed: the offload engine learns sizes in the first step, DDP its buckets' order.
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Sizes:
    """Of a small Wan, its clip and its caption: plain data, which travels as JSON."""

    heads: int = 8
    head_dim: int = 16
    feed_forward: int = 512
    layers: int = 4
    frames: int = 8
    height: int = 16
    width: int = 32
    text_tokens: int = 16

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width // 4

    def build(self) -> torch.nn.Module:
        """On the CPU, the same weights wherever it is called."""
        from diffusers import WanTransformer3DModel

        torch.manual_seed(0)
        model: Any = WanTransformer3DModel(
            num_attention_heads=self.heads,
            attention_head_dim=self.head_dim,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=TEXT_WIDTH,
            freq_dim=64,
            ffn_dim=self.feed_forward,
            num_layers=self.layers,
            rope_max_seq_len=max(self.frames, self.height, self.width),
        )
        return model


class PlanStep:
    """The step of one rank; call it. Every rank of the world makes one at the same time, and closes it."""

    def __init__(self, plan: Plan, sizes: Sizes, device: torch.device, model: torch.nn.Module | None = None):
        self.plan = plan
        init_parallel(plan, device.type)
        self.model, self._forward = parallelize(model or sizes.build(), plan, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        dtype, data_rank = weight_dtype(plan), dist.get_rank() // plan.sequence
        generator = torch.Generator().manual_seed(1 + data_rank)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype).to(device)

        self._clip = draw(1, CHANNELS, sizes.frames, sizes.height, sizes.width)
        self._target = draw(*self._clip.shape)
        self._text = draw(1, sizes.text_tokens, TEXT_WIDTH)
        self._timestep = torch.tensor([500.0], device=device)

    def __call__(self) -> None:
        """Forward, loss, backward, AdamW."""
        (out,) = self._forward(
            hidden_states=self._clip,
            timestep=self._timestep,
            encoder_hidden_states=self._text,
            return_dict=False,
        )
        loss = functional.mse_loss(out.float(), self._target)
        del out
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __enter__(self) -> PlanStep:
        return self

    def __exit__(self, *exception: Any) -> None:
        del self.model, self._forward, self.optimizer
        gc.collect()
        GLOBAL_ACTIVATION_MANAGER.close()
        # Groups are forgotten, not destroyed: the next one of the same ranks would have the same name, and find the
        # addresses of this one in the store.
        parallel_states.reset()


@dataclass(frozen=True)
class Seen:
    """The memory of one step: the same numbers every time."""

    # Live bytes, those included that were made before the step.
    peak_bytes: int
    bytes_by_kind: dict[str, int]
    place: str
    # What another plan would need, from this one.
    memory: StepMemory


def follow_memory(plan: Plan, sizes: Sizes, device: torch.device) -> Seen:
    """What fills this rank's memory in a step that is not the first."""
    # Around all of it, because a timeline of the step does not know what DDP's reducer has made before, its buckets.
    with LiveBytes() as live, PlanStep(plan, sizes, device) as step:
        for _ in range(WARM_UP_STEPS):
            step()
        for memory in arena_memory():
            live.ignore(memory)
        policy = find_policy(step.model)
        mlps = [module for pattern in policy.mlps for _name, module in find(step.model, pattern)]
        blocks = blocks_of(step.model)
        teller = explain_out_of_memory(step.model, step.optimizer, plan, blocks=blocks, mlps=mlps)
        live.peak_bytes = live.now_bytes
        with teller as timeline:
            step()
        peak = timeline.peak
        held = {
            Owner(kind, block): size for block, row in peak.by_block.items() for kind, size in row.items()
        }
        kinds = dict(peak.sample.bytes_by_kind)
        # A GPU's allocator knows all that there is.
        before = max(0, live.peak_bytes - peak.sample.device_bytes) if device.type == "cpu" else 0
        kinds[MADE_BEFORE] = before
        held[Owner("other", MADE_BEFORE)] = before
        return Seen(peak.sample.device_bytes + before, kinds, str(peak.place), teller.memory("", held))


# ---- what the ranks of a benchmark are asked for


def open_step(world: World, task: Mapping[str, Any]) -> PlanStep:
    return PlanStep(Plan.from_dict(task["plan"]), Sizes(**task["sizes"]), world.device)


def take_turn(world: World, task: Mapping[str, Any]) -> dict[str, float]:
    """One turn: milliseconds of a step (the slowest rank's), and seconds of the processor in it, of all ranks."""
    with open_step(world, task) as step:
        for _ in range(WARM_UP_STEPS):
            step()
        before_s = time.process_time()
        step_ms = harness.time_ms(step, world.device, task["calls"])
        cpu_s = torch.tensor([(time.process_time() - before_s) / task["calls"]], dtype=torch.float64)
    dist.all_reduce(cpu_s)
    slowest = world.largest({"step_ms": [step_ms]})
    return {"step_ms": slowest["step_ms"][0], "cpu_s": cpu_s.item()}


def look_closely(world: World, task: Mapping[str, Any]) -> dict[str, Any]:
    """Calls and bytes by axis, the memory at the peak, and of a profiled run what compute waited for."""
    folder = Path(task["folder"])
    with open_step(world, task) as step:
        for _ in range(WARM_UP_STEPS):
            step()
        with profile(step.model, step.plan, folder, optimizer=step.optimizer) as run:
            for _ in range(1 + task["profiled_steps"]):  # the first counts FLOPs, and is left out
                step()
                run.step()
        with CollectiveRecorder() as recorder:
            step()
        dist.barrier()
        found = analyse(folder, max_processes=1)
        # Another rank may still be reading.
        dist.barrier()
    seen = follow_memory(step.plan, Sizes(**task["sizes"]), world.device)
    memory = world.largest({kind: [size] for kind, size in seen.bytes_by_kind.items()})
    (peak_bytes,) = world.largest({"peak": [seen.peak_bytes]})["peak"]
    work_s = [rank.work_s for rank in found.ranks]
    step_s, num_ranks = found.mean_step_s, len(found.ranks)
    network_s = sum(rank.network_s for rank in found.ranks) / num_ranks
    waited_s = sum(rank.waited_s for rank in found.ranks) / num_ranks
    return {
        "peak_bytes": int(peak_bytes),
        "bytes_by_kind": {kind: int(size) for kind, (size,) in memory.items()},
        "peak_place": seen.place,
        **traffic(recorder, step.plan),
        "profiled_step_s": step_s,
        "network_s": network_s,
        "waited_s": waited_s,
        "exposed_share": (network_s + waited_s) / step_s,
        "imbalance": max(work_s) / (sum(work_s) / num_ranks),
        "accounting": dataclasses.asdict(seen.memory),
    }


def run_task(world: World, task: Mapping[str, Any]) -> dict[str, Any]:
    """What the ranks of a benchmark call: a turn, or a close look."""
    return take_turn(world, task) if task["do"] == "turn" else look_closely(world, task)


# ---- the launcher's side

# Sizes on a GPU, and of a short run that checks that all works.
ON_GPU: dict[str, Any] = {"heads": 24, "head_dim": 128, "feed_forward": 8960, "height": 64, "width": 64}
ON_GPU |= {"text_tokens": 512}
QUICK: dict[str, Any] = {"rounds": 2, "calls": 1, "profiled_steps": 2, "layers": 2, "heads": 2, "frames": 4}
QUICK |= {"height": 16, "width": 16, "feed_forward": 64}


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Options of a benchmark whose turns are steps of a Plan."""
    add = parser.add_argument
    add("--calls", type=int, default=2, help="steps of a turn (2)")
    add("--profiled-steps", type=int, default=5, help="steps of which it is told what they waited for (5)")
    for field in dataclasses.fields(Sizes):
        default = field.default
        add(f"--{field.name.replace('_', '-')}", type=int, default=default, help=f"of the model ({default})")


def sizes_from(options: argparse.Namespace) -> Sizes:
    return Sizes(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)})


def measure_plans(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[list[float]]:
    """Milliseconds of every row's turns, all rows in turn; what a close look found is added to the rows.

    Args:
        rows: with "strategy", "plan", "sizes" and "ranks"; rows of several numbers of ranks take turns too.

    Raises:
        RuntimeError: a row's ranks fail, with the reason that they gave.
    """
    with ExitStack() as running:
        job = partial(Job, "plan_step", device=options.device, limit_s=600.0)
        worlds = {
            num_ranks: running.enter_context(Ranks(job(num_ranks=num_ranks)))
            for num_ranks in sorted({row["ranks"] for row in rows})
        }

        def ask(row: Mapping[str, Any], **task: Any) -> Mapping[str, Any]:
            harness.say(f"{task['do']}: {row['strategy']} on {row['ranks']} rank(s)")
            outcome = worlds[row["ranks"]].run(task | {"plan": row["plan"], "sizes": row["sizes"]})
            if outcome.status != "done":
                raise RuntimeError(
                    f"{row['strategy']}, {row['ranks']} ranks {outcome.status}: {outcome.reason}"
                )
            return outcome.found

        for row in rows:
            with tempfile.TemporaryDirectory() as folder:
                row["seen"] = ask(row, do="look", folder=folder, profiled_steps=options.profiled_steps)
        cpu_s: list[list[float]] = [[] for _ in rows]

        def turn(number: int) -> float:
            found = ask(rows[number], do="turn", calls=options.calls)
            cpu_s[number].append(found["cpu_s"])
            return float(found["step_ms"])

        turns = {str(number): partial(turn, number) for number in range(len(rows))}
        times = [*harness.take_turns(turns, options.rounds).values()]
    for row, own, processor_s in zip(rows, times, cpu_s, strict=True):
        row["workers"] = num_workers(row["ranks"], options.device)
        row["step_ms"] = harness.spread(own)
        row["cpu_s"] = statistics.median(processor_s[harness.WARM_UP_ROUNDS :])
        shares = row["workers"] < row["ranks"]
        row["note"] = f"{row['ranks']} ranks on {row['workers']} cores" if shares else ""
    return times


def accounting(found: Mapping[str, Any]) -> StepMemory:
    """What a close look saw a step to need, from plain data again."""
    blocks = tuple(BlockMemory(**block) for block in found["blocks"])
    return StepMemory(**{**found, "blocks": blocks, "plan": Plan.from_dict(found["plan"])})


# ---- without ranks


@cache
def count_simulated(plan: Plan, sizes: Sizes) -> dict[str, Any]:
    """What rank 0 of the plan's world counts in a step, in this process, without sending or computing anything.

    Calls and bytes are those of the real operators on tensors without values, and FLOPs theirs.
    """
    counter, recorder = FlopCounter(), CollectiveRecorder()

    def run_step(model: torch.nn.Module, run: Run) -> None:
        # Called again where ranks tell each other sizes: the last time counts.
        nonlocal counter, recorder
        counter, recorder = FlopCounter(), CollectiveRecorder()
        step = PlanStep(plan, sizes, torch.device("cpu"), model)
        for _ in range(WARM_UP_STEPS):
            step()
        with counter, recorder:
            step()

    record_step(run_step, sizes.build, plan)
    return traffic(recorder, plan) | {"rank_flops": counter.hardware_flops}


def traffic(recorder: CollectiveRecorder, plan: Plan) -> dict[str, Any]:
    """Calls and bytes sent, by kind and axis, without the whole numbers that ranks tell each other to agree."""
    shape, axes = MeshShape.of(plan), dict[str, dict[str, int]]()
    for call in recorder.calls:
        # What is received is what another rank sends.
        if call.carries_numbers and call.kind not in ("recv", "barrier"):
            name = f"{call.kind} over {group_of(call.group, shape)}"
            into = axes.setdefault(name, {"calls": 0, "sent_bytes": 0})
            into["calls"] += 1
            into["sent_bytes"] += call.sent_bytes
    sums = {key: sum(axis[key] for axis in axes.values()) for key in ("calls", "sent_bytes")}
    return {"by_axis": axes, **sums}


def num_workers(num_ranks: int, device: str) -> int:
    """Devices that compute for so many ranks; of a CPU the cores, one a rank, until there are no more."""
    if device == "cuda":
        return num_ranks
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(num_ranks, cores)
