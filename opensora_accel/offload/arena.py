"""Host memory by the byte: exactly as much as was asked for, page-locked, near the GPU that it serves."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from opensora_accel.offload.numa import near_device

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 64
"""Entries start at multiples of this, so that every dtype can view them and copies are aligned."""


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """Bytes of host memory, page-locked where there is a GPU, handed out and taken back in any order.

    A fixed arena has exactly `size_bytes`. A growing one (`size_bytes=None`) adds a slab of exactly the bytes
    asked for whenever nothing free is large enough, up to `limit_bytes`.
    """

    def __init__(self, size_bytes: int | None = None, limit_bytes: int | None = None):
        self.limit_bytes = size_bytes if size_bytes is not None else limit_bytes
        self.size_bytes = 0
        self._slabs: list[_Slab] = []
        self._grows = size_bytes is None
        if size_bytes:
            self._add_slab(size_bytes)

    @property
    def memory(self) -> list[Tensor]:
        """All of it, as uint8 tensors: one, or one for each time that it grew."""
        return [slab.memory for slab in self._slabs]

    def allocate(self, size_bytes: int) -> tuple[Tensor, Callable[[], None]] | None:
        """`size_bytes` as a uint8 tensor, with the function that gives them back; None when full."""
        rounded = aligned(size_bytes)
        for slab in self._slabs:
            found = slab.allocate(rounded, size_bytes)
            if found is not None:
                return found
        if not self._grows or (self.limit_bytes is not None and self.size_bytes + rounded > self.limit_bytes):
            return None
        return self._add_slab(rounded).allocate(rounded, size_bytes)

    def _add_slab(self, size_bytes: int) -> _Slab:
        self._slabs.append(_Slab(size_bytes))
        self.size_bytes += size_bytes
        return self._slabs[-1]


class _Slab:
    def __init__(self, size_bytes: int):
        self.memory = _host_memory(size_bytes)
        self._free = [(0, size_bytes)]  # (start, end), sorted, never adjacent

    def allocate(self, rounded: int, size_bytes: int) -> tuple[Tensor, Callable[[], None]] | None:
        for index, (start, end) in enumerate(self._free):
            # The last entry of an arena need not be padded to the alignment.
            taken = min(rounded, end - start)
            if taken >= size_bytes:
                self._free[index : index + 1] = [(start + taken, end)] if start + taken < end else []
                return self.memory[start : start + size_bytes], partial(self._release, start, start + taken)
        return None

    def _release(self, start: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for area in sorted([*self._free, (start, end)]):
            if merged and merged[-1][1] == area[0]:
                merged[-1] = (merged[-1][0], area[1])
            else:
                merged.append(area)
        self._free = merged


def free_host_bytes() -> int:
    """What Linux calls available, within the container's limit."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        # macOS: it counts no free pages, so half of all of them stands for what is free.
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min(available, _free_container_bytes())


def _free_container_bytes() -> int:
    """What a container's own limit (cgroup v2) leaves; no limit is as much as there can be."""
    try:
        limit, used = (
            Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="ascii").strip()
            for name in ("max", "current")
        )
        return max(0, int(limit) - int(used)) if limit != "max" else sys.maxsize
    except (OSError, ValueError):
        return sys.maxsize


def _host_memory(size_bytes: int) -> Tensor:
    """Exactly `size_bytes`; `pin_memory=True` would round up to a power of two."""
    memory = torch.empty(size_bytes, dtype=torch.uint8)
    if size_bytes and torch.cuda.is_available() and not _is_fake(memory):
        _page_lock(memory)
    return memory


def _page_lock(memory: Tensor) -> None:
    runtime = torch.cuda.cudart()
    address, size_bytes = memory.data_ptr(), memory.numel()
    # Locking is what first touches the pages, so they come from the memory of the node that this thread runs on.
    with near_device(torch.cuda.current_device()):
        error = int(runtime.cudaHostRegister(address, size_bytes, 0))
    if error:
        logger.warning(
            "could not page-lock %d bytes for offload (CUDA error %d): copies will wait for the host; "
            "raise the limit (ulimit -l) or ask for a smaller arena",
            size_bytes,
            error,
        )
        with contextlib.suppress(RuntimeError):
            # CUDA keeps the error for the next launch, which would fail for it: let that be this one.
            torch.zeros(1, device="cuda")
    else:
        # On the storage, which outlives the slab for as long as any view of it does. Not at the interpreter's end:
        # CUDA may be gone by then, and the system takes everything back.
        weakref.finalize(memory.untyped_storage(), _unlock_pages, address).atexit = False


def _unlock_pages(address: int) -> None:
    torch.cuda.synchronize()  # a copy from these pages may be under way
    torch.cuda.cudart().cudaHostUnregister(address)


def _is_fake(memory: Tensor) -> bool:
    """Under FakeTensorMode, which accounts for memory without having it."""
    return type(memory) is not Tensor
