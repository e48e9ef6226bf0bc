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

logger = logging.getLogger(__name__)


class Circulation:
    """One trip round the ring. At step s this rank holds the buffer of the rank s places before it.

    Call `next_block` P times, and, where something is to come back, `send_home` after each of them but the first:

        step 0: own buffer. step 1…P−1: the buffers of ranks r−1, r−2, …, and the sums for their owners.

    Used in a `with`: after an exception in it, the trip goes on without computing, so that no other rank waits for
    this one for ever. They get the keys they need; sums that pass here become NaN, as this rank's part is missing.

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
        self._group, self._sizes = group, sizes
        self._num_ranks, self._rank = group.size(), group.rank()
        self._current = own
        self._step = -1
        self._next: Tensor | None = None
        self._travelling: list[dist.Work] = []
        self._return_sizes, self._return_dtype = return_sizes, return_dtype
        self._returning: list[dist.Work] = []
        self._sent: Tensor | None = None
        self._sums: Tensor | None = None
        self._num_sent = 0
        self._broken = False

    def __enter__(self) -> Circulation:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._drain()

    @property
    def owner(self) -> int:
        return (self._rank - self._step) % self._num_ranks

    def next_block(self) -> Tensor:
        """The next buffer; the one after it is then on its way."""
        self._step += 1
        if self._step > 0:
            self._wait(self._travelling)
            assert self._next is not None
            self._current = self._next
        if self._step < self._num_ranks - 1:
            following = (self._rank - self._step - 1) % self._num_ranks
            self._next = self._current.new_empty(self._sizes[following])
            self._travelling = self._post(self._current, self._next, tag=0)
        return self._current

    def send_home(self, add: Callable[[Tensor, bool], None]) -> None:
        """Passes on the sums for the current buffer's owner, after `add(sums, is_new)` put this rank's part in.

        A new buffer holds nothing yet: `add` must fill it.
        """
        assert self._return_sizes is not None and self._step > 0
        is_new = self._step == 1
        if is_new:
            sums = self._new_sums(self.owner)
        else:
            self._wait(self._returning)
            assert self._sums is not None
            sums = self._sums
        add(sums, is_new)
        # From the rank before: the sums for the next step's owner, and at the last step for this rank itself.
        self._sent = sums
        self._sums = self._new_sums((self._rank - self._step - 1) % self._num_ranks)
        self._returning = self._post(sums, self._sums, tag=1)
        self._num_sent += 1

    def come_home(self) -> Tensor:
        """The sums for this rank's own buffer, of all the others."""
        self._wait(self._returning)
        assert self._sums is not None and self._num_sent == self._num_ranks - 1
        self._sent = None
        return self._sums

    def _drain(self) -> None:
        if self._broken:
            return
        logger.error("rank %d of the ring failed: it passes on what the others wait for", self._rank)
        while True:
            if self._return_sizes is not None and self._step > self._num_sent:
                self.send_home(_spoil)
            elif self._step < self._num_ranks - 1:
                self.next_block()
            else:
                break
        self._wait(self._travelling)
        self._wait(self._returning)

    def _new_sums(self, owner: int) -> Tensor:
        assert self._return_sizes is not None
        return self._current.new_empty(self._return_sizes[owner], dtype=self._return_dtype)

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
        self._broken = True
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
        self._broken = False
        return works

    def _wait(self, works: list[dist.Work]) -> None:
        self._broken = True  # where waiting raises, a neighbour is gone and nothing more is posted
        while works:
            works.pop(0).wait()
        self._broken = False


def _spoil(sums: Tensor, _is_new: bool) -> None:
    sums.fill_(float("nan"))
