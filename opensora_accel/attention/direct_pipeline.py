"""Keys that each rank sends straight to the ranks whose queries see them, and the gradients that come straight back.

In a ring every block passes every rank. Where a rank sees a part of few blocks, less is sent if those who hold the keys
send what is needed and nothing else. P = 3 ranks; at step s a rank sends to the one s places on:

    step             rank 0                      rank 1                      rank 2
    0                attends to its own keys     likewise                    likewise
    1                sends to 1, gets of 2       sends to 2, gets of 0       sends to 0, gets of 1
    2                sends to 2, gets of 1       sends to 0, gets of 2       sends to 1, gets of 0

The message of a step is under way while the step before is computed. In backward gradients of the keys of step s go the
other way while step s + 1 is computed, and are added up where the keys are. Nobody sends what is empty.

If a rank fails on the way, it goes on sending what the others wait for, as in a ring: its keys, and NaN for gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications import finish, start_shift

logger = logging.getLogger(__name__)


class Counts(NamedTuple):
    """How many tokens' keys one rank has for another at a step, and gets of a third."""

    sent: int
    received: int


def _with_nan(grads: Tensor) -> None:
    grads.fill_(float("nan"))


class DirectPipeline:
    """One exchange: call `next_keys` for each step, and behind each but the first, `send_grads`.

    Used in a `with`, which goes on sending after an exception. All memory is taken before the first message.

    Args:
        counts: of every step, the first of which sends nothing.
        keys: of which dtype messages are, on this rank's device, and how many elements a token has.
        grads: the same of gradients, if they are to come back.
        fill: puts this rank's keys for a step into a flat buffer.
        take: adds gradients of this rank's keys, flat, which come back of those that were sent at a step.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        counts: Sequence[Counts],
        keys: tuple[Tensor, int],
        fill: Callable[[int, Tensor], None],
        grads: tuple[torch.dtype, int] | None = None,
        take: Callable[[int, Tensor], None] | None = None,
    ):
        self._group, self._counts, self._fill, self._take = group, counts, fill, take
        like, self._per_token = keys
        self._device = like.device
        most_sent, most_received = (max(each) for each in zip(*counts, strict=True))
        # One of two is computed with, or on its way, while the other one is filled. Two ranks have one message.
        number = min(2, len(counts) - 1)
        self._sent, self._received = (
            [like.new_empty(most * self._per_token) for _ in range(number)]
            for most in (most_sent, most_received)
        )
        if grads is not None:
            dtype, self._grads_per_token = grads
            self._grads_sent = like.new_empty(most_received * self._grads_per_token, dtype=dtype)
            self._grads_received = like.new_empty(most_sent * self._grads_per_token, dtype=dtype)
        self._has_grads = grads is not None
        self._step, self._num_returned = -1, 0
        self._keys_under_way: list[dist.Work] = []
        self._grads_under_way: list[dist.Work] = []
        self._is_broken = False

    def __enter__(self) -> DirectPipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Where the communication itself has failed, there is nothing to go on with.
        if kind is not None and not self._is_broken:
            self._go_on()

    def next_keys(self) -> Tensor:
        """The keys of the next step, flat (none at the first); those of the one after it are then under way."""
        self._wait(self._keys_under_way)
        self._step += 1
        following = self._step + 1
        if following < len(self._counts):
            count = self._counts[following]
            sent = self._sent[following % len(self._sent)][: count.sent * self._per_token]
            self._fill(following, sent)
            self._keys_under_way = self._start(sent, self._received_at(following), following)
        return self._received_at(self._step)

    def send_grads(self, fill: Callable[[Tensor], None]) -> None:
        """Sends back the gradients of this step's keys, flat; `fill` puts them into a buffer that may hold anything."""
        self._take_grads()
        step = self._num_returned + 1
        assert step == self._step
        count = self._counts[step]
        grads = self._grads_sent[: count.received * self._grads_per_token]
        fill(grads)
        coming = self._grads_received[: count.sent * self._grads_per_token]
        self._grads_under_way = self._start(grads, coming, -step)
        self._num_returned = step

    def finish_grads(self) -> None:
        """Waits for the last gradients of this rank's keys."""
        self._take_grads()

    def _take_grads(self) -> None:
        """Hands on the gradients that the step before has brought."""
        self._wait(self._grads_under_way)
        if self._num_returned:
            count = self._counts[self._num_returned].sent
            assert self._take is not None
            if count:
                self._take(self._num_returned, self._grads_received[: count * self._grads_per_token])

    def _received_at(self, step: int) -> Tensor:
        return self._received[step % len(self._received)][: self._counts[step].received * self._per_token]

    def _go_on(self) -> None:
        logger.error("rank %d failed in attention: it sends what the others wait for", self._group.rank())
        self._take = lambda _step, _grads: None
        # The same messages in the same order as without the failure, or the others would take one for another.
        try:
            while True:
                if self._has_grads and self._step > self._num_returned:
                    self.send_grads(_with_nan)
                elif self._step < len(self._counts) - 1:
                    self.next_keys()
                else:
                    break
            self._wait(self._keys_under_way)
            self._wait(self._grads_under_way)
        except RuntimeError as error:  # the caller hears of what failed first
            logger.error("rank %d could not: %s", self._group.rank(), error)

    def _start(self, sent: Tensor, received: Tensor, shift: int) -> list[dist.Work]:
        try:
            return start_shift(sent, received, self._group, shift=shift, operation="attention by slices")
        except Exception:
            self._is_broken = True  # nothing more can be sent
            raise

    def _wait(self, works: list[dist.Work]) -> None:
        try:
            finish(works, self._group, self._device, operation="attention by slices")
        except Exception:
            self._is_broken = True  # a neighbour is gone
            raise
