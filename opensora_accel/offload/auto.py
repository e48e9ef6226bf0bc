"""How many blocks to move: as few as the memory needs, and not more than the link carries while blocks compute."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from opensora_accel.offload.measure import BlockCost, Measurement
from opensora_accel.offload.queues import Queue

if TYPE_CHECKING:
    from opensora_accel.offload.manager import ActivationManager

logger = logging.getLogger(__name__)

ALLOWED_STALL = 0.02
"""Of a pass: what waiting for copies may cost before blocks stay on the device for it."""
MEMORY_SHARE = 0.9
"""Of the device, that may be filled where no target is set: the rest is for fragments and other libraries."""
_WARM_UP_PASSES = 1
"""Not measured: kernels are chosen, memory is taken from the driver and page-locked."""
_PATIENCE_PASSES = 8
"""After so many, a measured one that has not come to its end was given up by its training loop."""

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
        return decide(0, "nothing to gain", "this device computes in host memory, so moving frees nothing")
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

    Decided anew for every size of the first block's tensors: another clip length is another problem.
    """

    def __init__(self, manager: ActivationManager, num_blocks: int, keep_last: int):
        self._manager, self._num_blocks, self._keep_last = manager, num_blocks, keep_last
        self._most = max(0, num_blocks - keep_last)
        self._decided: dict[int, Decision] = {}
        self._passes: dict[int, int] = {}
        self._measured: Measurement | None = None
        self._measured_size = 0
        self._moved = self._most
        self.measurement: Measurement | None = None
        """Of the pass whose forward is running, when it is the one to be measured."""

    def moves(self, index: int, size_bytes: int, device: torch.device) -> bool:
        """Whether block `index` moves now; called once before each block's forward."""
        if index == 0:
            self._begin_pass(size_bytes, device)
        return index < self._moved

    def _begin_pass(self, size_bytes: int, device: torch.device) -> None:
        # A pass that begins before the measured one is through (1F1B) is no part of it.
        self.measurement = None
        self._finish_measuring()
        done = self._passes.get(size_bytes, 0)
        self._passes[size_bytes] = done + 1
        decision = self._decided.get(size_bytes)
        self._moved = self._most if decision is None else decision.moved
        if decision is None and self._measured is None and done >= _WARM_UP_PASSES and self._most:
            self.measurement = self._measured = Measurement(self._manager.queues(device))
            self._measured_size = size_bytes

    def _finish_measuring(self) -> None:
        measured, size_bytes = self._measured, self._measured_size
        if measured is None:
            return
        if measured.is_complete(self._num_blocks):
            self._decided[size_bytes] = self._decide(measured)
        elif self._passes[size_bytes] < _PATIENCE_PASSES:
            return
        else:
            self._passes[size_bytes] = 0
        self._measured = None

    def _decide(self, measured: Measurement) -> Decision:
        queues = measured.queues
        decision = choose(
            measured.costs(),
            keep_last=self._keep_last,
            out_bytes_per_s=measured.bandwidth_bytes_per_s(Queue.OUT),
            in_bytes_per_s=measured.bandwidth_bytes_per_s(Queue.IN),
            overlaps=queues.overlaps,
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


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
