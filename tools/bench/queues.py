"""What ran when on the three queues of one step: compute, copies out, copies in.

On CUDA the profiler's trace tells it. On a CPU, where a copy makes compute wait, our engine's calls are recorded. A
copy is hidden where it lies beside compute. With compute from 0 to 12 ms and copies from 2 to 6 and from 11 to 15,
four ms and one of eight are hidden: a share of 5/8.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER
from opensora_accel.offload import Queue

# Start and end, in milliseconds.
Interval = tuple[float, float]
Queues = dict[str, list[Interval]]


def merge(intervals: Iterable[Interval], gap_ms: float = 0.0) -> list[Interval]:
    """The same time as intervals that neither overlap nor lie closer together than `gap_ms`, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1] + gap_ms:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def hidden_share(queues: Mapping[str, Sequence[Interval]]) -> float | None:
    """The share of the copies' time that lay beside compute; None without copies."""
    copies, compute = [*queues["out"], *queues["in"]], merge(queues["compute"])
    total_ms = sum(end - start for start, end in copies)
    beside_ms = sum(max(0.0, min(end, b) - max(start, a)) for start, end in copies for a, b in compute)
    return beside_ms / total_ms if total_ms else None


def split_by_queue(events: Iterable[Any]) -> Queues:
    """A profiler's events by queue, in milliseconds. Copies within the device count as compute."""
    found: Queues = {"compute": [], "out": [], "in": []}
    for event in events:
        is_range = getattr(event, "is_user_annotation", False)
        if event.device_type == torch.autograd.DeviceType.CUDA and not is_range:
            key = "out" if "Memcpy DtoH" in event.name else "in" if "Memcpy HtoD" in event.name else "compute"
            found[key].append((event.time_range.start / 1000, event.time_range.end / 1000))
    return found


def record_on_host(
    blocks: Sequence[nn.Module], device: torch.device, run: Callable[[], None]
) -> tuple[Queues, list[str]]:
    """The same of one step of our engine on a CPU, and the block of each interval of compute."""
    found: Queues = {"compute": [], "out": [], "in": []}
    labels, current, since = list[str](), "", 0.0
    queues = MANAGER.engine.queues(device)
    copy_now = queues.copy

    def switch(label: str) -> float:
        """Something else computes from now on; "" is nothing."""
        nonlocal current, since
        now = time.perf_counter() * 1000
        if current:
            found["compute"].append((since, now))
            labels.append(current)
        current, since = label, now
        return now

    def recorded(which: Queue, destination: Tensor, source: Tensor) -> None:
        label = current
        start = switch("")
        copy_now(which, destination, source)
        found["out" if which is Queue.OUT else "in"].append((start, switch(label)))

    def before_forward(index: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        switch(f"forward {index}")
        if index == 0:
            args[0].register_hook(lambda gradient: switch("") and None)

    def after_forward(index: int, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        switch("")
        output.register_hook(lambda gradient: switch(f"backward {index}") and None)

    handles = []
    for index, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(partial(before_forward, index)))
        handles.append(block.register_forward_hook(partial(after_forward, index)))
    queues.copy = recorded  # type: ignore[method-assign, assignment]
    try:
        run()
    finally:
        switch("")
        del queues.copy  # the class's own again
        for handle in handles:
            handle.remove()
    return found, labels


def queues_to_draw(found: Queues, labels: list[str]) -> dict[str, Any]:
    """The intervals, counted from the step's start; kernels that a picture could not tell apart are joined."""
    bounds = [bound for intervals in found.values() for interval in intervals for bound in interval] or [0.0]
    first = min(bounds)
    if not labels:
        found = found | {"compute": merge(found["compute"], (max(bounds) - first) / 2000)}
    shown: dict[str, Any] = {"labels": labels}
    for key, intervals in found.items():
        shown[f"{key}_ms"] = [[round(a - first, 4), round(b - first, 4)] for a, b in intervals]
    return shown
