"""What PyTorch's caching allocator takes from a GPU for the storages of a step: more than they hold.

It asks the driver for segments, hands out parts of them, and keeps them when the parts come back. What is asked for
while no free part is large enough takes a new segment, though as many bytes may be free in smaller parts:

    take 100 MiB, 100 MiB       two segments of 100 MiB                      200 MiB live, 200 MiB reserved
    give both back              both segments stay, each with its free part    0 MiB live, 200 MiB reserved
    take 150 MiB                fits neither: a third segment                150 MiB live, 350 MiB reserved

Its rules, of c10/cuda/CUDACachingAllocator.cpp in torch 2.13 with its default settings: sizes are rounded up to 512
bytes; up to 1 MiB comes from segments of 2 MiB; less than 10 MiB from segments of 20 MiB, and more from one of its own
size, rounded up to 2 MiB. Of the free parts that are large enough the smallest is taken, and split where more than
1 MiB (of the small ones 512 bytes) is left over. Free neighbours merge. Each stream has parts of its own. Where the
driver has no more, whole segments that are free go back to it first.

With `expandable_segments:True` hardly more is reserved than is live.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

_ROUND, _MIB = 512, 2**20
# Up to so much a storage is small, and comes from a segment of its kind's size.
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB
_MIDDLE, _MIDDLE_SEGMENT = 10 * _MIB, 20 * _MIB
_SEGMENT_ROUND = 2 * _MIB


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, and its neighbours there."""

    size_bytes: int
    # Where it lies: of free parts of the same size the first one is taken.
    address: int
    pool: tuple[bool, str]
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False


class CachingAllocator:
    """Reserved bytes by torch's rules, without a device.

    Args:
        limit_bytes: what the driver has; it gives more all the same, so that how much is missing can be told.
    """

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self.limit_bytes = limit_bytes
        self.live_bytes = self.most_live_bytes = 0
        self.reserved_bytes = self.most_reserved_bytes = 0
        # By pool, free parts in the order in which they are looked through.
        self._free = defaultdict[tuple[bool, str], list[tuple[int, int, Block]]](list)
        self._next_address = 0

    @property
    def lost_bytes(self) -> int:
        """What was reserved at most, beyond the most that was live."""
        return self.most_reserved_bytes - self.most_live_bytes

    def take(self, size_bytes: int, stream: str = "") -> Block:
        """A part for a storage of so many bytes, more than none."""
        size_bytes = -(-size_bytes // _ROUND) * _ROUND
        is_small = size_bytes <= _SMALL
        pool = is_small, stream
        free = self._free[pool]
        index = bisect_left(free, (size_bytes, -1))
        block = free.pop(index)[2] if index < len(free) else self._segment(size_bytes, pool)
        block.is_free = False
        left = block.size_bytes - size_bytes
        if left >= _ROUND if is_small else left > _SMALL:
            rest = Block(left, block.address + size_bytes, pool, block, block.after, is_free=True)
            if block.after is not None:
                block.after.before = rest
            block.size_bytes, block.after = size_bytes, rest
            insort(free, (rest.size_bytes, rest.address, rest))
        self.live_bytes += block.size_bytes
        self.most_live_bytes = max(self.most_live_bytes, self.live_bytes)
        return block

    def give_back(self, block: Block) -> None:
        """The storage of a part is freed."""
        self.live_bytes -= block.size_bytes
        free = self._free[block.pool]
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                free.pop(bisect_left(free, (other.size_bytes, other.address)))
                first, second = (other, block) if other is block.before else (block, other)
                first.size_bytes += second.size_bytes
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        block.is_free = True
        insort(free, (block.size_bytes, block.address, block))

    def _segment(self, size_bytes: int, pool: tuple[bool, str]) -> Block:
        if size_bytes <= _SMALL:
            size_bytes = _SMALL_SEGMENT
        elif size_bytes < _MIDDLE:
            size_bytes = _MIDDLE_SEGMENT
        else:
            size_bytes = -(-size_bytes // _SEGMENT_ROUND) * _SEGMENT_ROUND
        if self.reserved_bytes + size_bytes > self.limit_bytes:
            self._release()
        self.reserved_bytes += size_bytes
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        block = Block(size_bytes, self._next_address, pool)
        self._next_address += size_bytes
        return block

    def _release(self) -> None:
        """Gives whole segments that are free back to the driver."""
        for parts in self._free.values():
            split = [part for part in parts if part[2].before is not None or part[2].after is not None]
            self.reserved_bytes -= sum(part[0] for part in parts) - sum(part[0] for part in split)
            parts[:] = split


class Event(NamedTuple):
    """A storage is made, or freed."""

    storage: int
    # Below 0: freed.
    size_bytes: int
    stream: str = "compute"
    phase: str = ""


@dataclass
class StepMemory:
    """What is made and freed on the device, in order."""

    # Before the first step, and by the optimizer in it.
    held: list[Event] = field(default_factory=list)
    made_by_optimizer: list[Event] = field(default_factory=list)
    # By each step, the first one too.
    steps: list[Event] = field(default_factory=list)

    def replayed(
        self, limit_bytes: float = math.inf, state_ratio: float = 1.0, num_steps: int = 2
    ) -> CachingAllocator:
        """The allocator after some steps.

        The optimizer makes its state when the first step has left its fragments, and the second one runs around it.

        Args:
            limit_bytes: what there is of the device.
            state_ratio: bytes of the optimizer's state, of those that are told here.
        """
        replay = _Replay(limit_bytes)
        for event in self.held:
            replay.run(event)
        begin = next((i for i, event in enumerate(self.steps) if event.phase == "optimizer"), len(self.steps))
        for number in range(num_steps):
            for event in self.steps[:begin]:
                replay.run(event)
            for event in self.made_by_optimizer if number == 0 else ():
                replay.run(event._replace(size_bytes=max(1, round(event.size_bytes * state_ratio))))
            for event in self.steps[begin:]:
                replay.run(event)
        return replay.allocator


class _Replay:
    """Storages by what they are freed as: by their number or, where a copy of a block made it, by their size."""

    def __init__(self, limit_bytes: float) -> None:
        self.allocator = CachingAllocator(limit_bytes)
        self._made = defaultdict[int, list[Block]](list)
        self._sizes = defaultdict[int, list[int]](list)

    def run(self, event: Event) -> None:
        size_bytes = abs(event.size_bytes)
        if event.size_bytes > 0:
            self._made[event.storage].append(self.allocator.take(size_bytes, event.stream))
            self._sizes[size_bytes].append(event.storage)
            return
        # What block 1 has made block 2 frees. A copy of block 2 frees what the one before it has made.
        storage = event.storage
        while not self._made[storage] and self._sizes[size_bytes]:
            storage = self._sizes[size_bytes].pop()
        if self._made[storage]:
            self.allocator.give_back(self._made[storage].pop())
