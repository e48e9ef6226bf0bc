"""What the engine uses of a device: three queues with an order between them, and two slots for what comes back.

The engine states every order that it relies on through `wait`. What runs the queues can be exchanged: CUDA streams,
a host that copies at once, or a test that delays copies as long as the waits allow.
"""

from __future__ import annotations

import enum
import time
from typing import Any

import torch
from torch import Tensor

from opensora_accel.regions import region

# One block computes from its slot while the next is fetched into the other.
NUM_SLOTS = 2


class Queue(enum.Enum):
    """Work on one queue runs in the order it was given; between queues there is no order but by `wait`."""

    COMPUTE = "compute"
    OUT = "device to host"
    IN = "host to device"


# What a profiler calls work on them.
_REGIONS = {Queue.COMPUTE: "other", Queue.OUT: "copy out", Queue.IN: "copy in"}


class Queues:
    """The queues of a device whose memory is the host's: every copy is done when `copy` returns, nothing waits."""

    # Whether copies run beside compute.
    overlaps = False

    def copy(self, queue: Queue, destination: Tensor, source: Tensor) -> None:
        """Starts copying N bytes, uint8 [N]. The caller keeps both alive until it has waited for it."""
        with region(_REGIONS[queue]):
            destination.copy_(source)

    def record(self, queue: Queue) -> Any:
        """An event: all work given to the queue so far. None where that is done already."""
        return None

    def wait(self, queue: Queue, event: Any) -> None:
        """Work given to the queue from now on runs after the event. The host does not wait."""

    def synchronize(self) -> None:
        """The host waits until both copy queues are empty."""

    def mark(self, queue: Queue) -> Any:
        """A point in the queue's time."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks; the host waits for them."""
        return float(end - start)

    def peak_bytes(self) -> int | None:
        """The most that has been used of the device's memory since `reset_peak`; None where nothing counts it."""
        return None

    def reset_peak(self) -> None:
        """Begins to count anew."""

    def total_bytes(self) -> int | None:
        """All of the device's memory; None where nothing gives it."""
        return None


class CudaQueues(Queues):
    """A stream for each direction; compute is the stream that is current when the engine is called."""

    overlaps = True

    def __init__(self, device: torch.device):
        self.device = device
        self._streams = {queue: torch.cuda.Stream(device) for queue in (Queue.OUT, Queue.IN)}

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        # Asked for each time, because a user may run the model on a stream of their own.
        return self._streams.get(queue) or torch.cuda.current_stream(self.device)

    def copy(self, queue: Queue, destination: Tensor, source: Tensor) -> None:
        """Starts copying N bytes, uint8 [N]."""
        with torch.cuda.stream(self._stream(queue)), region(_REGIONS[queue]):
            # It returns at once only where the host memory is page-locked.
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
    return CudaQueues(device) if device.type == "cuda" else Queues()


class Slots:
    """Device memory held from the first forward to `close`, so that backward asks the allocator for nothing.

    A slot is free when no tensor uses its storage any more. The end of a block's backward does not show that:
    `retain_graph`, a hook, or another microbatch may hold on to what was fetched.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._slots: list[_Slot] = []

    @property
    def memory(self) -> list[Tensor]:
        """All of it, as uint8 tensors, one for each slot."""
        return [slot.memory for slot in self._slots]

    @property
    def size_bytes(self) -> int:
        return sum(memory.numel() for memory in self.memory)

    def reserve(self, size_bytes: int) -> None:
        """One more slot while there are fewer than two, and none smaller than this entry."""
        # What is still used of a smaller one lives on in its tensors.
        self._slots = [
            slot if slot.memory.numel() >= size_bytes else _Slot(size_bytes, self._device)
            for slot in self._slots
        ]
        if len(self._slots) < NUM_SLOTS:
            self._slots.append(_Slot(size_bytes, self._device))

    def take(self, size_bytes: int) -> Tensor | None:
        """uint8 [size_bytes] in a free slot; None when all are in use or too small."""
        for slot in self._slots:
            if slot.memory.numel() >= size_bytes and slot.num_references() == slot.own_references:
                return slot.memory[:size_bytes]
        return None


class _Slot:
    def __init__(self, size_bytes: int, device: torch.device):
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._storage = self.memory.untyped_storage()  # held, so that asking for it does not change the count
        self.own_references = self.num_references()

    def num_references(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)
