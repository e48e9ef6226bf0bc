"""How often a microbatch is run again: as often as a hundredth of the time allows.

a step of 5 s with one microbatch, looked at every 100 steps    a replay takes 5.5 s: every 200 steps, 0.55 %
a step of 20 s with four of them                                the same 5.5 s: every 100 steps, 0.28 %
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from opensora_accel.communications import gather_objects

# Of the time, for replays; what is noted of a microbatch while its step runs takes some more.
_SHARE = 0.008


class Rhythm:
    """Says in which steps a replay is due, the same on all ranks.

    Args:
        first_step: the run's.
        every: steps between two looks.
        replay_every: steps between two replays; 0 for never; None for the least multiple of `every` that takes less
            than its share of the time. The first comes `every` steps after the first look, for which one microbatch
            is not much.
    """

    def __init__(self, first_step: int, every: int, replay_every: int | None):
        self._every, self._given = every, replay_every
        self._next = first_step + every if replay_every is None else first_step + replay_every - 1
        # When replays last ended, and after which step.
        self._since, self._since_step = time.perf_counter(), first_step

    def is_due(self, step: int) -> bool:
        """Whether a microbatch of this step is run again."""
        return step == self._next and self._given != 0

    @contextmanager
    def measured(self, step: int) -> Iterator[None]:
        """Around the replay of this step; afterwards it is known when the next one is due.

        Communication: an object all-gather.
        """
        started = time.perf_counter()
        yield
        ended = time.perf_counter()
        of_step = (started - self._since) / max(1, step - self._since_step)
        self._since, self._since_step = ended, step
        if self._given is not None:
            self._next += self._given
            return
        # Ranks measure for themselves, and have to agree.
        dearest = max(gather_objects((ended - started) / of_step))
        self._next += self._every * math.ceil(dearest / _SHARE / self._every)
