"""Which blocks move: a fixed share of them, from the first, or what a measured pass asks for (`offload="auto"`).

With "auto", a pass is a forward over the blocks with its backward. Six passes, with the first optimizer step after pass
1, and longer clips from pass 4 on:

    pass       0     1     2      3           4     5
    moves      all   all   all    as chosen   all   all
    measured   no    no    yes    no          no    yes

The first pass of a size is no measure: kernels are chosen then, memory is taken and page-locked. Nor is any before the
first optimizer step, in which optimizers take their memory. A size is that of the first block's tensors; sizes within
9 % share a decision. It is taken once more where the peak has grown past the target since.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from opensora_accel.offload.choose import Decision, Measurement, choose
from opensora_accel.offload.device import Queue
from opensora_accel.offload.engine import OffloadEngine

logger = logging.getLogger(__name__)

# What of the device may be filled where no target is set: the rest is for fragments and other libraries.
MEMORY_SHARE = 0.9
# How long to wait for an optimizer step, which a loop may do by hand, and for a measured pass to reach its end.
_PATIENCE_PASSES = 8
_SIZES_PER_DOUBLING = 8


def num_blocks_to_move(offload: float | Literal["auto"], num_blocks: int, keep_last: int) -> int:
    """How many blocks may move, from the first: the share of them, but never the last `keep_last`."""
    share = 1.0 if offload == "auto" else float(offload)
    return min(round(share * num_blocks), max(0, num_blocks - keep_last))


@dataclass
class _Size:
    """What is known of one size of the first block's tensors."""

    num_passes: int = 0
    num_decisions: int = 0
    decision: Decision | None = None


class OffloadShare:
    """Says for each block of a list whether it moves now. "auto" resets CUDA's peak statistics once a decision."""

    def __init__(
        self, engine: OffloadEngine, offload: float | Literal["auto"], num_blocks: int, keep_last: int
    ):
        # The one of the pass whose forward is running, when that is measured.
        self.measurement: Measurement | None = None
        self.engine, self._num_blocks, self._keep_last = engine, num_blocks, keep_last
        self._is_auto = offload == "auto"
        self._most = self._num_moved = num_blocks_to_move(offload, num_blocks, keep_last)
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)
        self._size = _Size()
        self._last_index, self._num_passes = num_blocks, 0
        self._measured: tuple[Measurement, _Size, int] | None = None  # with the number of its pass
        self._has_stepped = has_stepped = threading.Event()
        if self._is_auto:
            hook = register_optimizer_step_post_hook(lambda *_: has_stepped.set())
            weakref.finalize(self, hook.remove)

    def moves(self, index: int, marked: Sequence[Tensor]) -> bool:
        """Whether block `index` moves its `marked` tensors; called once before each block's forward."""
        if self._is_auto and self.engine.is_open():
            # Blocks run in order: an index that does not rise begins another forward.
            if index <= self._last_index:
                self._begin_pass(marked)
            self._last_index = index
            if self.measurement is not None:
                self.measurement.next_block = index
        return index < self._num_moved

    def _begin_pass(self, marked: Sequence[Tensor]) -> None:
        queues = self.engine.queues(marked[0].device if marked else torch.device("cpu"))
        # A pass that begins before the measured one is through (1F1B) is no part of it.
        self.measurement = None
        self._finish_measuring()
        # The pass before may have taken more than its decision aimed at, because something else has grown. Decided
        # once more it stands, as a target that cannot be met would otherwise be chased for ever.
        before = self._size
        if (
            before.decision is not None
            and before.decision.target_bytes is not None
            and before.num_decisions == 1
        ):
            peak_bytes = queues.peak_bytes()
            is_over = peak_bytes is not None and peak_bytes > before.decision.target_bytes
            if is_over and before.decision.moved < self._most:
                before.decision = None
        self._num_passes += 1
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in marked)
        self._size = size = self._sizes[round(_SIZES_PER_DOUBLING * math.log2(max(1, size_bytes)))]
        self._num_moved = self._most if size.decision is None else size.decision.moved
        is_warm = size.num_passes > 0 and (self._has_stepped.is_set() or self._num_passes > _PATIENCE_PASSES)
        size.num_passes += 1
        if is_warm and size.decision is None and self._measured is None:
            queues.reset_peak()
            self.measurement = Measurement(queues)
            self._measured = self.measurement, size, self._num_passes

    def _finish_measuring(self) -> None:
        if self._measured is None:
            return
        measured, size, number = self._measured
        if not measured.is_complete():
            if self._num_passes - number >= _PATIENCE_PASSES:
                logger.info(
                    'offload="auto": a pass did not reach its end and could not be measured; trying another'
                )
                self._measured = None
            return
        target_bytes, total_bytes = self.engine.memory_target_bytes, measured.queues.total_bytes()
        if target_bytes is None and total_bytes is not None:
            target_bytes = int(MEMORY_SHARE * total_bytes)
        decision = choose(
            measured.costs(self._num_blocks),
            keep_last=self._keep_last,
            out_bytes_per_s=measured.bandwidth_bytes_per_s(Queue.OUT),
            in_bytes_per_s=measured.bandwidth_bytes_per_s(Queue.IN),
            overlaps=measured.queues.overlaps,
            peak_bytes=measured.peak_bytes,
            target_bytes=target_bytes,
        )
        logger.info("offload: %s", decision.reason)
        self.engine.decisions.append(decision)
        self._measured, size.decision = None, decision
        size.num_decisions += 1
        if decision.moved == 0:
            self.engine.trim()
