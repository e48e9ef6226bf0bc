"""Buffers on their way round a ring of ranks, and what comes back of them.

Every rank's keys pass by every other rank; in backward, the gradient of a rank's keys follows one step behind and
ends at home. One message each way is under way while the caller computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.waiting import waiting

logger = logging.getLogger(__name__)


class Circulation:
    """One trip round the ring. At step s this rank holds the buffer of the rank s places before it.

    Call `next_block` P times, and, where something is to come back, `send_home` after each of them but the first:

        step 0: own buffer. step 1…P−1: the buffers of ranks r−1, r−2, …, and the sums for their owners.

    Used in a `with`: after an exception in it, the trip goes on without computing, so that no other rank waits for
    this one for ever. They get the keys they need; sums that pass here become NaN, as this rank's part is missing. All
    memory is taken before the first message, so that there is enough for that.

    Messages between two ranks are posted in one order on both, as NCCL needs it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        own: Tensor,
        sizes: Sequence[int],
        return_sizes: Sequence[int] | None = None,
        return_dtype: torch.dtype | None = None,
    ):
        """`own`: flat, `sizes` every rank's number of elements; `return_sizes` those of what comes back."""
        self._group, self._own = group, own
        self._num_ranks, self._rank = group.size(), group.rank()
        self._sizes, self._return_sizes = sizes, return_sizes
        # One of two is computed with and sent on, while the other one is received into.
        self._blocks = [own.new_empty(max(sizes)) for _ in range(min(2, self._num_ranks - 1))]
        self._sums: list[Tensor] = []
        if return_sizes is not None:
            self._sums = [own.new_empty(max(return_sizes), dtype=return_dtype) for _ in range(2)]
        self._step = self._num_sent = -1
        self._travelling: list[dist.Work] = []
        self._returning: list[dist.Work] = []
        self._is_broken = False

    def __enter__(self) -> Circulation:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._is_broken:
            self._drain()

    @property
    def owner(self) -> int:
        """Whose buffer is here."""
        return self._owner_at(self._step)

    def next_block(self) -> Tensor:
        """The next buffer; the one after it is then on its way."""
        step = self._step + 1
        self._wait(self._travelling)
        current = self._block_at(step)
        if step < self._num_ranks - 1:
            self._travelling = self._post(current, self._block_at(step + 1), tag=0)
        self._step = step
        if step == 0:
            self._num_sent = 0
        return current

    def send_home(self, add: Callable[[Tensor, bool], None]) -> None:
        """Passes on the sums for the current buffer's owner, after `add(sums, is_new)` put this rank's part in.

        A new buffer holds nothing yet: `add` must fill it.
        """
        assert self._return_sizes is not None and self._step == self._num_sent + 1
        self._wait(self._returning)
        sums = self._sums_at(self._step)
        add(sums, self._step == 1)
        # From the rank before: the sums for the next step's owner, and at the last step for this rank itself.
        self._returning = self._post(sums, self._sums_at(self._step + 1), tag=1)
        self._num_sent += 1

    def come_home(self) -> Tensor:
        """The sums for this rank's own buffer, of all the others."""
        assert self._num_sent == self._num_ranks - 1
        self._wait(self._returning)
        return self._sums_at(self._num_ranks)

    def _owner_at(self, step: int) -> int:
        return (self._rank - step) % self._num_ranks

    def _block_at(self, step: int) -> Tensor:
        return self._own if step == 0 else self._blocks[step % 2 - 1][: self._sizes[self._owner_at(step)]]

    def _sums_at(self, step: int) -> Tensor:
        assert self._return_sizes is not None
        return self._sums[step % 2][: self._return_sizes[self._owner_at(step)]]

    def _drain(self) -> None:
        logger.error("rank %d of the ring failed: it passes on what the others wait for", self._rank)
        try:
            while True:
                if self._return_sizes is not None and self._step > self._num_sent:
                    self.send_home(_spoil)
                elif self._step < self._num_ranks - 1:
                    self.next_block()
                else:
                    break
            self._wait(self._travelling)
            self._wait(self._returning)
        except RuntimeError as error:  # the caller hears of what failed first
            logger.error("rank %d of the ring could not: %s", self._rank, error)

    def _post(self, sent: Tensor, received: Tensor, tag: int) -> list[dist.Work]:
        to, of = (self._rank + 1) % self._num_ranks, (self._rank - 1) % self._num_ranks
        operations = []
        if sent.numel():
            operations.append(
                dist.P2POp(dist.isend, sent, dist.get_global_rank(self._group, to), self._group, tag)
            )
        if received.numel():
            operations.append(
                dist.P2POp(dist.irecv, received, dist.get_global_rank(self._group, of), self._group, tag)
            )
        try:
            with waiting("ring attention", self._group):
                return dist.batch_isend_irecv(operations) if operations else []
        except Exception:
            self._is_broken = True
            raise

    def _wait(self, works: list[dist.Work]) -> None:
        """Each work leaves the list when it is done: after an interrupt the rest is waited for again."""
        while works:
            try:
                if not works[0].is_completed():
                    with waiting("ring attention", self._group):
                        works[0].wait()
            except Exception:
                self._is_broken = True  # a neighbour is gone: nothing more can be passed on
                raise
            works.pop(0)


def _spoil(sums: Tensor, _is_new: bool) -> None:
    sums.fill_(float("nan"))
