"""Every collective that a rank calls, with its group, its bytes, the line that called it, and the gradients in it.

Which gradients a call carries is followed by storage. With P = 3 ranks of DDP: the gradient of `a.weight` is copied
into a bucket when autograd reaches the parameter, so the bucket's storage is noted to hold `a.weight`; the all-reduce
of the bucket then carries `a.weight`. A loop that all-reduces `a.weight.grad` itself needs no such note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from opensora_accel.arguments import tensors_in
from opensora_accel.observe.call_site import find_call_site
from opensora_accel.observe.kinds import AFTER, BACKWARD, FORWARD, RECOMPUTE
from opensora_accel.observe.modes import OperatorMode
from opensora_accel.observe.operators import NAMESPACES, CollectiveCall, calls_of
from opensora_accel.wrapping import ReplacedParameter

# What the averaging of gradients is made of: buckets, casts and divisors. Views share their storage anyway.
_HOLDS_GRADIENTS_OF_ITS_INPUTS = {
    *("aten::_foreach_copy_", "aten::_foreach_div", "aten::_foreach_mul", "aten::_to_copy", "aten::cat"),
    *("aten::clone", "aten::copy_", "aten::div", "aten::mul", "aten::stack"),
}


class CollectiveRecorder(OperatorMode):
    """Within it, each call of torch.distributed on this rank becomes a `CollectiveCall` in `calls`, in order.

    Also in backward, in recomputation, and inside of FSDP2, DDP (its reducer's all-reduce comes from C++ and passes
    the dispatcher: torch 2.13), DTensor and functional collectives. A custom operator hides what it calls: its
    Python function is run in its stead. What is sent past the dispatcher is not seen: a backend called by itself, or
    kernels that communicate.

    Args:
        parameters: by name; calls that carry their gradients then name them.
    """

    sees_parts = True

    def __init__(self, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        super().__init__()
        self.calls: list[CollectiveCall] = []
        self.num_backwards = 0
        self._was_in_backward = False
        self._gradients = _GradientStorages(parameters or {})

    @property
    def with_gradient(self) -> frozenset[str]:
        """Parameters that had a gradient when a backward was done, also if the step has cleared it."""
        return frozenset(self._gradients.seen)

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Notes the calls of an operator that communicates."""
        # A task of autograd's engine runs on this thread only within a backward.
        in_backward = torch._C._current_graph_task_id() != -1
        self.num_backwards += in_backward and not self._was_in_backward
        if self._was_in_backward and not in_backward:
            self._gradients.note()
        self._was_in_backward = in_backward
        if func.namespace not in NAMESPACES:
            return
        for call, tensors in calls_of(func, args, kwargs):
            where = find_call_site()
            if in_backward:
                phase = RECOMPUTE if where.is_recomputed else BACKWARD
            else:
                # Outside of a backward and after the first: what the loop does itself, such as clipping.
                phase = AFTER if self.num_backwards else FORWARD
            gradients = self._gradients.names_in(tensors)
            self.calls.append(replace(call, phase=phase, where=where, gradients=gradients))

    def after(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Follows the gradients that it has moved."""
        if self.num_backwards:
            self._gradients.follow(func, args, outputs, self._was_in_backward)


class _GradientStorages:
    """Storages, and the parameters whose gradients are in them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self._parameters = parameters
        self._name_of = {id(parameter): name for name, parameter in parameters.items()}
        self._storages: dict[int, tuple[StorageWeakRef, frozenset[str]]] = {}
        # Parameters that had a gradient after some backward, also if it was cleared since.
        self.seen: set[str] = set()

    def note(self) -> None:
        self.seen |= {name for name, parameter in self._parameters.items() if parameter.grad is not None}

    def follow(self, func: Any, args: Sequence[Any], result: Any, in_backward: bool) -> None:
        """Notes what an operation has put where. Within backward only where a gradient is accumulated."""
        if not self._parameters or func._schema.name not in _HOLDS_GRADIENTS_OF_ITS_INPUTS:
            return
        names = self._accumulated()
        # In backward nearly every operation has gradients in it. Only what autograd accumulates is followed.
        if in_backward and not names:
            return
        names |= self._held_in(tensors_in(args))
        written = args[0] if func._schema.name.endswith("copy_") else result
        for tensor in tensors_in(written) if names else ():
            if not _may_be_gradient(tensor):
                continue
            key = _storage(tensor)
            # An address is used again once its storage is freed: a weak reference shows that.
            reference, before = self._storages.get(key, (None, frozenset[str]()))
            if reference is None or reference.expired():
                reference, before = StorageWeakRef(tensor.untyped_storage()), frozenset()
            self._storages[key] = reference, before | names

    def names_in(self, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """The parameters whose gradients are in these tensors."""
        is_bucket = any(_may_be_gradient(tensor) and tensor.numel() > 1 for tensor in tensors)
        held = (self._accumulated() if is_bucket else set()) | self._held_in(tensors)
        return tuple(name for name in self._parameters if name in held)

    def _accumulated(self) -> set[str]:
        """The parameter at whose end of the graph autograd is: DDP fills its buckets there."""
        node = torch._C._current_autograd_node()
        name = self._name_of.get(id(getattr(node, "variable", None)))
        return set() if name is None else {name}

    def _held_in(self, tensors: Sequence[Tensor]) -> set[str]:
        """Those whose gradients share a storage with these tensors, as noted or by `.grad`."""
        wanted = {_storage(tensor) for tensor in tensors if _may_be_gradient(tensor)}
        held: set[str] = set()
        for key in wanted & self._storages.keys():
            reference, names = self._storages[key]
            if not reference.expired():
                held |= names
        # A loop may communicate `.grad` itself, which nothing was copied into.
        for name, parameter in self._parameters.items():
            if isinstance(parameter, ReplacedParameter):
                continue  # it has no gradient, and says so by an error
            if parameter.grad is not None and _storage(parameter.grad) in wanted:
                held.add(name)
        return held


def _may_be_gradient(tensor: Tensor) -> bool:
    """Whether a tensor has numbers of a gradient: whole ones are counts, or DDP's map of what was used."""
    return tensor.is_floating_point() or tensor.is_complex()


def _storage(tensor: Tensor) -> int:
    """The key of the storage of a tensor, of a DTensor that of its shard."""
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return local.untyped_storage()._cdata
