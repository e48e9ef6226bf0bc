"""What ran on which queue and when: from a profiler's trace on CUDA, from the engine's calls on a CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER, Queue

Interval = tuple[float, float]
"""Start and end, in milliseconds."""


def merged(intervals: Iterable[Interval], gap_ms: float = 0.0) -> list[Interval]:
    """The same time as intervals that neither overlap nor lie closer together than `gap_ms`, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1] + gap_ms:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def shared_ms(one: Iterable[Interval], other: Iterable[Interval]) -> float:
    """Time that lies in both."""
    first, second = merged(one), merged(other)
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def without(intervals: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """The time of the first that lies outside of the second."""
    left = merged(intervals)
    for start, end in merged(taken):
        pieces = [piece for a, b in left for piece in ((a, min(b, start)), (max(a, end), b))]
        left = [(a, b) for a, b in pieces if a < b]
    return left


@dataclass
class QueueTimes:
    """Intervals of one step on the three queues, from its start."""

    compute: list[Interval] = field(default_factory=list)
    out: list[Interval] = field(default_factory=list)
    in_: list[Interval] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    """Of the compute intervals, where they are whole blocks."""

    def hidden_share(self) -> float | None:
        """Of the time that copies took, how much lay beside compute; None without copies."""
        copies = (merged(self.out), merged(self.in_))
        total = sum(end - start for intervals in copies for start, end in intervals)
        return sum(shared_ms(c, self.compute) for c in copies) / total if total else None

    def to_dict(self) -> dict[str, Any]:
        """For the picture: what it could not tell apart is joined."""
        everything = [*self.compute, *self.out, *self.in_]
        begin = min((start for start, _ in everything), default=0.0)
        end = max((end for _, end in everything), default=0.0)
        gap_ms = 0.0 if self.labels else (end - begin) / 2000

        def shown(intervals: Sequence[Interval], gap_ms: float) -> list[list[float]]:
            kept = intervals if self.labels else merged(intervals, gap_ms)
            return [[round(a - begin, 4), round(b - begin, 4)] for a, b in kept]

        return {
            "compute_ms": shown(self.compute, gap_ms),
            "out_ms": shown(self.out, 0.0),
            "in_ms": shown(self.in_, 0.0),
            "labels": self.labels,
        }


def queue_times(events: Iterable[Any]) -> QueueTimes:
    """From the events of a profiler: kernels compute, as do copies within the device.

    Args:
        events: of `torch.profiler.profile.events()`; times in microseconds.
    """
    times = QueueTimes()
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        interval = (event.time_range.start / 1000, event.time_range.end / 1000)
        if "Memcpy DtoH" in event.name:
            times.out.append(interval)
        elif "Memcpy HtoD" in event.name:
            times.in_.append(interval)
        else:
            times.compute.append(interval)
    return times


class HostRecorder:
    """Records one step of our engine on a CPU: blocks, and the copies that it makes while they wait."""

    def __init__(self, blocks: Sequence[nn.Module]):
        self._blocks = blocks
        self._copies: dict[Queue, list[Interval]] = {Queue.OUT: [], Queue.IN: []}
        self._marks: list[tuple[float, str]] = []
        """When something else began to compute, and what."""

    @contextlib.contextmanager
    def recording(self, device: torch.device) -> Iterator[None]:
        queues = GLOBAL_ACTIVATION_MANAGER.queues(device)
        copy = queues.copy

        def recorded(queue: Queue, destination: Tensor, source: Tensor) -> None:
            start = _now_ms()
            copy(queue, destination, source)
            self._copies[queue].append((start, _now_ms()))

        handles = [handle for index, block in enumerate(self._blocks) for handle in self._watch(block, index)]
        queues.copy = recorded  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._mark("")
            del queues.copy  # the class's own again
            for handle in handles:
                handle.remove()

    def times(self) -> QueueTimes:
        """A block's compute is cut where a copy ran: on a CPU it waits."""
        copies = [*self._copies[Queue.OUT], *self._copies[Queue.IN]]
        times = QueueTimes(out=self._copies[Queue.OUT], in_=self._copies[Queue.IN])
        for (start, label), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            for piece in without([(start, end)], copies) if label else []:
                times.compute.append(piece)
                times.labels.append(label)
        return times

    def _mark(self, label: str) -> None:
        self._marks.append((_now_ms(), label))

    def _watch(self, block: nn.Module, index: int) -> list[Any]:
        def begin_forward(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._mark(f"forward {index}")
            if index == 0:
                args[0].register_hook(lambda gradient: self._mark(""))

        def end_forward(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self._mark("")
            output.register_hook(lambda gradient: self._mark(f"backward {index}"))

        return [block.register_forward_pre_hook(begin_forward), block.register_forward_hook(end_forward)]


def _now_ms() -> float:
    return time.perf_counter() * 1000
