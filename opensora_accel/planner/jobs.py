"""A job, and the Plan that is chosen for it: what the command, the trainer and loops of one's own plan by."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opensora_accel.observe import Forecast
from opensora_accel.plan import Plan
from opensora_accel.planner.candidates import Candidate, Outcome, Request, Residents, describe
from opensora_accel.planner.explain import explain
from opensora_accel.planner.foresee import forecast_of
from opensora_accel.planner.hardware import Hardware, this_machine
from opensora_accel.planner.search import Show, search
from opensora_accel.planner.workload import Workload, workload_of_model


@dataclass(frozen=True)
class Job:
    """What is planned for: sizes of clips with how often each comes, and what the run itself says."""

    mix: tuple[tuple[Workload, float], ...]
    precision: str = "bf16"
    residents: Residents = field(default_factory=Residents)
    global_batch: int | None = None
    accumulation: int = 1
    resize: Callable[[Workload, int], Workload] | None = None


JobOfConfig = Callable[[Path], Job]


def choose(job: Job, world_size: int, hardware_name: str = "") -> Plan:
    """The best Plan for a job; prints why. As `choose_foreseen`."""
    return choose_foreseen(job, world_size, hardware_name)[0]


def choose_foreseen(job: Job, world_size: int, hardware_name: str = "") -> tuple[Plan, Forecast]:
    """The best Plan for a job, and what is foreseen of it; prints why. For `plan = "auto"` and `plan_for`.

    Args:
        hardware_name: by default this machine. There the environment variable OPENSORA_ACCEL_HARDWARE names other
            hardware, or a file of `doctor --calibrate`.

    Raises:
        ValueError: nothing fits, and what would help.
    """
    hardware = Hardware.named(hardware_name) if hardware_name else this_machine(world_size)
    request = Request(
        job.mix,
        hardware,
        world_size,
        job.precision,
        job.residents,
        job.global_batch,
        job.resize,
        job.accumulation,
    )
    with progress() as show:
        outcome = search(request, show)
    if outcome.best is None:
        raise ValueError(nothing_fits(outcome))
    print(f"the plan, of {len(outcome.candidates)} for {world_size} × {hardware.name}:")
    print(explain(outcome.best, outcome).text(), flush=True)
    return outcome.best.plan, forecast_of(request, outcome.best)


def plan_for(
    model: Callable[[], nn.Module],
    inputs: Callable[[nn.Module, torch.dtype], Mapping[str, Any]],
    *,
    world_size: int | None = None,
    hardware: str = "",
    num_tokens: int = 0,
    num_heads: int = 0,
    batch: int = 1,
    precision: str = "bf16",
) -> Plan:
    """The fastest Plan that fits, for a loop of one's own; prints why. Call it on one process, before any group.

    Args:
        model: builds it; called on tensors without values. Its class has a policy.
        inputs: of its forward for one microbatch, floating-point ones in the dtype that it is given; the first one
            holds the latents, and what the model returns has their shape.
        world_size: ranks; by default those that the launcher has started.
        hardware: as `opensora-accel plan --hardware` takes it; by default this machine.
        num_tokens, num_heads: of a sample, and of its attention: they limit the sequence axes. 0 does not.
        batch: samples of a data rank in one microbatch, which `inputs` has.

    Raises:
        ValueError: nothing fits, and what would help; a process group exists already; a wrong name.
    """
    if not callable(model) or hasattr(model, "state_dict"):
        raise ValueError(
            f"plan_for takes a function that builds the model, as `lambda: Model(...)`; got {type(model).__name__}"
        )
    workload = workload_of_model(
        "the model", model, inputs, batch=batch, num_tokens=num_tokens, num_heads=num_heads
    )
    ranks = world_size if world_size is not None else int(os.environ.get("WORLD_SIZE", "1"))
    return choose(Job(((workload, 1.0),), precision), ranks, hardware)


@contextmanager
def progress() -> Iterator[Show]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True),
        transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def nothing_fits(outcome: Outcome) -> str:
    """What is missing, and what would help."""
    request = outcome.request
    if not outcome.candidates:
        rules = "; ".join(outcome.excluded) or "what is fixed by --set leaves none"
        return f"no plan uses {request.world_size} ranks: {rules}. Choose another number of GPUs, or fix fewer fields"
    nearest: Candidate = outcome.candidates[0]
    return (
        f"nothing fits: the least is {describe(nearest.plan)}, which {nearest.reason}. Use more GPUs, smaller or fewer "
        "frames, a smaller --micro-batch, --optimizer adamw-8bit, or hardware with more memory"
    )
