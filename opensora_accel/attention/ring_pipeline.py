"""Buffers on their way round a ring of ranks, and the gradients that come back.

P = 3 ranks, each with one block of keys K0, K1, K2. A rank passes on what it holds to the next rank and receives from
the one before, while it computes:

    step             rank 0                      rank 1                      rank 2
    0                K0                          K1                          K2
    1                K2                          K0                          K1
    2                K1                          K2                          K0

In backward the same blocks go round, and the sum of a block's gradients follows one step behind it. At step 1 rank 1
starts the sum for K0 with its own part and sends it to rank 2, which adds its part at step 2 and sends it to rank 0:
home after P − 1 = 2 hops. Rank 0 adds its own part, which never travelled. One message each way is under way at a
time.

If a rank fails on the way (no memory for a block, say), the others would wait for it for ever. So it goes on passing,
without computing: keys stay right, and sums that pass through it become NaN, because its part is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications import finish, start_shift

logger = logging.getLogger(__name__)


class RingPipeline:
    """One trip round the ring: call `next_block` P times, and after each but the first, `send_grads`.

    Used in a `with`, which passes on after an exception. All memory is taken before the first message, so that there
    is enough for that. Messages between two ranks are posted in one order on both, as NCCL needs it.

    Args:
        own: this rank's block, flat.
        sizes: every rank's number of elements of its block.
        grad_sizes: every rank's number of elements of its block's gradients, if they are to come back.
        grad_dtype: what these are added up in.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        own: Tensor,
        sizes: Sequence[int],
        grad_sizes: Sequence[int] | None = None,
        grad_dtype: torch.dtype | None = None,
    ):
        self._group, self._own = group, own
        self._num_ranks, self._rank = group.size(), group.rank()
        self._sizes, self._grad_sizes = sizes, grad_sizes
        # One of two is computed with and sent on, while the other one is received into.
        self._blocks = [own.new_empty(max(sizes)) for _ in range(min(2, self._num_ranks - 1))]
        self._grads: list[Tensor] = []
        if grad_sizes is not None:
            # Two as well: one is added to and sent on, while the other one is received into.
            self._grads = [own.new_empty(max(grad_sizes), dtype=grad_dtype) for _ in range(2)]
        self._step, self._num_sent = -1, 0
        self._blocks_under_way: list[dist.Work] = []
        self._grads_under_way: list[dist.Work] = []
        self._is_broken = False

    def __enter__(self) -> RingPipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Where the communication itself has failed, there is nothing to pass on with.
        if kind is not None and not self._is_broken:
            self._pass_on()

    @property
    def owner(self) -> int:
        """The rank whose block is here."""
        return self._owner_at(self._step)

    def next_block(self) -> Tensor:
        """The next block, flat; the one after it is then under way."""
        # The block before is not needed any more: its buffer may be received into.
        self._wait(self._blocks_under_way)
        self._step += 1
        current = self._block_at(self._step)
        if self._step < self._num_ranks - 1:
            self._blocks_under_way = self._start(current, self._block_at(self._step + 1))
        return current

    def send_grads(self, add: Callable[[Tensor, bool], Any]) -> None:
        """Sends on the gradients of the current block, flat, after `add(grads, is_new)` put this rank's part in.

        A new buffer holds nothing yet: `add` must fill it. It gets the gradients as [N], where N is the
        owner's of `grad_sizes`.
        """
        # Blocks and gradients take turns on every rank, so that both ends of a link post messages in one order.
        assert self._step == self._num_sent + 1
        # That message brought the sum which is added to now, and has freed the buffer that is received into next.
        self._wait(self._grads_under_way)
        # What came from the rank before, or at step 1 a buffer that holds nothing.
        grads = self._grads_at(self._step)
        add(grads, self._step == 1)
        # From the rank before come those of the next step's block, and at the last step those of this rank's own.
        self._grads_under_way = self._start(grads, self._grads_at(self._step + 1))
        self._num_sent += 1

    def receive_grads(self) -> Tensor:
        """All other ranks' gradients of this rank's own block, flat."""
        assert self._num_sent == self._num_ranks - 1
        self._wait(self._grads_under_way)
        return self._grads_at(self._num_ranks)

    def _owner_at(self, step: int) -> int:
        return (self._rank - step) % self._num_ranks  # rank 0 at step 1 has the block of rank 2, of 3

    def _block_at(self, step: int) -> Tensor:
        # Odd steps have the first buffer and even steps the last one (index −1), which P = 2 never
        # reaches. Buffers fit the largest block, and a smaller block is the front of one.
        return self._own if step == 0 else self._blocks[step % 2 - 1][: self._sizes[self._owner_at(step)]]

    def _grads_at(self, step: int) -> Tensor:
        assert self._grad_sizes is not None
        return self._grads[step % 2][: self._grad_sizes[self._owner_at(step)]]

    def _pass_on(self) -> None:
        logger.error("rank %d of the ring failed: it passes on what the others wait for", self._rank)
        # The same messages in the same order as without the failure, or the others would take one for another.
        try:
            # A block's gradients go before the next block, as they do in a step that works.
            while True:
                if self._grad_sizes is not None and self._step > self._num_sent:
                    self.send_grads(lambda grads, _is_new: grads.fill_(float("nan")))
                elif self._step < self._num_ranks - 1:
                    self.next_block()
                else:
                    break
            self._wait(self._blocks_under_way)
            self._wait(self._grads_under_way)
        except RuntimeError as error:  # the caller hears of what failed first
            logger.error("rank %d of the ring could not: %s", self._rank, error)

    def _start(self, sent: Tensor, received: Tensor) -> list[dist.Work]:
        """Starts to send [N] to the next rank and to receive [M] from the one before; both are flat."""
        try:
            return start_shift(sent, received, self._group, operation="ring attention")
        except Exception:
            self._is_broken = True  # nothing more can be passed on
            raise

    def _wait(self, works: list[dist.Work]) -> None:
        try:
            finish(works, self._group, self._own.device, operation="ring attention")
        except Exception:
            self._is_broken = True  # a neighbour is gone
            raise
