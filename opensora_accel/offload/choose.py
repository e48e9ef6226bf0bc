"""How many blocks to move: as few as the memory needs, and not more than the link carries while blocks compute.

One pass is measured in which all blocks move that may. Three such blocks of 1 GiB, each with 1 s of forward and 3 s of
backward, over a link that takes 1.5 s for a GiB: a copy out is 0.5 s longer than the forward beside it, a copy in hides
behind the backward of the block after it. So moving the first 0, 1, 2, 3 blocks waits 0, 0.5, 1, 1.5 s. If the peak
was 40 GiB, moving fewer makes it 43, 42, 41, 40 GiB. With 42 GiB to fill, one block moves and 0.5 s is the price.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from opensora_accel.offload.device import Queue, Queues

# What waiting for copies may cost, as a share of a pass, before blocks stay on the device for it.
ALLOWED_STALL = 0.02

# ---- measuring a pass

# What comes of a block in a step. It loads before compute waits for its inputs; when they are back, recomputation
# and backward begin.
Moment = Literal["forward", "forward end", "load", "backward"]


@dataclass(frozen=True)
class BlockCost:
    """What one block needs: bytes to move, seconds that a copy may hide behind."""

    size_bytes: int
    forward_s: float
    backward_s: float


@dataclass(eq=False)
class Measurement:
    """One forward and backward pass. The engine notes what happens; it is read when backward has ended."""

    queues: Queues
    next_block: int = 0  # the one that is about to be called
    marks: list[tuple[Moment, int, Any]] = field(default_factory=list)  # with the block, on the compute queue
    copies: list[tuple[Queue, int, Any, Any]] = field(default_factory=list)  # bytes, marks before and after
    moved_bytes: Counter[int] = field(default_factory=Counter)  # by block
    peak_bytes: int | None = None  # of the device

    def note(self, moment: Moment, block: int) -> None:
        """Marks a moment of a block on the compute queue, before it waits for copies or after."""
        if moment == "backward":
            # Within the pass: a training loop may reset the statistics at the end of a step.
            peak_bytes = self.queues.peak_bytes()
            self.peak_bytes = self.peak_bytes if peak_bytes is None else max(peak_bytes, self.peak_bytes or 0)
        self.marks.append((moment, block, self.queues.mark(Queue.COMPUTE)))

    @contextlib.contextmanager
    def copying(self, queue: Queue, size_bytes: int) -> Iterator[None]:
        start = self.queues.mark(queue)
        yield
        self.copies.append((queue, size_bytes, start, self.queues.mark(queue)))

    def is_complete(self) -> bool:
        """Whether backward has reached every block of the forward."""
        called = {block for moment, block, _ in self.marks if moment == "forward"}
        return bool(called) and called == {block for moment, block, _ in self.marks if moment == "backward"}

    def costs(self, num_blocks: int) -> list[BlockCost]:
        """One for each block in forward order; one that was skipped costs nothing. The host waits for the queues."""
        seconds, begun = self.queues.seconds, dict[int, Any]()
        forward, backward, computing = dict[int, float](), dict[int, float](), -1
        for moment, block, mark in self.marks:
            if moment == "forward end":
                forward[block] = seconds(begun[block], mark)
                continue
            if computing not in (-1, block):  # the next block loads, so that this one's backward has ended
                backward[computing], computing = seconds(begun[computing], mark), -1
            if moment != "load":
                begun[block] = mark
            if moment == "backward":
                computing = block
        # Behind the block that backward reaches last nobody looks.
        mean = sum(backward.values()) / max(1, len(backward))
        costs = [BlockCost(0, 0.0, 0.0)] * num_blocks
        for block, forward_s in forward.items():
            costs[block] = BlockCost(self.moved_bytes[block], forward_s, backward.get(block, mean))
        return costs

    def bandwidth_bytes_per_s(self, queue: Queue) -> float | None:
        """Bytes per second of copying in one direction; None when nothing was copied."""
        copies = [copy[1:] for copy in self.copies if copy[0] is queue]
        elapsed_s = sum(self.queues.seconds(start, end) for _, start, end in copies)
        return sum(size_bytes for size_bytes, _, _ in copies) / elapsed_s if elapsed_s > 0 else None


# ---- the decision

LimitedBy = Literal["memory", "deadline", "all blocks", "nothing to gain"]


@dataclass(frozen=True)
class Decision:
    """How many blocks wait in host memory, and why. Bytes and seconds are one rank's, of one pass."""

    moved: int  # the first so many blocks
    num_blocks: int
    limited_by: LimitedBy
    reason: str
    moved_bytes: int
    stall_s: float  # expected wait for copies
    pass_s: float  # measured forward and backward of all blocks
    out_bytes_per_s: float | None
    in_bytes_per_s: float | None
    peak_bytes: int | None = None  # expected on the device
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
    peak_bytes: int | None = None,
    target_bytes: int | None = None,
) -> Decision:
    """The number of blocks to move, from one measured pass in which all but the last `keep_last` were moved.

    Args:
        costs: one per block, in forward order; those that were not moved have no size.
        keep_last: blocks at the end that never leave.
        overlaps: whether copies run beside compute on this device.
        peak_bytes, target_bytes: of that pass, and what may be filled. Where one is unknown, as many blocks are moved
            as hide.
    """
    most = max(0, len(costs) - keep_last)
    stalls = [0.0]  # when the first 0, 1, ... `most` blocks move
    for cost, after in zip(costs[:most], [*costs[1:], BlockCost(0, 0.0, 0.0)], strict=False):
        out_s = cost.size_bytes / out_bytes_per_s if out_bytes_per_s else 0.0
        in_s = cost.size_bytes / in_bytes_per_s if in_bytes_per_s else 0.0
        stalls.append(stalls[-1] + max(0.0, out_s - cost.forward_s) + max(0.0, in_s - after.backward_s))
    pass_s = sum(cost.forward_s + cost.backward_s for cost in costs)
    # As many blocks as move without waiting for more than is allowed; more blocks never wait for less.
    hidden = max(m for m in range(most + 1) if stalls[m] <= ALLOWED_STALL * pass_s)

    peaks: list[int] = []
    if peak_bytes is not None and target_bytes is not None:
        # All that may move did in the measured pass: what stays comes on top of its peak.
        peaks = [peak_bytes + sum(cost.size_bytes for cost in costs[m:most]) for m in range(most + 1)]
    target = target_bytes or 0
    moved, limited_by = most, "all blocks"  # type: int, LimitedBy
    if not overlaps:
        moved, limited_by = 0, "nothing to gain"
        reason = (
            "copies do not run beside compute on this device, and on a CPU they free nothing; "
            'a number instead of "auto" moves them all the same'
        )
    elif not peaks and hidden == most:
        reason = f"all that may leave, and waiting costs {_ms(stalls[most])} a pass"
    elif not peaks:
        moved, limited_by = hidden, "deadline"
        reason = f"moving one more would wait {_ms(stalls[hidden + 1])} a pass for copies"
    elif peaks[most] > target:
        limited_by, short = "memory", peaks[most] - target
        reason = f"all that may leave, and still {_gib(short)} above the {_gib(target)} aimed at"
    else:
        moved = next(m for m in range(most + 1) if peaks[m] <= target)
        limited_by = "memory" if moved else "nothing to gain"
        reason = f"the peak is then {_gib(peaks[moved])} of the {_gib(target)} aimed at"
        if moved == 0:
            reason = f"everything fits; {reason}"
        elif moved > hidden:
            reason += f"; {moved - hidden} more than hide, which waits {_ms(stalls[moved])} a pass"
        else:
            reason += f"; waiting costs {_ms(stalls[moved])} a pass"
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
        peak_bytes=peaks[moved] if peaks else None,
        target_bytes=target_bytes if peaks else None,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
