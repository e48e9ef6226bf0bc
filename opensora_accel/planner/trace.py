"""One training step of one rank under a Plan, on tensors without values: kernels, collectives, copies, live bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from opensora_accel.observe import SharedAttention, class_of
from opensora_accel.plan import Plan
from opensora_accel.planner.allocator import StepMemory

# What bounds an operation.
OperationKind = Literal["gemm", "attention", "memory", "collective", "copy_out", "copy_in"]
# One thing at a time runs on each.
Stream = Literal["compute", "gather", "reduce", "exchange", "ring", "copy_out", "copy_in"]
Phase = Literal["forward", "recompute", "backward", "optimizer"]


@dataclass(frozen=True)
class Operation:
    """One kernel, copy or collective of one rank. Operations stand in the order in which the host starts them."""

    # "aten.mm", "all-gather", "copy out".
    name: str
    kind: OperationKind
    stream: Stream
    # Indices of operations on other streams that must have ended before this one starts.
    after: tuple[int, ...] = ()
    phase: Phase = "forward"
    # Index of the transformer block; None outside of all.
    block: int | None = None
    flops: int = 0
    # Device memory read and written; of copies and collectives what this rank sends.
    num_bytes: int = 0
    # For a gemm (batch, m, n, k); of an attention (B, H, S_q, S_k, D).
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    # The kind of a collective: "all-to-all", "all-gather", "reduce-scatter", "all-reduce", "send", ...
    collective: str = ""
    # Global ranks, in the group's order.
    group: tuple[int, ...] = ()
    # As the verifier's `group_of` names the group.
    axis: str = ""
    # The global rank at the other end of a send.
    peer: int | None = None
    # Of a message between two ranks, what comes in beside what is sent, or where nothing is.
    received_bytes: int = 0
    # Parameters that FSDP2's hooks have gone through on the host just before it.
    hooked: int = 0
    # The module that it ran in, as the profiler's regions name it: block, attention or mlp, "" outside of the blocks.
    # None where the trace knows no modules.
    region: str | None = None

    @property
    def operator_class(self) -> str:
        """What it is for, more finely than what bounds it."""
        if self.kind != "memory":
            return {"gemm": "matrix products", "attention": "attention"}.get(self.kind, "communication")
        return class_of(self.name.removeprefix("aten."))


@dataclass(frozen=True)
class MemoryState:
    """Live bytes by kind (`records.KINDS`) while operation number `operation` ran, or just after it."""

    operation: int
    phase: str
    block: int | None
    bytes_by_kind: Mapping[str, int]
    # Of the kind "other", by the class of the operator that made them; "made before" where it ran before the step.
    other_by_class: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        return sum(size for kind, size in self.bytes_by_kind.items() if not kind.endswith("host"))


@dataclass(frozen=True)
class Trace:
    """One step, which is not the first one: the optimizer has its state, and buffers that stay are there."""

    plan: Plan
    rank: int
    num_blocks: int
    operations: tuple[Operation, ...]
    # In the order of time, wherever live bytes turned by what is seen in a picture; the peak is among them.
    memory: tuple[MemoryState, ...]
    # The most in host memory at once: block inputs that wait there, and shards under plan.cpu_offload.
    host_bytes: int
    # This rank's own shards of the parameters.
    parameter_bytes: int
    # Of them those that the step trains.
    trained_bytes: int
    # The largest single storage: what an allocator's fragments are estimated from.
    largest_bytes: int
    # Groups in which this rank communicates, as global ranks: each takes buffers of the communication library.
    groups: tuple[tuple[int, ...], ...] = ()
    # Attention by slices of a mask: of the step's, the one with the most pairs. None where all tokens see each other.
    attention: SharedAttention | None = None
    # In order, what is made and freed, from which an allocator's fragments follow.
    storages: StepMemory = field(default_factory=StepMemory, compare=False, repr=False)

    @property
    def peak(self) -> MemoryState:
        return max(self.memory, key=lambda state: state.device_bytes)

    @property
    def peak_bytes(self) -> int:
        """Live bytes of tensors on the device. Allocator slack, communication buffers and the context come on top."""
        return self.peak.device_bytes

    @property
    def bytes_by_kind_at_peak(self) -> dict[str, int]:
        return dict(self.peak.bytes_by_kind)

    @property
    def flops(self) -> int:
        return sum(operation.flops for operation in self.operations)

    def communication(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Calls and bytes that this rank sends, by kind of collective and axis."""
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for operation in self.operations:
            if operation.kind == "collective" and operation.collective != "recv":
                key = operation.collective, operation.axis
                calls, sent_bytes = totals.get(key, (0, 0))
                totals[key] = calls + 1, sent_bytes + operation.num_bytes
        return totals
