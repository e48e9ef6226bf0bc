"""How many blocks to move: as few as the memory needs, and not more than the link carries while blocks compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opensora_accel.offload.measure import BlockCost

ALLOWED_STALL = 0.02
"""Of a pass: what waiting for copies may cost before blocks stay on the device for it."""
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


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
