"""The schemes side by side: ours in every setting, and the peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER, checkpoint_blocks
from opensora_accel.offload.arena import aligned
from opensora_accel.profiler.bench_offload.peers import (
    HostStack,
    SaveOnCpu,
    SynchronousStack,
    TorchtuneOffload,
    Traffic,
    why_no_torchtune,
)
from opensora_accel.profiler.bench_offload.workload import Case, Forward, Workload

REFERENCE = "full"
"""Checkpointing alone: what a ratio of 1 means, and whose gradients are everybody's."""
OFFLOADED = "full+offload"
AUTOMATIC = "full+auto"
NAMES = (
    "none",
    REFERENCE,
    OFFLOADED,
    AUTOMATIC,
    "selective",
    "selective+offload",
    "save_on_cpu",
    "synchronous stack",
    "torchtune",
)
OFFLOADING_PEERS = ("save_on_cpu", "synchronous stack", "torchtune")

Offload = float | Literal["auto"]


@dataclass
class Scheme:
    """One way to run the blocks of a case."""

    name: str
    forward: Forward
    blocks: Sequence[nn.Module]
    theory_bytes: Callable[[], int] = lambda: 0
    """What has to be copied out in one step."""
    kept_bytes: int | None = None
    """Block inputs, and outputs of attention where they are kept, on the device after the forward."""
    uses_arena: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    host_memory: Sequence[Tensor] = ()
    """Of its own, for the whole run."""

    def prepare(self) -> None:
        """Before each of its steps."""
        GLOBAL_ACTIVATION_MANAGER.enable = self.uses_arena
        self.traffic.clear()
        GLOBAL_ACTIVATION_MANAGER.reset_counters()

    def moved_bytes(self) -> tuple[int, int]:
        """Out and in, since `prepare`."""
        if self.uses_arena:
            counters = GLOBAL_ACTIVATION_MANAGER.counters
            return counters.moved_bytes, counters.fetched_bytes
        return self.traffic.out_bytes, self.traffic.in_bytes


def in_turn(blocks: Sequence[nn.Module]) -> Forward:
    def forward(hidden: Tensor, timestep: Tensor) -> Tensor:
        for block in blocks:
            hidden = block(hidden, timestep)
        return hidden

    return forward


def chosen_names(only: str) -> list[str]:
    return [name for name in NAMES if only in name or name == REFERENCE]


def make_schemes(workload: Workload, only: str = "") -> tuple[list[Scheme], dict[str, str]]:
    """Those whose name holds `only`, and the reference; and why the others among them cannot run."""
    chosen = chosen_names(only)
    skipped = {}
    reason = why_no_torchtune(workload.case.device) if "torchtune" in chosen else None
    if reason is not None:
        chosen.remove("torchtune")
        skipped["torchtune"] = reason
    return [_make(name, workload) for name in chosen], skipped


def set_up_arena(case: Case) -> None:
    """Host memory for all blocks of the scheme that moves most; slots from before are gone."""
    each = 2 * aligned(case.input_bytes) + aligned(case.log_sum_exp_bytes)
    # Some kernels round the length of their log-sum-exp up.
    GLOBAL_ACTIVATION_MANAGER.setup_arena(case.blocks * (each + each // 50))


def _make(name: str, workload: Workload) -> Scheme:
    case, blocks, traffic = workload.case, workload.twin_blocks(), Traffic()
    if name == "none":
        return Scheme(name, in_turn(blocks), blocks)
    if name in OFFLOADING_PEERS:
        return _make_peer(name, case, blocks, traffic)
    mode, _, setting = name.partition("+")
    settings: dict[str, Offload] = {"": 0.0, "offload": 1.0, "auto": "auto"}
    offload = settings[setting]
    return _make_ours(name, case, blocks, "full" if mode == "full" else "selective", offload)


def _make_ours(
    name: str, case: Case, blocks: Sequence[nn.Module], mode: Literal["full", "selective"], offload: Offload
) -> Scheme:
    checkpoint_blocks(blocks, mode, offload, keep_last=case.keep_last)
    each = case.input_bytes
    if mode == "selective":
        each += case.input_bytes + case.log_sum_exp_bytes
    moved = case.moved_blocks if offload == 1.0 else 0
    first_decision = len(GLOBAL_ACTIVATION_MANAGER.decisions)

    def theory_bytes() -> int:
        if offload != "auto":
            return moved * each
        decisions = GLOBAL_ACTIVATION_MANAGER.decisions[first_decision:]
        return each * (decisions[-1].moved if decisions else case.moved_blocks)

    kept = (case.blocks - moved) * each if offload != "auto" else None
    return Scheme(name, in_turn(blocks), blocks, theory_bytes, kept, uses_arena=offload != 0.0)


def _make_peer(name: str, case: Case, blocks: Sequence[nn.Module], traffic: Traffic) -> Scheme:
    def theory_bytes() -> int:
        return case.blocks * case.input_bytes

    if name == "synchronous stack":
        num_elements = case.blocks * case.input_bytes // case.dtype.itemsize
        stack = HostStack(num_elements, case.dtype, traffic)
        forward: Forward = SynchronousStack(blocks, stack)
        return Scheme(name, forward, blocks, theory_bytes, traffic=traffic, host_memory=[stack.buffer])
    forward = (SaveOnCpu if name == "save_on_cpu" else TorchtuneOffload)(blocks, traffic)
    return Scheme(name, forward, blocks, theory_bytes, traffic=traffic)


def automatic_decision(first: int) -> str:
    """What "auto" said last, of its decisions from number `first` on."""
    decisions = GLOBAL_ACTIVATION_MANAGER.decisions[first:]
    return decisions[-1].reason if decisions else "no pass was measured to its end, so all blocks move"
