"""A transformer's step as a few operations, in place of a traced one: for tests of what is done with traces."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from opensora_accel.plan import Plan
from opensora_accel.planner import command, estimate, search
from opensora_accel.planner.candidates import Request
from opensora_accel.planner.estimate import Reference, Weights, axis_groups
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.trace import MemoryState, Operation, Trace

MIB, GIB = 2**20, 2**30
H100 = Hardware.named("h100x8-ib400")


@dataclass(frozen=True)
class StandInWorkload:
    """As a Workload, of a model that is numbers alone."""

    name: str = "stand-in"
    num_blocks: int = 4
    num_heads: int = 8
    num_tokens: int = 4096
    text_tokens: int = 16
    batch: int = 1
    has_tensor_table: bool = False
    channels: int = 1024
    accumulation: int = 1
    fused_optimizer: bool = True
    architecture: str = "sm_90"
    has_tensor_table: bool = False


def trace_step(workload: StandInWorkload, plan: Plan, rank: int = 0) -> Trace:  # noqa: C901 — a step
    """Products, attention, an addition, what the axes send, and live bytes."""
    c, n = workload.channels, -(-workload.num_tokens * workload.batch // plan.sequence)
    dtype, width = ("bfloat16", 2) if plan.precision == "bf16" else ("float32", 4)
    weights = 12 * c * c
    groups = axis_groups(plan, rank)
    operations: list[Operation] = []
    memory: list[MemoryState] = []
    parameters = 4 * weights * workload.num_blocks // plan.num_shards // plan.tp
    held = 0

    def gemm(phase: str, block: int) -> None:
        operations.append(
            Operation("aten.mm", "gemm", "compute", (), phase, block, 2 * n * weights // plan.tp, width * weights,  # type: ignore[arg-type]
                      (1, n, 12 * c // plan.tp, c), dtype)
        )  # fmt: skip

    def attention(phase: str, block: int) -> None:
        if plan.ulysses > 1:
            sent = 4 * n * c * width * (plan.ulysses - 1) // plan.ulysses
            operations.append(
                Operation("all-to-all", "collective", "exchange", (len(operations) - 1,), phase, block, 0, sent,  # type: ignore[arg-type]
                          (), dtype, "all-to-all", groups["ulysses"], "ulysses")
            )  # fmt: skip
        flops = 4 * n * workload.num_tokens * c * (2 if phase == "backward" else 1) // plan.tp
        operations.append(
            Operation("aten.sdpa", "attention", "compute", (len(operations) - 1,), phase, block, flops,
                      4 * n * c * width,
                      (workload.batch, workload.num_heads, n, workload.num_tokens, c // workload.num_heads), dtype)
        )  # fmt: skip
        operations.append(
            Operation("aten.add", "memory", "compute", (), phase, block, 0, 6 * n * c * width, (), dtype)
        )  # type: ignore[arg-type]

    def note(phase: str, block: int | None, more: int = 0) -> None:
        kinds = {"parameters": 0 if plan.cpu_offload else parameters, "gradients": 0,
                 "optimizer state": 0 if plan.cpu_offload else 2 * parameters, "block inputs": held,
                 "recomputation": more}  # fmt: skip
        memory.append(MemoryState(len(operations) - 1, phase, block, kinds))

    inputs, kept = n * c * width, 20 * n * c * width
    offloaded = 0
    for _ in range(workload.accumulation):
        held = 0
        for block in range(workload.num_blocks):
            gemm("forward", block)
            note("forward", block)
            attention("forward", block)
            if plan.checkpoint == "none":
                held += kept
            elif float(plan.offload) > block / workload.num_blocks:
                offloaded += inputs
            else:
                held += inputs if plan.checkpoint == "full" else 2 * inputs
        for block in reversed(range(workload.num_blocks)):
            if plan.checkpoint != "none":
                gemm("recompute", block)
                if plan.checkpoint == "full":
                    attention("recompute", block)
            for _ in range(2):
                gemm("backward", block)
            attention("backward", block)
            note("backward", block, kept // plan.mlp_chunks if plan.checkpoint != "none" else 0)
    operations.append(
        Operation("aten.addcmul_", "memory", "compute", (), "optimizer", None, 0, 7 * parameters)
    )
    note("optimizer", None)
    host = offloaded + (4 * parameters if plan.cpu_offload else 0)
    return Trace(
        plan,
        rank,
        workload.num_blocks,
        tuple(operations),
        tuple(memory),
        host,
        parameters,
        parameters,
        kept,
        tuple(groups.values()),
    )


def reference(cls, workload, precision):
    plain = Plan(precision=precision)
    traces = [
        trace_step(workload, plain.replace(**more))
        for more in ({}, {"checkpoint": "full"}, {"mlp_chunks": 4})
    ]
    blocks = (Weights(*(4 * 12 * workload.channels**2,) * 3),) * workload.num_blocks
    return Reference(workload, *traces, blocks, Weights(0, 0, 0), workload.has_tensor_table)


def use_stand_ins(monkeypatch):
    """`opensora-accel plan` takes every model for a few operations."""

    def named(name, *, frames, height, width, batch=1):
        return StandInWorkload(name, num_tokens=frames * height * width // 1024, batch=batch)

    monkeypatch.setattr(command, "named_workload", named)
    trace_stand_ins(monkeypatch)


def trace_stand_ins(monkeypatch):
    """A search traces a few operations in place of a step."""
    monkeypatch.setattr(search, "trace_step", trace_step)
    monkeypatch.setattr(estimate.Reference, "of", classmethod(reference))


def request(world_size: int = 8, hardware: Hardware = H100, **fields: Any) -> Request:
    workload = fields.pop("workload", StandInWorkload())
    return Request(((workload, 1.0),), hardware, world_size, **fields)


def small(memory_gib: float, **fields: Any) -> Hardware:
    return dataclasses.replace(H100, memory_bytes=round(memory_gib * GIB), **fields)
