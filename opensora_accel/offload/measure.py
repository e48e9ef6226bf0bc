"""Times of one forward and backward pass: how long each block computes, how fast the link copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opensora_accel.offload.queues import Queue, Queues


@dataclass(eq=False)
class CallTimes:
    """Marks of one checkpointed call on the compute queue, without its waits for copies."""

    measurement: Measurement
    index: int
    """Of the block."""
    entered: Any
    left: Any = None
    recompute: Any = None
    """Its inputs are back: recomputation and backward begin."""
    ended: Any = None
    """None for the call that backward reaches last."""
    moved_bytes: int = 0

    def end_forward(self) -> None:
        self.left = self.measurement.queues.mark(Queue.COMPUTE)

    def begin_load(self) -> None:
        """Before the compute queue waits for this call's inputs: the one before it has computed."""
        if self.measurement.computing is not self:
            self.measurement.end_backward()

    def begin_backward(self) -> None:
        self.begin_load()
        self.measurement.sample_peak()
        self.recompute = self.measurement.queues.mark(Queue.COMPUTE)
        self.measurement.computing = self


@dataclass(frozen=True)
class CopyTimes:
    queue: Queue
    size_bytes: int
    start: Any
    end: Any


@dataclass(frozen=True)
class BlockCost:
    """What one block needs: bytes to move, seconds that a copy may hide behind."""

    size_bytes: int
    forward_s: float
    backward_s: float


@dataclass(eq=False)
class Measurement:
    """Filled by the engine during one pass; read when backward has ended."""

    queues: Queues
    calls: list[CallTimes] = field(default_factory=list)
    copies: list[CopyTimes] = field(default_factory=list)
    computing: CallTimes | None = None
    """Whose backward runs now."""
    peak_bytes: int | None = None
    """Of the device. Taken within the pass: a training loop may reset the statistics at the end of a step."""
    next_index: int = 0
    """Of the block that is about to be called."""

    def begin_call(self) -> CallTimes:
        self.calls.append(CallTimes(self, self.next_index, self.queues.mark(Queue.COMPUTE)))
        return self.calls[-1]

    def end_backward(self) -> None:
        if self.computing is not None:
            self.computing.ended = self.queues.mark(Queue.COMPUTE)
            self.computing = None

    def sample_peak(self) -> None:
        peak_bytes = self.queues.peak_bytes()
        if peak_bytes is not None:
            self.peak_bytes = max(peak_bytes, self.peak_bytes or 0)

    @contextlib.contextmanager
    def copying(self, queue: Queue, size_bytes: int) -> Iterator[None]:
        start = self.queues.mark(queue)
        yield
        self.copies.append(CopyTimes(queue, size_bytes, start, self.queues.mark(queue)))

    def is_complete(self) -> bool:
        """Backward has reached every call of the forward."""
        return bool(self.calls) and all(times.recompute is not None for times in self.calls)

    def costs(self, num_blocks: int) -> list[BlockCost]:
        """Of every block in forward order; one that was skipped costs nothing. The host waits for the queues."""
        seconds = self.queues.seconds
        forward = [seconds(times.entered, times.left) for times in self.calls]
        backward = [
            seconds(times.recompute, times.ended) if times.ended is not None else None for times in self.calls
        ]
        known = [value for value in backward if value is not None]
        # The last one's end is not seen; nothing is fetched behind it either.
        missing = sum(known) / len(known) if known else 0.0
        costs = [BlockCost(0, 0.0, 0.0)] * num_blocks
        for times, there, back in zip(self.calls, forward, backward, strict=True):
            costs[times.index] = BlockCost(times.moved_bytes, there, missing if back is None else back)
        return costs

    def bandwidth_bytes_per_s(self, queue: Queue) -> float | None:
        """Bytes per second of copying in one direction; None when nothing was copied."""
        copies = [copy for copy in self.copies if copy.queue is queue]
        elapsed = sum(self.queues.seconds(copy.start, copy.end) for copy in copies)
        return sum(copy.size_bytes for copy in copies) / elapsed if elapsed > 0 else None
