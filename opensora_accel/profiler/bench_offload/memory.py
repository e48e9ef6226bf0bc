"""What one step of one scheme holds on the device: after the forward, at its peak, and over its operations."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER
from opensora_accel.profiler.bench_offload.schemes import Scheme, set_up_arena
from opensora_accel.profiler.bench_offload.workload import Workload
from opensora_accel.profiler.memory import LiveBytes

SHOWN_POINTS = 240
"""Of a timeline's half, in the result file and in the picture."""


class StepMemory(LiveBytes):
    """Live bytes of one device type, without those that lie on it between steps."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device, self._is_paused = device, False

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """What is made within it stands for host memory."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def restart(self) -> None:
        self.peak_bytes = self.now_bytes
        self.timeline.clear()

    def _count(self, storage: torch.UntypedStorage) -> None:
        if not self._is_paused and storage.device.type == self._device.type:
            super()._count(storage)


@dataclass
class MemoryFigures:
    """Bytes on the device, above what lies there between steps; the engine's slots are part of it."""

    baseline_bytes: int
    """Weights, gradients and data."""
    resident_bytes: int
    """After the forward and the loss."""
    peak_bytes: int
    slot_bytes: int
    out_bytes: int
    in_bytes: int
    forward_timeline: list[int] = field(default_factory=list)
    """Live bytes after operations, in order."""
    backward_timeline: list[int] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return self.baseline_bytes + self.peak_bytes

    def timeline(self) -> dict[str, list[int]]:
        return {"forward_bytes": self.forward_timeline, "backward_bytes": self.backward_timeline}


def measure_memory(workload: Workload, scheme: Scheme, *, with_timeline: bool) -> MemoryFigures:
    """One step after another that has settled the scheme, with an arena and slots of its own."""
    if scheme.uses_arena:
        set_up_arena(workload.case)
    else:
        GLOBAL_ACTIVATION_MANAGER.close()
    if workload.case.device.type != "cuda":
        return _counted_step(workload, scheme)
    figures = _allocated_step(workload, scheme)
    if with_timeline:
        counted = _counted_step(workload, scheme)
        figures.forward_timeline = counted.forward_timeline
        figures.backward_timeline = counted.backward_timeline
    return figures


def _counted_step(workload: Workload, scheme: Scheme) -> MemoryFigures:
    """By counting storages: exact bytes, and one value for each operation."""
    live = StepMemory(workload.case.device)
    _ignore_held(live, workload, scheme)
    resident_bytes, forward_operations = 0, 0

    def after_forward() -> None:
        nonlocal resident_bytes, forward_operations
        resident_bytes, forward_operations = live.now_bytes, len(live.timeline)

    scheme.traffic.on_host = live.on_host
    try:
        with live:
            _run(workload, scheme)  # the slots are made here, and so counted
            gc.collect()
            live.restart()
            _run(workload, scheme, after_forward)
    finally:
        scheme.traffic.on_host = contextlib.nullcontext
    out_bytes, in_bytes = scheme.moved_bytes()
    return MemoryFigures(
        baseline_bytes=sum(tensor.nbytes for tensor in workload.held()),
        resident_bytes=resident_bytes,
        peak_bytes=live.peak_bytes,
        slot_bytes=GLOBAL_ACTIVATION_MANAGER.slot_bytes,
        out_bytes=out_bytes,
        in_bytes=in_bytes,
        forward_timeline=_thinned(live.timeline[:forward_operations]),
        backward_timeline=_thinned(live.timeline[forward_operations:]),
    )


def _ignore_held(live: LiveBytes, workload: Workload, scheme: Scheme) -> None:
    arena = GLOBAL_ACTIVATION_MANAGER.arena
    for tensor in [*workload.held(), *scheme.host_memory, *(arena.memory if arena is not None else ())]:
        live.ignore(tensor)


def _allocated_step(workload: Workload, scheme: Scheme) -> MemoryFigures:
    """By CUDA's allocator, which rounds up and knows what operations take within."""
    device, resident_bytes = workload.case.device, 0
    _run(workload, scheme)
    gc.collect()
    torch.cuda.synchronize(device)
    baseline_bytes = torch.cuda.memory_allocated(device) - GLOBAL_ACTIVATION_MANAGER.slot_bytes
    torch.cuda.reset_peak_memory_stats(device)

    def after_forward() -> None:
        nonlocal resident_bytes
        resident_bytes = torch.cuda.memory_allocated(device)

    _run(workload, scheme, after_forward)
    torch.cuda.synchronize(device)
    out_bytes, in_bytes = scheme.moved_bytes()
    return MemoryFigures(
        baseline_bytes=baseline_bytes,
        resident_bytes=resident_bytes - baseline_bytes,
        peak_bytes=torch.cuda.max_memory_allocated(device) - baseline_bytes,
        slot_bytes=GLOBAL_ACTIVATION_MANAGER.slot_bytes,
        out_bytes=out_bytes,
        in_bytes=in_bytes,
    )


def _run(workload: Workload, scheme: Scheme, after_forward: Any = None) -> None:
    scheme.prepare()
    workload.step(scheme.forward, after_forward)


def _thinned(values: Sequence[int]) -> list[int]:
    """Few enough to draw: the greatest of each stretch, so that no peak is lost."""
    num = min(SHOWN_POINTS, len(values))
    bounds = [len(values) * index // num for index in range(num + 1)] if num else [0]
    return [max(values[start:end]) for start, end in pairwise(bounds)]


def longest_tokens(tokens: tuple[int, int], total_bytes: tuple[int, int], budget_bytes: int) -> int | None:
    """By a straight line through two lengths: the most tokens within the budget; None where it does not rise."""
    slope = (total_bytes[1] - total_bytes[0]) / (tokens[1] - tokens[0])
    if slope <= 0:
        return None
    return max(0, int(tokens[0] + (budget_bytes - total_bytes[0]) / slope))
