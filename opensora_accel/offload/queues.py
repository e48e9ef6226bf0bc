"""The three queues of a device and the order between them: compute, copies out, copies in.

The engine states every order that it relies on through `wait`. What runs the queues can be exchanged: CUDA streams,
a host that copies at once, or a test that delays copies as long as the waits allow.
"""

from __future__ import annotations

import enum
import time
from typing import Any, Protocol

import torch
from torch import Tensor


class Queue(enum.Enum):
    """Work on one queue runs in the order it was given; between queues there is no order but by `wait`."""

    COMPUTE = "compute"
    OUT = "device to host"
    IN = "host to device"


class Queues(Protocol):
    """What the engine asks of a device."""

    overlaps: bool
    """Whether copies run beside compute."""

    def copy(self, queue: Queue, destination: Tensor, source: Tensor) -> None:
        """Starts copying bytes (uint8, contiguous). The caller keeps both alive until it has waited for it."""

    def record(self, queue: Queue) -> Any:
        """An event: all work given to the queue so far."""

    def wait(self, queue: Queue, event: Any) -> None:
        """Work given to the queue from now on runs after the event. The host does not wait."""

    def synchronize(self) -> None:
        """The host waits until both copy queues are empty."""

    def mark(self, queue: Queue) -> Any:
        """A point in the queue's time."""

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks; the host waits for them."""

    def peak_bytes(self) -> int | None:
        """The most that has been used of the device's memory since `reset_peak`; None where nothing counts it."""

    def reset_peak(self) -> None:
        """Begins to count anew."""

    def total_bytes(self) -> int | None:
        """All of the device's memory."""


class HostQueues:
    """A device whose memory is the host's: every copy is done when `copy` returns."""

    overlaps = False

    def copy(self, queue: Queue, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source)

    def record(self, queue: Queue) -> None:
        return None

    def wait(self, queue: Queue, event: None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def mark(self, queue: Queue) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def peak_bytes(self) -> None:
        return None

    def reset_peak(self) -> None:
        return None

    def total_bytes(self) -> None:
        return None


class CudaQueues:
    """A stream for each direction; compute is the stream that is current when the engine is called."""

    overlaps = True

    def __init__(self, device: torch.device):
        self.device = device
        self._streams = {queue: torch.cuda.Stream(device) for queue in (Queue.OUT, Queue.IN)}

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return self._streams.get(queue) or torch.cuda.current_stream(self.device)

    def copy(self, queue: Queue, destination: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream(queue)):
            destination.copy_(source, non_blocking=True)

    def record(self, queue: Queue) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(queue))
        return event

    def wait(self, queue: Queue, event: torch.cuda.Event) -> None:
        self._stream(queue).wait_event(event)

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def mark(self, queue: Queue) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(queue))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        start.synchronize()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def total_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).total_memory


def queues_for(device: torch.device) -> Queues:
    return CudaQueues(device) if device.type == "cuda" else HostQueues()
