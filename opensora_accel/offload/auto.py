"""offload="auto": which pass is measured, and for how long its decision holds."""

from __future__ import annotations

import logging
import math
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from opensora_accel.offload.choose import Decision, Memory, choose
from opensora_accel.offload.manager import ActivationManager
from opensora_accel.offload.measure import Measurement
from opensora_accel.offload.queues import Queue

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.9
"""Of the device, that may be filled where no target is set: the rest is for fragments and other libraries."""
_PATIENCE_PASSES = 8
"""So long is waited for an optimizer step, which a loop may do by hand, and for a measured pass to reach its end."""
_SIZES_PER_DOUBLING = 8


class AutoOffload:
    """Decides for one list of blocks: everything moves until a pass has been measured, then what was chosen.

    A pass is a forward over the blocks with its backward. The measured one is the first after an optimizer step, since
    optimizers take their memory in their first. Decided anew for every size of the first block's tensors (sizes
    within 9 % share a decision), and once more where the peak has grown past the target since.

    On CUDA, measuring resets the device's peak statistics, once a decision.
    """

    def __init__(self, manager: ActivationManager, num_blocks: int, keep_last: int):
        self._manager, self._num_blocks, self._keep_last = manager, num_blocks, keep_last
        self._most = max(0, num_blocks - keep_last)
        self._decided: dict[int, Decision] = {}
        self._seen: set[int] = set()
        self._again: set[int] = set()
        """Sizes that were decided a second time."""
        self._num_passes = self._first_pass_measured = 0
        self._last_index, self._size = num_blocks, 0
        self._measured: Measurement | None = None
        self._measured_size = 0
        self._moved = self._most
        self._optimizer = _FirstStep()
        self.measurement: Measurement | None = None
        """Of the pass whose forward is running, when it is the one to be measured."""

    def moves(self, index: int, size_bytes: int, device: torch.device) -> bool:
        """Whether block `index` moves now; called once before each block's forward."""
        if index <= self._last_index and self._most:
            self._begin_pass(size_bytes, device)
        self._last_index = index
        if self.measurement is not None:
            self.measurement.next_index = index
        return index < self._moved

    def _begin_pass(self, size_bytes: int, device: torch.device) -> None:
        # A pass that begins before the measured one is through (1F1B) is no part of it.
        self.measurement = None
        self._finish_measuring()
        self._check_growth(device)
        self._num_passes += 1
        self._size = round(_SIZES_PER_DOUBLING * math.log2(max(1, size_bytes)))
        decision = self._decided.get(self._size)
        self._moved = self._most if decision is None else decision.moved
        warm = self._optimizer.is_done or self._num_passes > _PATIENCE_PASSES
        # The first pass of a size is no measure: kernels are chosen, memory is taken and page-locked.
        is_new = self._size not in self._seen
        self._seen.add(self._size)
        if decision is None and self._measured is None and warm and not is_new:
            queues = self._manager.queues(device)
            queues.reset_peak()
            self.measurement = self._measured = Measurement(queues)
            self._measured_size, self._first_pass_measured = self._size, self._num_passes

    def _finish_measuring(self) -> None:
        measured = self._measured
        if measured is None:
            return
        if measured.is_complete():
            decision = self._decide(measured)
            self._decided[self._measured_size] = decision
            self._measured = None
            if decision.moved == 0:
                self._manager.trim()
        elif self._num_passes - self._first_pass_measured >= _PATIENCE_PASSES:
            logger.info(
                'offload="auto": a pass did not reach its end and could not be measured; trying another'
            )
            self._measured = None

    def _check_growth(self, device: torch.device) -> None:
        """Whether the pass before took more than its decision aimed at: something else has grown."""
        decision = self._decided.get(self._size)
        if decision is None or decision.target_bytes is None or self._size in self._again:
            return
        peak_bytes = self._manager.queues(device).peak_bytes()
        if decision.moved < self._most and peak_bytes is not None and peak_bytes > decision.target_bytes:
            self._again.add(self._size)
            del self._decided[self._size]

    def _decide(self, measured: Measurement) -> Decision:
        decision = choose(
            measured.costs(self._num_blocks),
            keep_last=self._keep_last,
            out_bytes_per_s=measured.bandwidth_bytes_per_s(Queue.OUT),
            in_bytes_per_s=measured.bandwidth_bytes_per_s(Queue.IN),
            overlaps=measured.queues.overlaps,
            memory=self._memory(measured),
        )
        self._manager.decisions.append(decision)
        logger.info("offload: %s", decision.reason)
        return decision

    def _memory(self, measured: Measurement) -> Memory | None:
        target, total = self._manager.memory_target_bytes, measured.queues.total_bytes()
        if target is None and total is not None:
            target = int(MEMORY_SHARE * total)
        if measured.peak_bytes is None or target is None:
            return None
        return Memory(measured.peak_bytes, target)


class _FirstStep:
    """Notices the first step of any optimizer after it was made."""

    def __init__(self) -> None:
        done: list[bool] = []

        def stepped(*_: Any) -> None:
            done.append(True)

        self._done = done
        # Not removed by the hook itself: torch goes through all hooks while it runs.
        self._remove = weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    @property
    def is_done(self) -> bool:
        if self._done:
            self._remove()
        return bool(self._done)
