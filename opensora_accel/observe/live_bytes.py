"""Live bytes of a device by counting storages, where no allocator counts: on CPU and on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from opensora_accel.arguments import tensors_in
from opensora_accel.observe.kinds import RECOMPUTE
from opensora_accel.observe.modes import OperatorMode
from opensora_accel.observe.owners import arena_memory
from opensora_accel.observe.places import Place


class LiveBytes(OperatorMode):
    """Within it, counts the bytes of every storage that an operation makes, for as long as the storage lives.

    Counts what tensors ask for, not an allocator's rounding and fragments. FSDP2 frees its gathered parameters by
    resizing their storages, so that is followed too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        # Live bytes after every operation.
        self.timeline: list[int] = []
        self._sizes: dict[int, int] = {}
        self._ignored: set[int] = set()

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Also counts these tensors, which were made before."""
        for tensor in tensors:
            self._count(tensor.untyped_storage())

    def ignore(self, tensor: Tensor) -> None:
        """Does not count this tensor's memory, nor anything that shares it: an arena on the host, for one."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes:
            self._set(storage._cdata, 0)
        self._ignored.add(storage._cdata)
        weakref.finalize(storage, self._ignored.discard, storage._cdata).atexit = False

    def __enter__(self) -> LiveBytes:
        self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            result = self._resize(storage, size_bytes)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def after(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Counts what the operator has made."""
        for tensor in tensors_in(outputs):
            self._count(tensor.untyped_storage())
        self.timeline.append(self.now_bytes)

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._ignored:
            return
        if address not in self._sizes:
            # Not by a method: finalizers are global, and would keep the counter, and what it knows of a model, for as
            # long as one of the model's own storages lives, which is then for ever.
            weakref.finalize(storage, _storage_is_gone, weakref.ref(self), address).atexit = False
        self._set(address, storage.nbytes())

    def _forget(self, address: int) -> None:
        self._set(address, 0)
        self._sizes.pop(address, None)

    def _set(self, address: int, size_bytes: int) -> None:
        self.now_bytes += size_bytes - self._sizes.get(address, 0)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        self._sizes[address] = size_bytes


def _storage_is_gone(counter: weakref.ref[LiveBytes], address: int) -> None:
    alive = counter()
    if alive is not None:
        alive._forget(address)


class DeviceBytes(LiveBytes):
    """Live bytes without the host memory that offload has set aside; each new storage is announced."""

    def is_made(self, address: int, kind: str, size_bytes: int) -> None:
        """A storage has come to light, and is about to be counted.

        Args:
            kind: of `KINDS`, as far as the place says: "recomputation" while a checkpoint recomputes, or "other".
        """
        raise NotImplementedError

    def _place(self) -> Place:
        """Where the step is."""
        raise NotImplementedError

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._sizes and address not in self._ignored:
            for memory in arena_memory():  # known for host memory only once it is there
                if memory.untyped_storage()._cdata == address:
                    self.ignore(memory)
                    return
            kind = "recomputation" if self._place().phase == RECOMPUTE else "other"
            self.is_made(address, kind, storage.nbytes())
        super()._count(storage)


class LimitedBytes(LiveBytes):
    """Within it an operation fails that takes the live bytes beyond a limit, as a GPU's allocator lets it fail."""

    def __init__(self, limit_bytes: int):
        super().__init__()
        self.limit_bytes = limit_bytes

    def after(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Counts, and fails beyond the limit."""
        before = self.now_bytes
        super().after(func, args, kwargs, outputs)
        if self.now_bytes > self.limit_bytes:
            # As CUDA's allocator has it, with a limit instead of a device.
            raise torch.OutOfMemoryError(
                f"Tried to allocate {self.now_bytes - before} bytes. The limit is {self.limit_bytes} bytes, of which "
                f"{before} are in use"
            )
