"""Devices that are no GPU: one as merciless, which delays every copy, and one with a clock for every queue."""

from __future__ import annotations

import weakref
from collections import deque

import torch

from opensora_accel.offload import Queue, Queues

NAN = 0xFF  # in every byte: a NaN in fp64, fp32 and bf16


class LateQueues(Queues):
    """Compute runs at once, copies as late as the waits allow. Until then the destination holds NaN.

    A copy whose source has been freed by then finds NaN, as if the memory had been used again.
    """

    overlaps = True

    def __init__(self, device=None):
        self._pending = {Queue.OUT: deque(), Queue.IN: deque()}
        self._given = dict.fromkeys(self._pending, 0)
        self._done = dict.fromkeys(self._pending, 0)
        self.freed_under_copy = 0

    def copy(self, queue, destination, source):
        destination.fill_(NAN)
        areas = [
            (weakref.ref(t.untyped_storage()), t.storage_offset(), t.numel()) for t in (destination, source)
        ]
        self._give(queue, lambda: self._run_copy(*areas))

    def _run_copy(self, destination, source):
        places = []
        for reference, offset, size in (destination, source):
            storage = reference()
            if storage is None:
                self.freed_under_copy += 1
                return
            places.append(torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,)))
        places[0].copy_(places[1])

    def record(self, queue):
        return (queue, self._given.get(queue, 0))

    def wait(self, queue, event):
        if queue is Queue.COMPUTE:
            self._finish(event)
        else:
            self._give(queue, lambda: self._finish(event))

    def synchronize(self):
        for queue in self._pending:
            self._finish(self.record(queue))

    def _give(self, queue, work):
        self._pending[queue].append(work)
        self._given[queue] += 1

    def _finish(self, event):
        if event is None:  # a record that a test took away
            return
        queue, number = event
        while queue in self._pending and self._done[queue] < number:
            self._done[queue] += 1
            self._pending[queue].popleft()()


class SimulatedQueues(Queues):
    """A device with a clock for every queue: what a schedule would take on a link of this bandwidth."""

    overlaps = True

    def __init__(self, bandwidth_bytes_per_s, memory=None):
        self.now = dict.fromkeys(Queue, 0.0)
        self.waited_s, self.num_resets = 0.0, 0
        self._bandwidth = bandwidth_bytes_per_s
        self._memory = memory
        """With `peak_bytes` and `total_bytes`."""

    def compute(self, seconds):
        self.now[Queue.COMPUTE] += seconds

    def copy(self, queue, destination, source):
        destination.copy_(source)
        self.now[queue] += source.numel() / self._bandwidth

    def record(self, queue):
        return self.now[queue]

    def wait(self, queue, event):
        if queue is Queue.COMPUTE:
            self.waited_s += max(0.0, event - self.now[queue])
        self.now[queue] = max(self.now[queue], event)

    mark = record

    def peak_bytes(self):
        return None if self._memory is None else self._memory.peak_bytes

    def reset_peak(self):
        self.num_resets += 1

    def total_bytes(self):
        return None if self._memory is None else self._memory.total_bytes
