"""Points in time: of the host, or of a GPU's stream, which are known only when the GPU has come there.

    mark = clock.mark()          now, or an event on the current stream; the host waits for nothing
    clock.is_done(mark)          whether it can be read without waiting
    clock.seconds(mark)          seconds since the clock began

Ranks count from the start of the run on rank 0's clock. How far a rank's own clock is ahead of that is found by asking
all ranks for their time just after a barrier, several times, and taking the median:

    round 1    rank 0 says 10.000, rank 1 says 73.004    63.004
    round 2    rank 0 says 10.100, rank 1 says 73.101    63.001
    round 3    rank 0 says 10.200, rank 1 says 73.202    63.002: rank 1 is ahead by this much
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from opensora_accel.communications import gather_objects

_NUM_ROUNDS = 9
# In so long float32 milliseconds are a microsecond apart.
_ANCHOR_S = 10.0


class HostClock:
    """Work is done when the call returns, as on a CPU."""

    def __init__(self) -> None:
        # The host's time at which the run began.
        self.zero_s = time.perf_counter()

    def mark(self) -> Any:
        """This point in time, of the work that was given to the current stream."""
        return time.perf_counter()

    def is_done(self, mark: Any) -> bool:
        return True

    def seconds(self, mark: Any) -> float:
        """Since the run began; waits for the mark."""
        return float(mark) - self.zero_s

    def behind_s(self, mark: Any) -> float | None:
        """How long after the host the device came to a mark; None where the host computes itself."""
        return None

    def when_done(self, work: dist.Work, note: Callable[[Any], None]) -> bool:
        """Calls `note` with a mark of the point at which a transfer is done, where that can be known.

        The host does not wait. Returns whether the work has been waited for, which lets go of its tensors.
        """
        try:
            future = work.get_future()
        except RuntimeError:
            return False  # messages and reduce-scatters of gloo have none
        future.add_done_callback(lambda _future: note(self.mark()))
        return False


@dataclass(eq=False)
class _Anchor:
    """An event that others are counted from."""

    event: torch.cuda.Event
    # On the host's clock; known when it is asked for, from the anchor before.
    host_s: float | None
    before: _Anchor | None = None

    def seconds(self) -> float:
        if self.host_s is None:
            assert self.before is not None
            self.event.synchronize()
            self.host_s = self.before.seconds() + self.before.event.elapsed_time(self.event) / 1000
            self.before = None
        return self.host_s


class _Mark(NamedTuple):
    event: torch.cuda.Event
    anchor: _Anchor
    # The host's time just before it.
    host_s: float


class CudaClock(HostClock):
    """An event on the current stream for each mark.

    CUDA gives the time between two events as float32 milliseconds, which an hour after the first are 0.25 ms apart. So
    every few seconds an event becomes the one that those after it are counted from.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        # Two pools of 32 streams are all that there are. Copies of offload and callbacks of futures have theirs in the
        # other one: on one of those this would make them wait for transfers.
        self._waiting = torch.cuda.Stream(device, priority=-1)
        # Then a wait makes the host wait.
        self._host_waits = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("0", "")
        event = self._record()
        # The only wait: from here on it is known when on the host's clock an event happened.
        event.synchronize()
        self._anchor = _Anchor(event, time.perf_counter())
        self._anchored_s = time.perf_counter()

    def mark(self) -> Any:
        now = time.perf_counter()
        event = self._record()
        if now - self._anchored_s > _ANCHOR_S:
            self._anchor, self._anchored_s = _Anchor(event, None, self._anchor), now
        return _Mark(event, self._anchor, now)

    def is_done(self, mark: Any) -> bool:
        return bool(mark.event.query())

    def seconds(self, mark: Any) -> float:
        mark.event.synchronize()
        since_s = mark.anchor.event.elapsed_time(mark.event) / 1000
        return mark.anchor.seconds() + float(since_s) - self.zero_s

    def behind_s(self, mark: Any) -> float | None:
        return self.seconds(mark) - (mark.host_s - self.zero_s)

    def when_done(self, work: dist.Work, note: Callable[[Any], None]) -> bool:
        # A stream of the clock's own waits, and has a mark behind that. Messages of NCCL have no future to ask.
        if self._host_waits:
            return False
        with torch.cuda.stream(self._waiting):
            work.wait()
            note(self.mark())
        return True

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        # Of this device, whichever is the thread's own: that is the first one until it is set.
        event.record(torch.cuda.current_stream(self._device))
        return event


def clock_for(device: torch.device) -> HostClock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


def agree(clock: HostClock) -> float:
    """Lets the ranks count from the same instant; how far this rank may be off rank 0, in seconds.

    Communication: nine barriers and object all-gathers over the world.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return 0.0
    ahead: list[float] = []
    for _ in range(_NUM_ROUNDS):
        dist.barrier()
        times = gather_objects((time.perf_counter(), clock.zero_s))
        ahead.append(times[dist.get_rank()][0] - times[0][0])
    median_s = statistics.median(ahead)
    clock.zero_s = times[0][1] + median_s
    # Half of the rounds lie nearer than this.
    return statistics.median(abs(each - median_s) for each in ahead)
