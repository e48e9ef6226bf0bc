"""How many blocks to move: as few as the memory needs, and not more than the link carries while blocks compute."""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from opensora_accel.offload.measure import BlockCost, Measurement
from opensora_accel.offload.queues import Queue

if TYPE_CHECKING:
    from opensora_accel.offload.manager import ActivationManager

logger = logging.getLogger(__name__)

ALLOWED_STALL = 0.02
"""Of a pass: what waiting for copies may cost before blocks stay on the device for it."""
MEMORY_SHARE = 0.9
"""Of the device, that may be filled where no target is set: the rest is for fragments and other libraries."""
_PATIENCE_PASSES = 8
"""So long is waited for an optimizer step, which a loop may do by hand, and for a measured pass to reach its end."""
_SIZES_PER_DOUBLING = 8

LimitedBy = Literal["memory", "deadline", "all blocks", "nothing to gain"]


@dataclass(frozen=True)
class Memory:
    """Of one device: the most that was used, and the most that may be."""

    peak_bytes: int
    target_bytes: int


@dataclass(frozen=True)
class Decision:
    """How many blocks wait in host memory, and why. Bytes and seconds are one rank's, of one pass."""

    moved: int
    """The first so many blocks."""
    num_blocks: int
    limited_by: LimitedBy
    reason: str
    moved_bytes: int
    stall_s: float
    """Expected wait for copies."""
    pass_s: float
    """Measured forward and backward of all blocks."""
    out_bytes_per_s: float | None
    in_bytes_per_s: float | None
    peak_bytes: int | None = None
    """Expected on the device."""
    target_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def choose(
    costs: Sequence[BlockCost],
    *,
    keep_last: int,
    out_bytes_per_s: float | None,
    in_bytes_per_s: float | None,
    overlaps: bool = True,
    memory: Memory | None = None,
) -> Decision:
    """The number of blocks to move, from one measured pass in which all but the last `keep_last` were moved.

    Args:
        costs: one per block, in forward order; those that were not moved have no size.
        keep_last: blocks at the end that never leave.
        overlaps: whether copies run beside compute on this device.
        memory: peak of that pass, and the target; None where the device tells neither: then as many are moved as
            hide.
    """
    most = max(0, len(costs) - keep_last)
    stalls = _stalls(costs, most, out_bytes_per_s, in_bytes_per_s)
    pass_s = sum(cost.forward_s + cost.backward_s for cost in costs)
    hidden = max(m for m in range(most + 1) if stalls[m] <= ALLOWED_STALL * pass_s)

    def peak(moved: int) -> int | None:
        if memory is None:
            return None
        return memory.peak_bytes + sum(cost.size_bytes for cost in costs[moved:most])

    def decide(moved: int, limited_by: LimitedBy, reason: str) -> Decision:
        return Decision(
            moved=moved,
            num_blocks=len(costs),
            limited_by=limited_by,
            reason=f"{moved} of {len(costs)} blocks wait in host memory: {reason}",
            moved_bytes=sum(cost.size_bytes for cost in costs[:moved]),
            stall_s=stalls[moved],
            pass_s=pass_s,
            out_bytes_per_s=out_bytes_per_s,
            in_bytes_per_s=in_bytes_per_s,
            peak_bytes=peak(moved),
            target_bytes=None if memory is None else memory.target_bytes,
        )

    if not overlaps:
        reason = (
            "copies do not run beside compute on this device, and on a CPU they free nothing; "
            'a number instead of "auto" moves them all the same'
        )
        return decide(0, "nothing to gain", reason)
    if memory is None:
        if hidden == most:
            return decide(
                most, "all blocks", f"all that may leave, and waiting costs {_ms(stalls[most])} a pass"
            )
        return decide(
            hidden, "deadline", f"moving one more would wait {_ms(stalls[hidden + 1])} a pass for copies"
        )
    fitting = [m for m in range(most + 1) if (peak(m) or 0) <= memory.target_bytes]
    if not fitting:
        short = (peak(most) or 0) - memory.target_bytes
        reason = f"all that may leave, and still {_gib(short)} above the {_gib(memory.target_bytes)} aimed at"
        return decide(most, "memory", reason)
    needed = fitting[0]
    fits = f"the peak is then {_gib(peak(needed) or 0)} of the {_gib(memory.target_bytes)} aimed at"
    if needed == 0:
        return decide(0, "nothing to gain", f"everything fits; {fits}")
    if needed > hidden:
        reason = f"{fits}; {needed - hidden} more than hide, which waits {_ms(stalls[needed])} a pass"
        return decide(needed, "memory", reason)
    return decide(needed, "memory", f"{fits}; waiting costs {_ms(stalls[needed])} a pass")


def _stalls(
    costs: Sequence[BlockCost], most: int, out_bytes_per_s: float | None, in_bytes_per_s: float | None
) -> list[float]:
    """Seconds of waiting when the first 0, 1, ... `most` blocks move.

    A copy out has its own block's forward to hide behind, a copy in the backward of the block after it.
    """
    total = [0.0]
    for index in range(most):
        cost, after = costs[index], costs[index + 1] if index + 1 < len(costs) else None
        out_s = cost.size_bytes / out_bytes_per_s if out_bytes_per_s else 0.0
        in_s = cost.size_bytes / in_bytes_per_s if in_bytes_per_s else 0.0
        behind = after.backward_s if after is not None else 0.0
        total.append(total[-1] + max(0.0, out_s - cost.forward_s) + max(0.0, in_s - behind))
    return total


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


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
