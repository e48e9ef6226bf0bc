"""Live bytes of a device by counting storages, where no allocator tells: on CPU and on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor shows the bytes of the whole. Its operation is taken apart first, and comes back with local tensors.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.timeline.append(self.now_bytes)
        return outputs

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._ignored:
            return
        if address not in self._sizes:
            weakref.finalize(storage, self._forget, address).atexit = False
        self._set(address, storage.nbytes())

    def _forget(self, address: int) -> None:
        self._set(address, 0)
        self._sizes.pop(address, None)

    def _set(self, address: int, size_bytes: int) -> None:
        self.now_bytes += size_bytes - self._sizes.get(address, 0)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        self._sizes[address] = size_bytes


class LimitedBytes(LiveBytes):
    """Within it an operation fails that takes the live bytes beyond a limit, as a GPU's allocator lets it fail."""

    def __init__(self, limit_bytes: int):
        super().__init__()
        self.limit_bytes = limit_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.now_bytes
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        if self.now_bytes > self.limit_bytes:
            # As CUDA's allocator has it, with a limit instead of a device.
            raise torch.OutOfMemoryError(
                f"Tried to allocate {self.now_bytes - before} bytes. The limit is {self.limit_bytes} bytes, of which "
                f"{before} are in use"
            )
        return outputs
