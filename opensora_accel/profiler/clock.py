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

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from opensora_accel.communications import gather_objects

_NUM_ROUNDS = 9


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


class CudaClock(HostClock):
    """An event on the current stream for each mark."""

    def __init__(self) -> None:
        super().__init__()
        self._first = self.mark()
        # The only wait: from here on it is known when on the host's clock an event happened.
        self._first.synchronize()
        self._first_s = time.perf_counter()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_done(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, mark: Any) -> float:
        mark.synchronize()
        return self._first_s + float(self._first.elapsed_time(mark)) / 1000 - self.zero_s


def clock_for(device: torch.device) -> HostClock:
    return CudaClock() if device.type == "cuda" else HostClock()


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
