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

_CGROUP = Path("/sys/fs/cgroup")

_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
"""Ranks of this machine, by launcher: torchrun, accelerate and colossalai; Open MPI; MPICH; srun."""

ALIGNMENT_BYTES = 64
"""Entries start at multiples of this, so that every dtype can view them and copies are aligned."""


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """Bytes of host memory, page-locked where there is a GPU, handed out and taken back in any order.

    A fixed arena has exactly `size_bytes`. A growing one (`size_bytes=None`) adds a slab of exactly the bytes
    asked for whenever nothing free is large enough, up to `limit_bytes`; there it gives up slabs that are empty,
    as they are after clips of another length.

    Args:
        before_freeing: called before memory goes back to the host, which does not wait for copies.
    """

    def __init__(
        self,
        size_bytes: int | None = None,
        limit_bytes: int | None = None,
        before_freeing: Callable[[], None] = lambda: None,
    ):
        self.limit_bytes = size_bytes if size_bytes is not None else limit_bytes
        self.size_bytes = 0
        self._slabs: list[_Slab] = []
        self._grows, self._before_freeing = size_bytes is None, before_freeing
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
        if not self._grows or not self._make_room(rounded):
            return None
        return self._add_slab(rounded).allocate(rounded, size_bytes)

    def trim(self) -> None:
        """Gives the slabs that are empty back to the host; a fixed arena stays."""
        if self._grows and any(slab.is_empty for slab in self._slabs):
            self._before_freeing()
            self._slabs = [slab for slab in self._slabs if not slab.is_empty]
            self.size_bytes = sum(slab.memory.numel() for slab in self._slabs)

    def _make_room(self, size_bytes: int) -> bool:
        limit = self.limit_bytes
        if limit is not None and self.size_bytes + size_bytes > limit:
            self.trim()
        return limit is None or self.size_bytes + size_bytes <= limit

    def _add_slab(self, size_bytes: int) -> _Slab:
        self._slabs.append(_Slab(size_bytes))
        self.size_bytes += size_bytes
        return self._slabs[-1]


class _Slab:
    def __init__(self, size_bytes: int):
        self.memory = _host_memory(size_bytes)
        self._free = [(0, size_bytes)]  # (start, end), sorted, never adjacent

    @property
    def is_empty(self) -> bool:
        return self._free == [(0, self.memory.numel())]

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


def default_limit_bytes() -> int:
    """Half of the host memory that is free now, shared by the ranks of this machine."""
    given = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "1")
    return _free_host_bytes() // 2 // int(given.partition("(")[0])  # srun writes 8(x2) for two machines


def _free_host_bytes() -> int:
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
        limit, used, statistics = (
            (_CGROUP / f"memory.{name}").read_text(encoding="ascii").strip()
            for name in ("max", "current", "stat")
        )
        # Files that were read count as used, and are let go when memory is asked for.
        files = dict(line.split() for line in statistics.splitlines())["inactive_file"]
        return max(0, int(limit) - int(used) + int(files)) if limit != "max" else sys.maxsize
    except (OSError, ValueError, KeyError):
        return sys.maxsize


def _host_memory(size_bytes: int) -> Tensor:
    """Exactly `size_bytes`; `pin_memory=True` would round up to a power of two."""
    # Named, because `torch.set_default_device` would have it elsewhere.
    memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    if size_bytes and torch.cuda.is_available() and not _is_fake(memory):
        _page_lock(memory)
    return memory


def _page_lock(memory: Tensor) -> None:
    runtime = torch.cuda.cudart()
    address, size_bytes = memory.data_ptr(), memory.numel()
    # Locking is what first touches the pages, so they come from the memory of the node that this thread runs on.
    device = torch.cuda.current_device()
    with near_device(device):
        error = int(runtime.cudaHostRegister(address, size_bytes, 0))
    if error:
        logger.warning(
            "could not page-lock %d bytes for offload (CUDA error %d): copies will wait for the host; "
            "free host memory, or ask for a smaller arena (setup_arena)",
            size_bytes,
            error,
        )
        with contextlib.suppress(RuntimeError):
            # CUDA keeps the error for the next launch, which would fail for it: let that be this one.
            torch.zeros(1, device="cuda")
    else:
        # On the storage, which outlives the slab for as long as any view of it does. Not at the interpreter's end:
        # CUDA may be gone by then, and the system takes everything back.
        weakref.finalize(memory.untyped_storage(), _unlock_pages, address, device).atexit = False


def _unlock_pages(address: int, device: int) -> None:
    torch.cuda.synchronize(device)  # a copy from these pages may be under way
    torch.cuda.cudart().cudaHostUnregister(address)


def _is_fake(memory: Tensor) -> bool:
    """Under FakeTensorMode, which accounts for memory without having it."""
    return type(memory) is not Tensor
