"""Boundary activations in host memory: a page-locked byte arena, tickets, and the copies in and out.

A ticket is the only handle to what was moved. Its bytes are free again when nothing refers to it any more, which
autograd decides: after backward, when a graph is dropped half-way, after an exception. So no order of microbatches
is assumed, and `retain_graph` may fetch a tensor twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

logger = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 64
"""Entries start at multiples of this, so that every dtype can view them and copies are aligned."""


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

    def allocate(self, size_bytes: int) -> tuple[Tensor, Callable[[], None]] | None:
        """`size_bytes` as a uint8 tensor, with the function that gives them back; None when full."""
        rounded = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
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
    if size_bytes and torch.cuda.is_available():
        runtime = torch.cuda.cudart()
        address = memory.data_ptr()
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
            weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return memory


@dataclass(eq=False)
class Ticket:
    """What was moved: where it lies in the arena and how it looked."""

    host: Tensor
    """Without the elements that an expanded tensor repeats."""
    shape: torch.Size
    device: torch.device
    version: int
    copied: torch.cuda.Event | None = None
    source: Tensor | None = None
    """Kept until the copy out has been waited for."""

    @property
    def size_bytes(self) -> int:
        return self.host.numel() * self.host.element_size()


@dataclass
class OffloadCounters:
    """What happened to the marked tensors since the last `reset_counters()`."""

    moved: int = 0
    moved_bytes: int = 0
    shared: int = 0
    """Marked again while already in the arena: one copy serves all."""
    kept: int = 0
    """Stayed on the device because the arena was full."""
    kept_bytes: int = 0
    in_use_bytes: int = 0
    peak_bytes: int = 0


class ActivationManager:
    """Moves marked tensors to the arena and back. Open-Sora's name; its entries are tickets, in any order."""

    def __init__(self) -> None:
        self.enable = False
        self.arena: Arena | None = None
        self._counters = OffloadCounters()
        self._lock = threading.RLock()
        self._returned: deque[tuple[int, Callable[[], None]]] = deque()
        self._ignored: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._tickets: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._in_flight: list[Ticket] = []
        self._warned_full = False

    @property
    def counters(self) -> OffloadCounters:
        self._take_back()
        return self._counters

    def setup_buffer(self, numel: int, dtype: torch.dtype) -> None:
        """Open-Sora's call: an arena of exactly `numel` elements of `dtype`; other dtypes may use it too."""
        self.setup_arena(numel * torch.empty(0, dtype=dtype).element_size())

    def setup_arena(self, size_bytes: int | None = None, limit_bytes: int | None = None) -> None:
        """An arena of exactly `size_bytes`, or one that grows as it is used.

        It grows up to `limit_bytes`; by default to half of the host memory that is free now, shared by the ranks
        of this machine.
        """
        for name, value in (("size_bytes", size_bytes), ("limit_bytes", limit_bytes)):
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative; got {value}")
        if size_bytes is None and limit_bytes is None:
            limit_bytes = _free_host_bytes() // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.arena = Arena(size_bytes, limit_bytes)
        self.enable = True
        self._warned_full = False

    def close(self) -> None:
        """Stops moving and lets the arena go as soon as the last ticket does."""
        self.enable, self.arena = False, None
        self._take_back()

    def reset_counters(self) -> None:
        in_use = self.counters.in_use_bytes
        self._counters = OffloadCounters(in_use_bytes=in_use, peak_bytes=in_use)

    def add_ignore_tensor(self, tensor: Tensor) -> None:
        """Never move this tensor: it stays alive on the device anyhow."""
        self._ignored[tensor] = True

    def offload(self, tensor: Tensor) -> Ticket | None:
        """Starts the copy to the host; None where it stays on the device (disabled, ignored, arena full)."""
        with self._lock:
            return self._offload(tensor)

    def _offload(self, tensor: Tensor) -> Ticket | None:
        if not self.enable or self.arena is None or tensor in self._ignored:
            return None
        self._take_back()
        ticket = self._known(tensor)
        if ticket is not None:
            self._counters.shared += 1
            return ticket
        compact = _compact(tensor)
        size_bytes = compact.numel() * compact.element_size()
        allocation = self.arena.allocate(size_bytes) if size_bytes else None
        if allocation is None:
            self._keep(size_bytes)
            return None
        memory, release = allocation
        host = memory.view(tensor.dtype).as_strided(compact.shape, compact.stride())
        ticket = Ticket(host, tensor.shape, tensor.device, tensor._version)
        self._copy_out(compact, ticket)
        self._count_moved(ticket, release)
        self._tickets[tensor] = weakref.ref(ticket)
        return ticket

    def onload(self, ticket: Ticket) -> Tensor:
        """The tensor as it was when it was moved, strides included where it had no gaps. May be called again."""
        if ticket.copied is not None:
            torch.cuda.current_stream(ticket.device).wait_event(ticket.copied)
        restored = torch.empty_strided(
            ticket.host.shape, ticket.host.stride(), dtype=ticket.host.dtype, device=ticket.device
        )
        # On the compute stream: what reads it comes after, and so does the next user of these arena bytes.
        restored.copy_(ticket.host, non_blocking=True)
        return restored.expand(ticket.shape)

    @contextlib.contextmanager
    def saving(self, marked: Sequence[Tensor]) -> Iterator[None]:
        """Within it, autograd saves the marked tensors through the arena, and everything else as always."""
        by_identity = {_identity(tensor): tensor for tensor in marked}

        def pack(tensor: Tensor) -> Tensor | Ticket:
            found = by_identity.get(_identity(tensor))
            return tensor if found is None else (self.offload(found) or tensor)

        def unpack(packed: Tensor | Ticket) -> Tensor:
            return self.onload(packed) if isinstance(packed, Ticket) else packed

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            by_identity.clear()  # autograd keeps `pack`, and with it all that it refers to, as long as the graph
            self._wait_for_copies()

    def _known(self, tensor: Tensor) -> Ticket | None:
        reference = self._tickets.get(tensor)
        ticket = None if reference is None else reference()
        # Changed in place since: another value, so another entry.
        return ticket if ticket is not None and ticket.version == tensor._version else None

    def _copy_out(self, source: Tensor, ticket: Ticket) -> None:
        if ticket.device.type != "cuda":
            ticket.host.copy_(source.detach())
            return
        if ticket.device not in self._streams:
            self._streams[ticket.device] = torch.cuda.Stream(ticket.device)
        stream = self._streams[ticket.device]
        stream.wait_stream(torch.cuda.current_stream(ticket.device))
        with torch.cuda.stream(stream):
            ticket.host.copy_(source.detach(), non_blocking=True)
            ticket.copied = torch.cuda.Event()
            ticket.copied.record(stream)
        ticket.source = source
        self._in_flight.append(ticket)

    def _wait_for_copies(self) -> None:
        """The compute stream waits, then the sources may be freed: no memory is reused under a running copy."""
        for ticket in self._in_flight:
            assert ticket.copied is not None
            torch.cuda.current_stream(ticket.device).wait_event(ticket.copied)
            ticket.source = None
        self._in_flight.clear()

    def _count_moved(self, ticket: Ticket, release: Callable[[], None]) -> None:
        self._counters.moved += 1
        self._counters.moved_bytes += ticket.size_bytes
        self._counters.in_use_bytes += ticket.size_bytes
        self._counters.peak_bytes = max(self._counters.peak_bytes, self._counters.in_use_bytes)
        # A finalizer may run between any two instructions, also in the middle of `allocate`: it only takes note.
        weakref.finalize(ticket, self._returned.append, (ticket.size_bytes, release))

    def _take_back(self) -> None:
        """Frees the bytes of the tickets that are gone."""
        with self._lock:
            while self._returned:
                size_bytes, release = self._returned.popleft()
                release()
                self._counters.in_use_bytes -= size_bytes

    def _keep(self, size_bytes: int) -> None:
        self._counters.kept += 1
        self._counters.kept_bytes += size_bytes
        if not self._warned_full and size_bytes and self.arena is not None:
            self._warned_full = True
            logger.warning(
                "the offload arena (%d bytes) is full: %d bytes stay on the device; nothing fails, "
                "but setup_arena() with more would free them",
                self.arena.size_bytes,
                size_bytes,
            )


GLOBAL_ACTIVATION_MANAGER = ActivationManager()


def _compact(tensor: Tensor) -> Tensor:
    """A view without repeated elements; strided as the tensor where it fills its memory, else contiguous."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor if _fills_its_memory(tensor) else tensor.contiguous()


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether the elements lie without gap or overlap, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two Python objects of one tensor: autograd may hand hooks a new object."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
