"""Which tensors hold gradients of parameters: the gradients themselves, and what is copied or scaled from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from opensora_accel.verify.communication.collectives import tensors_in

_CARRIES = {
    "aten::_foreach_copy_",
    "aten::_foreach_div",
    "aten::_foreach_mul",
    "aten::_to_copy",
    "aten::cat",
    "aten::clone",
    "aten::copy_",
    "aten::div",
    "aten::mul",
    "aten::stack",
}
"""What the averaging of gradients is made of: buckets, casts and divisors. Views share their storage anyway."""


class Derived:
    """Storages, and the parameters whose gradients are in them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self._parameters = parameters
        self._names_of = {id(parameter): name for name, parameter in parameters.items()}
        self._storages: dict[int, tuple[StorageWeakRef, frozenset[str]]] = {}
        self.seen: set[str] = set()
        """Parameters that had a gradient after some backward, also if it was cleared since."""

    def note_gradients(self) -> None:
        self.seen |= {name for name, parameter in self._parameters.items() if parameter.grad is not None}

    def follow(self, func: Any, args: Sequence[Any], result: Any, in_backward: bool) -> None:
        """Notes what an operation has put where. Within backward only where a gradient is accumulated."""
        if not self._parameters or func._schema.name not in _CARRIES:
            return
        names = self._accumulated()
        if in_backward and not names:
            return
        names |= self._held([*tensors_in(args)])
        written = args[0] if func._schema.name.endswith("copy_") else result
        for tensor in tensors_in(written) if names else ():
            if _may_hold(tensor):
                self._add(tensor, names)

    def names(self, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """Of the parameters whose gradients are in these."""
        held = self._accumulated() if any(_may_hold(t) and t.numel() > 1 for t in tensors) else set()
        found = held | self._held(tensors)
        return tuple(name for name in self._parameters if name in found)

    def _accumulated(self) -> set[str]:
        """The parameter at whose end of the graph autograd is: DDP fills its buckets there."""
        node = torch._C._current_autograd_node()
        variable = getattr(node, "variable", None)
        name = self._names_of.get(id(variable))
        return set() if name is None else {name}

    def _held(self, tensors: Sequence[Tensor]) -> set[str]:
        wanted = {_storage(tensor) for tensor in tensors if _may_hold(tensor)}
        found: set[str] = set()
        for key in wanted & self._storages.keys():
            reference, names = self._storages[key]
            if not reference.expired():
                found |= names
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and _storage(parameter.grad) in wanted:
                found.add(name)
        return found

    def _add(self, tensor: Tensor, names: set[str]) -> None:
        key = _storage(tensor)
        reference, before = self._storages.get(key, (None, frozenset[str]()))
        if reference is None or reference.expired():
            reference, before = StorageWeakRef(tensor.untyped_storage()), frozenset()
        self._storages[key] = reference, before | names


def _may_hold(tensor: Tensor) -> bool:
    """Whole numbers are counts, or DDP's map of the parameters that were used."""
    return tensor.is_floating_point() or tensor.is_complex()


def _storage(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return local.untyped_storage()._cdata
