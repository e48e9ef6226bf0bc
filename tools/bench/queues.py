"""What ran when on the three queues of one step: compute, copies out, copies in.

On CUDA the profiler's trace tells it. On a CPU, where a copy makes compute wait, our engine's calls are recorded. A
copy is hidden where it lies beside compute. With compute from 0 to 12 ms and copies from 2 to 6 and from 11 to 15,
four ms and one of eight are hidden: a share of 5/8.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER
from opensora_accel.offload import Queue

# Start and end, in milliseconds.
Interval = tuple[float, float]


def merge(intervals: Iterable[Interval], gap_ms: float = 0.0) -> list[Interval]:
    """The same time as intervals that neither overlap nor lie closer together than `gap_ms`, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1] + gap_ms:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def subtract(intervals: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """The time of the first that lies outside of the second."""
    left = merge(intervals)
    for start, end in merge(taken):
        pieces = [piece for a, b in left for piece in ((a, min(b, start)), (max(a, end), b))]
        left = [(a, b) for a, b in pieces if a < b]
    return left


def hidden_share(compute: Sequence[Interval], *copies: Sequence[Interval]) -> float | None:
    """The share of the copies' time that lay beside compute; None without copies."""

    def length_ms(intervals: Iterable[Interval]) -> float:
        return sum(end - start for start, end in intervals)

    total_ms = sum(length_ms(merge(each)) for each in copies)
    return 1 - sum(length_ms(subtract(each, compute)) for each in copies) / total_ms if total_ms else None


def split_by_queue(events: Iterable[Any]) -> dict[str, list[Interval]]:
    """A profiler's events by queue, in milliseconds. Copies within the device count as compute."""
    found: dict[str, list[Interval]] = {"compute": [], "out": [], "in": []}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(
            event, "is_user_annotation", False
        ):
            key = "out" if "Memcpy DtoH" in event.name else "in" if "Memcpy HtoD" in event.name else "compute"
            found[key].append((event.time_range.start / 1000, event.time_range.end / 1000))
    return found


def record_on_host(
    blocks: Sequence[nn.Module], device: torch.device, run: Callable[[], None]
) -> tuple[dict[str, list[Interval]], list[str]]:
    """The same of one step of our engine on a CPU, where copies make compute wait; and the block of each interval."""
    found: dict[str, list[Interval]] = {"compute": [], "out": [], "in": []}
    marks: list[tuple[float, str]] = []  # when something else began to compute, and what
    queues = MANAGER.engine.queues(device)
    copy_now = queues.copy

    def mark(label: str) -> None:
        marks.append((time.perf_counter() * 1000, label))

    def recorded(which: Queue, destination: Tensor, source: Tensor) -> None:
        start = time.perf_counter() * 1000
        copy_now(which, destination, source)
        found["out" if which is Queue.OUT else "in"].append((start, time.perf_counter() * 1000))

    def before_forward(index: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        mark(f"forward {index}")
        if index == 0:
            args[0].register_hook(lambda gradient: mark(""))

    def after_forward(index: int, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        mark("")
        output.register_hook(lambda gradient: mark(f"backward {index}"))

    handles = []
    for index, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(partial(before_forward, index)))
        handles.append(block.register_forward_hook(partial(after_forward, index)))
    queues.copy = recorded  # type: ignore[method-assign, assignment]
    try:
        run()
    finally:
        mark("")
        del queues.copy  # the class's own again
        for handle in handles:
            handle.remove()
    labels = []
    for (start, label), (end, _) in pairwise(marks):
        pieces = subtract([(start, end)], [*found["out"], *found["in"]]) if label else []
        found["compute"] += pieces
        labels += [label] * len(pieces)
    return found, labels


def queues_to_draw(found: Mapping[str, Sequence[Interval]], labels: list[str]) -> dict[str, Any]:
    """The intervals, counted from the step's start; what a picture could not tell apart is joined."""
    bounds = [bound for intervals in found.values() for interval in intervals for bound in interval] or [0.0]
    gap_ms = (max(bounds) - min(bounds)) / 2000
    shown: dict[str, Any] = {"labels": labels}
    for key, intervals in found.items():
        kept = intervals if labels else merge(intervals, gap_ms if key == "compute" else 0.0)
        shown[f"{key}_ms"] = [[round(a - min(bounds), 4), round(b - min(bounds), 4)] for a, b in kept]
    return shown
