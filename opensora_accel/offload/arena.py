"""Host memory by the byte: as much as was asked for, handed out and taken back in any order.

An arena that grows, up to 300 bytes. A takes 128, B takes 64, A goes, C takes 64, B and C go, D takes 256:

    A               slab 1: [A A]
    A, B            slab 1: [A A]   slab 2: [B]
    B, C            slab 1: [C .]   slab 2: [B]     C fits where A was: nothing is added
    D               slab 3: [D D D D]               256 + 192 would be over the limit: the empty slabs go first

The system maps whole pages, so behind every slab up to a page less a byte lies unused. Limits and sizes do not count
that: a slab is a block's input, of some hundred MiB for a long video, and a page is 4 KiB.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial

from torch import Tensor

from opensora_accel.offload.host_memory import allocate_on_host

logger = logging.getLogger(__name__)

# Entries start at multiples of this, so that every dtype can view them and copies are aligned.
ALIGNMENT_BYTES = 64

# uint8 [size_bytes], and the function that gives it back.
Allocation = tuple[Tensor, Callable[[], None]]


def aligned(size_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """Bytes of host memory, page-locked where there is a GPU.

    A fixed arena has exactly `size_bytes`. A growing one (`size_bytes=None`) adds a slab of exactly the bytes asked
    for whenever nothing free is large enough, up to `limit_bytes`; there it gives up the slabs that are empty. Where
    the system has less than the limit, it warns and grows no further.

    Args:
        before_freeing: called before memory goes back to the host, which does not wait for copies.

    Raises:
        MemoryError: the system has no memory for a fixed arena.
    """

    def __init__(
        self,
        size_bytes: int | None = None,
        limit_bytes: int | None = None,
        before_freeing: Callable[[], None] = lambda: None,
    ):
        self.limit_bytes = size_bytes if size_bytes is not None else limit_bytes
        self._grows, self._before_freeing = size_bytes is None, before_freeing
        self._slabs = [_Slab(size_bytes)] if size_bytes else []

    @property
    def memory(self) -> list[Tensor]:
        """All of it, as uint8 tensors: one, or one for each time that it grew."""
        return [slab.memory for slab in self._slabs]

    @property
    def size_bytes(self) -> int:
        return sum(memory.numel() for memory in self.memory)

    @property
    def in_use_bytes(self) -> int:
        """What is handed out and not yet given back, with the padding between entries."""
        return sum(slab.memory.numel() - slab.free_bytes for slab in self._slabs)

    def allocate(self, size_bytes: int) -> Allocation | None:
        """`size_bytes` as a uint8 tensor, with the function that gives them back; None when full."""
        for slab in self._slabs:
            memory = slab.allocate(size_bytes)
            if memory is not None:
                return memory
        rounded, limit = aligned(size_bytes), self.limit_bytes
        if limit is not None and self.size_bytes + rounded > limit:
            self.trim()
        if not self._grows or (limit is not None and self.size_bytes + rounded > limit):
            return None
        try:
            self._slabs.append(_Slab(rounded))
        except MemoryError as error:
            # In the middle of a step nothing fails: this is an arena that is full.
            self.limit_bytes = self.size_bytes
            logger.warning("%s; the offload arena stays at %d bytes", error, self.size_bytes)
            return None
        return self._slabs[-1].allocate(size_bytes)

    def trim(self) -> None:
        """Gives the slabs that are empty back to the host; a fixed arena stays."""
        if self._grows and any(slab.is_empty for slab in self._slabs):
            self._before_freeing()
            self._slabs = [slab for slab in self._slabs if not slab.is_empty]


class _Slab:
    """One piece of host memory, and what of it is free."""

    def __init__(self, size_bytes: int):
        self.memory = allocate_on_host(size_bytes)
        self._free = [(0, size_bytes)]  # (start, end), sorted, never adjacent

    @property
    def is_empty(self) -> bool:
        return self._free == [(0, self.memory.numel())]

    @property
    def free_bytes(self) -> int:
        return sum(end - start for start, end in self._free)

    def allocate(self, size_bytes: int) -> Allocation | None:
        for index, (start, end) in enumerate(self._free):
            if end - start >= size_bytes:
                # The last entry of an arena need not be padded to the alignment.
                stop = min(start + aligned(size_bytes), end)
                self._free[index : index + 1] = [(stop, end)] if stop < end else []
                # Weakly: what still waits to be given back must not keep the memory of an arena that was closed.
                return self.memory[start : start + size_bytes], partial(
                    _release, weakref.ref(self), start, stop
                )
        return None

    def release(self, start: int, end: int) -> None:
        """Bytes `start` to `end` are free again."""
        merged: list[tuple[int, int]] = []
        for area in sorted([*self._free, (start, end)]):
            if merged and merged[-1][1] == area[0]:
                merged[-1] = (merged[-1][0], area[1])
            else:
                merged.append(area)
        self._free = merged


def _release(slab: weakref.ref[_Slab], start: int, end: int) -> None:
    alive = slab()
    if alive is not None:
        alive.release(start, end)
