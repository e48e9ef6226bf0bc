"""Two places on the device where fetched blocks land, used in turn."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_SLOTS = 2
"""One block computes from its slot while the next is fetched into the other."""


class Slots:
    """Device memory held from the first forward to `close`, so that backward asks the allocator for nothing.

    A slot is free when no tensor uses its storage any more. That is what counts, and not the end of a block's
    backward: `retain_graph`, a hook, or another microbatch may hold on to what was fetched.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._slots: list[_Slot] = []

    @property
    def size_bytes(self) -> int:
        return sum(slot.memory.numel() for slot in self._slots)

    def reserve(self, size_bytes: int) -> None:
        """One more slot while there are fewer than two, and none smaller than this entry."""
        if len(self._slots) < NUM_SLOTS:
            self._slots.append(_Slot(size_bytes, self._device))
        for index, slot in enumerate(self._slots):
            if slot.memory.numel() < size_bytes:
                # What is still used of the smaller one lives on in its tensors.
                self._slots[index] = _Slot(size_bytes, self._device)

    def take(self, size_bytes: int) -> Tensor | None:
        """uint8 [size_bytes] in a free slot; None when all are in use or too small."""
        for slot in self._slots:
            if slot.is_free and slot.memory.numel() >= size_bytes:
                return slot.memory[:size_bytes]
        return None


class _Slot:
    def __init__(self, size_bytes: int, device: torch.device):
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._storage = self.memory.untyped_storage()  # held, so that asking for it does not change the count
        self._own_references = self._references()

    def _references(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)

    @property
    def is_free(self) -> bool:
        return self._references() == self._own_references
