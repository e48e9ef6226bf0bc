"""One rank: works through a list of tasks and writes what it finds, line by line, for `launch` to read.

Run as `python -m opensora_accel.profiler.bench_attention.rank JOB RANK`, in any environment that has torch. A task
that fails ends the process: ranks that are still waiting for each other cannot be used again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.profiler.bench_attention.counting import SentBytes, bytes_kept
from opensora_accel.profiler.bench_attention.peers import find_side
from opensora_accel.profiler.bench_attention.problem import (
    GRADIENTS,
    Problem,
    Whole,
    World,
    full_attention,
    make_whole,
)
from opensora_accel.profiler.bench_attention.side import Attention, Side

WARM_UP_ROUNDS = 2
Part = Literal["errors", "bytes", "times"]
Alive = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """One measurement of one side (of several that take turns, for times) on one problem."""

    part: Part
    sides: tuple[str, ...]
    problem: Problem
    rounds: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Task:
        values = values | {"problem": Problem(**values["problem"]), "sides": tuple(values["sides"])}
        return cls(**values)


@dataclass(frozen=True)
class Prepared:
    """A side with its own share of one problem's inputs."""

    side: Side
    attention: Attention
    inputs: tuple[Tensor, ...]
    grad: Tensor
    q_rows: Tensor
    kv_rows: Tensor

    def forward_backward(self) -> tuple[Tensor, ...]:
        """out, dq, dk, dv of this rank."""
        out = self.attention.forward(*self.inputs)
        if out.shape != self.grad.shape:
            raise ValueError(
                f"the output is {list(out.shape)}, but this rank's rows are {list(self.grad.shape)}"
            )
        return (out, *torch.autograd.grad(out, self.inputs, self.grad))


def prepare(world: World, name: str, problem: Problem, whole: Whole) -> Prepared:
    side = find_side(name)
    layout = side.layout(problem)
    q_rows, kv_rows = (world.rows(total, layout) for total in (problem.queries, problem.keys))
    shares = ((whole.q, q_rows), (whole.k, kv_rows), (whole.v, kv_rows), (whole.grad, q_rows))
    q, k, v, grad = (tensor[:, rows.to(world.device)].contiguous() for tensor, rows in shares)
    attention = side.make(world, problem, whole.mask)
    return Prepared(side, attention, tuple(t.requires_grad_() for t in (q, k, v)), grad, q_rows, kv_rows)


def measure_errors(world: World, task: Task) -> dict[str, float | None]:
    """For out, dq, dk, dv: the largest error on this rank over the largest value of the whole; None if not finite."""
    (name,) = task.sides
    whole = make_whole(task.problem, world.device)
    expected = full_attention(task.problem, whole)
    prepared = prepare(world, name, task.problem, whole)
    with prepared.attention.around():
        found = prepared.forward_backward()
    errors: dict[str, float | None] = {}
    for key, tensor in zip(GRADIENTS, found, strict=True):
        rows = prepared.kv_rows if key in ("dk", "dv") else prepared.q_rows
        share = expected[key][:, rows.to(world.device)]
        error = float((tensor.double() - share).abs().max() / expected[key].abs().max())
        errors[key] = error if error < torch.inf else None
    return errors


def measure_bytes(world: World, task: Task) -> dict[str, Any]:
    """Of one forward and backward; after one that is not counted, which may set groups up."""
    (name,) = task.sides
    prepared = prepare(world, name, task.problem, make_whole(task.problem, world.device))
    with prepared.attention.around():
        prepared.forward_backward()
        with SentBytes() as counter:
            prepared.forward_backward()
        kept = bytes_kept(prepared.attention.forward, prepared.inputs)
    q_bytes = prepared.inputs[0].nbytes
    return {**dataclasses.asdict(counter.traffic), "kept_bytes": kept, "q_bytes": q_bytes}


def measure_times(world: World, task: Task, alive: Alive) -> dict[str, list[float]]:
    """For each side, the milliseconds of every round on its slowest rank; the sides take turns in a changing order."""
    whole = make_whole(task.problem, world.device)
    sides = [prepare(world, name, task.problem, whole) for name in task.sides]
    times: dict[str, list[float]] = {name: [] for name in task.sides}
    for number in range(-WARM_UP_ROUNDS, task.rounds):
        for at in range(len(sides)):
            prepared = sides[(number + at) % len(sides)]
            elapsed_ms = _one_turn(world, prepared)
            if number >= 0:
                times[prepared.side.name].append(elapsed_ms)
        alive(f"round {number + 1} of {task.rounds}" if number >= 0 else "warm-up")
    table = torch.tensor(list(times.values()), dtype=torch.float64, device=world.device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return dict(zip(times, table.tolist(), strict=True))


def _one_turn(world: World, prepared: Prepared) -> float:
    with prepared.attention.around():
        _synchronize(world.device)
        dist.barrier()
        start = time.perf_counter()
        results = prepared.forward_backward()
        _synchronize(world.device)
        elapsed_ms = (time.perf_counter() - start) * 1e3
        del results
    return elapsed_ms


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_task(world: World, task: Task, alive: Alive) -> Any:
    if task.part == "errors":
        return measure_errors(world, task)
    return measure_bytes(world, task) if task.part == "bytes" else measure_times(world, task, alive)


def start_world(job: dict[str, Any], rank: int, folder: Path) -> World:
    torch.set_num_threads(1)
    on_cuda = job["device"] == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    # A file store: a TCP store's server listens on every interface of the machine.
    store = dist.FileStore(str(folder / "store"), job["num_ranks"])
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=job["num_ranks"])
    group = dist.group.WORLD
    assert group is not None
    return World(rank, job["num_ranks"], device, group)


def main(job_file: str, rank: int) -> None:
    folder = Path(job_file).parent
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    warnings.filterwarnings("ignore")
    with open(folder / f"events{rank}", "w", encoding="utf-8") as events:

        def tell(**event: Any) -> None:
            events.write(json.dumps(event | {"at": time.time()}) + "\n")
            events.flush()

        number = -1
        try:
            world = start_world(job, rank, folder)
            for number, values in enumerate(job["tasks"]):
                task = Task.from_dict(values)
                tell(start=number)
                # No rank is in the next task while another still answers for this one.
                dist.barrier()
                tell(done=number, result=run_task(world, task, lambda note: tell(alive=note)))
        except BaseException as error:  # noqa: BLE001 - whatever it was, it is this side's result
            tell(failed=number, reason=f"{type(error).__name__}: {error}")
            # Not by way of Python's own end, which waits for what other ranks will never send.
            os._exit(1)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
