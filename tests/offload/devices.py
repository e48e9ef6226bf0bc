"""Devices that are no GPU but as merciless: one delays every copy, one checks the order of every access."""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch.cuda._sanitizer import EventHandler
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

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


LINE_BYTES = 64
HOST = 3
STREAMS = {Queue.COMPUTE: 0, Queue.OUT: 1, Queue.IN: 2}


class RaceQueues(Queues):
    """Copies at once, and gives every access to the vector-clock check of torch's CUDA sanitizer."""

    overlaps = True

    def __init__(self, device=None):
        self.handler = EventHandler()
        for stream in (*STREAMS.values(), HOST):
            self.handler._handle_stream_creation(stream)
        self.races = []
        self._num_events = 0
        self._host = set()

    def copy(self, queue, destination, source):
        with _disable_current_modes():
            destination.copy_(source)
        host = destination if queue is Queue.OUT else source
        self._watch_host(host.untyped_storage())
        self.access(STREAMS[queue], queue.value, reads=lines(source), writes=lines(destination))

    def record(self, queue):
        self._num_events += 1
        self.handler._handle_event_creation(self._num_events)
        self.handler._handle_event_record(self._num_events, STREAMS[queue])
        return self._num_events

    def wait(self, queue, event):
        if event is not None:
            self.handler._handle_event_wait(event, STREAMS[queue])

    def synchronize(self):
        self.handler._handle_device_synchronization()

    def access(self, stream, what, reads=frozenset(), writes=frozenset()):
        reads = set(reads) - set(writes)
        names = {line: [what] for line in reads | set(writes)}
        self.races += self.handler._handle_kernel_launch(stream, reads, set(writes), set(), what, names)

    def freed_on_device(self, used):
        """The allocator hands the memory to the compute queue at once."""
        self.access(STREAMS[Queue.COMPUTE], "memory used again", writes=used)

    def _watch_host(self, storage):
        if storage.data_ptr() not in self._host:
            self._host.add(storage.data_ptr())
            weakref.finalize(storage, self._freed_on_host, storage.data_ptr(), storage_lines(storage))

    def _freed_on_host(self, start, used):
        """The host gives pages back without asking any queue. What comes to lie there is other memory."""
        self.access(HOST, "pages given back", writes=used)
        self._host.discard(start)
        for line in used:
            self.handler._handle_memory_deallocation(line)


class Compute(TorchDispatchMode):
    """Gives every operation, and every free, to a RaceQueues as work of the compute queue."""

    def __init__(self, queues):
        super().__init__()
        self._queues, self._known = queues, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        if func.is_view:
            return outputs
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        results = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        for tensor in results:
            self._watch(tensor.untyped_storage())
        if not func.name().startswith("aten::empty"):
            reads = set().union(*map(lines, inputs)) if inputs else set()
            writes = set().union(*map(lines, results)) if results else set()
            self._queues.access(STREAMS[Queue.COMPUTE], func.name(), reads=reads, writes=writes)
        return outputs

    def _watch(self, storage):
        if storage._cdata not in self._known and storage.nbytes():
            self._known.add(storage._cdata)
            weakref.finalize(storage, self._freed, storage._cdata, storage.data_ptr(), storage_lines(storage))

    def _freed(self, address, start, used):
        self._known.discard(address)
        if start not in self._queues._host:  # what the copies use of the host is watched there
            self._queues.freed_on_device(used)


def storage_lines(storage):
    start = storage.data_ptr()
    return frozenset(range(start // LINE_BYTES, -(-(start + storage.nbytes()) // LINE_BYTES)))


def lines(tensor):
    """The cache lines that a tensor may touch; of a device tensor all of its memory."""
    if tensor.dtype == torch.uint8:  # bytes on their way
        start = tensor.data_ptr()
        return frozenset(range(start // LINE_BYTES, -(-(start + tensor.numel()) // LINE_BYTES)))
    return storage_lines(tensor.untyped_storage())


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
