"""Whose memory a storage is: parameters, gradients, optimizer state and block inputs, found by walking what holds them.

Under FSDP2 a parameter has two storages: this rank's shard, which the optimizer steps on, and the gathered one, which
exists while the block computes. Both are parameters; a block's detail tells them apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from opensora_accel.observe.kinds import KINDS
from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER

# A kind of the detail alone; everywhere else these are parameters.
GATHERED = "gathered parameters"
DETAILED_KINDS = (KINDS[0], GATHERED, *KINDS[1:])
# Names in the place of a block's.
ELSEWHERE, OFFLOAD = "outside of the blocks", "offload"


@dataclass(frozen=True)
class Owner:
    """Who holds a storage."""

    # One of `DETAILED_KINDS`.
    kind: str
    # Name of the block, or of what stands in its place.
    block: str
    # Whether it is a parameter that the step does not train.
    is_frozen: bool = False
    # Of what nobody holds, what the operator that has made it is for (`kinds.class_of`); "" where that is not known.
    made_by: str = ""


@dataclass(frozen=True)
class Owned:
    """A storage, without keeping it alive."""

    owner: Owner
    size_bytes: int
    device: torch.device


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that a tensor of a wrapper class (a DTensor, a quantized one) holds, or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _context = tensor.__tensor_flatten__()
    for name in names:
        # Newer versions of torch also name a DTensor's mesh.
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):
            yield from plain_tensors(inner)


def arena_memory() -> list[Tensor]:
    """Host memory that the offload engine has set aside, uint8 [N] each."""
    arena = GLOBAL_ACTIVATION_MANAGER.engine.arena
    return [] if arena is None else arena.memory


def arena_bytes() -> int:
    """Bytes of block inputs that wait in it now."""
    arena = GLOBAL_ACTIVATION_MANAGER.engine.arena
    return 0 if arena is None else arena.in_use_bytes


class Owners:
    """Knows a model's and an optimizer's tensors, and the block inputs that were added.

    Args:
        blocks: by name; what belongs to none of them is `ELSEWHERE`.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
    ):
        self.model, self.optimizer = model, optimizer
        self._block_of_name = {
            f"{name}.{inner}": name for name, block in blocks.items() for inner, _ in block.named_parameters()
        }
        # The optimizer knows parameters by identity alone.
        self._block_of_parameter = {
            id(parameter): self._block_of_name.get(name, ELSEWHERE)
            for name, parameter in model.named_parameters()
        }
        # By the address of the storage, for as long as that lives.
        self._inputs: dict[int, Owned] = {}

    def add_inputs(self, block: str, tensors: Sequence[Tensor]) -> None:
        """Autograd keeps these tensors for the recomputation of a block. What several share is the first's."""
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                storage = plain.untyped_storage()
                if storage._cdata not in self._inputs:
                    owner = Owner("block inputs", block or ELSEWHERE)
                    self._inputs[storage._cdata] = Owned(owner, storage.nbytes(), storage.device)
                    weakref.finalize(storage, self._inputs.pop, storage._cdata, None).atexit = False

    def tensors(self) -> Iterator[tuple[Tensor, Owner]]:
        """What the model, the optimizer and the offload engine hold now: plain tensors; one may come twice."""
        for tensor, owner in self._held():
            for plain in plain_tensors(tensor):
                yield plain, owner

    def by_address(self) -> dict[int, Owned]:
        """Every storage that has an owner, by its address."""
        owned_by_address: dict[int, Owned] = {}
        for tensor, owner in self.tensors():
            storage = tensor.untyped_storage()
            if storage._cdata not in owned_by_address:
                owned_by_address[storage._cdata] = Owned(owner, storage.nbytes(), storage.device)
        # A finalizer may drop an input at any time, from a copy it cannot.
        for address, owned in self._inputs.copy().items():
            owned_by_address.setdefault(address, owned)
        return owned_by_address

    def _held(self) -> Iterable[tuple[Tensor, Owner]]:
        # Those of FSDP2 first: while gathered, the model's parameters are not the shards.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for sharded in group.fsdp_params:
                        yield from self._held_by_fsdp(sharded)
        for name, parameter in self.model.named_parameters():
            block = self._block_of_name.get(name, ELSEWHERE)
            yield parameter, Owner("parameters", block, not parameter.requires_grad)
            if parameter.grad is not None:
                yield parameter.grad, Owner("gradients", block)
        for weight, state in self.optimizer.state.items() if self.optimizer is not None else ():
            block = self._block_of_parameter.get(id(weight), ELSEWHERE)
            for value in tree_leaves(dict(state)):
                if isinstance(value, Tensor):
                    yield value, Owner("optimizer state", block)
        for slot in GLOBAL_ACTIVATION_MANAGER.engine.slot_memory:
            yield slot, Owner("block inputs", OFFLOAD)

    def _held_by_fsdp(self, parameter: Any) -> Iterable[tuple[Tensor, Owner]]:
        shard = parameter.sharded_param
        block = self._block_of_parameter.get(id(shard))
        if block is None:
            block = self._block_of_name.get(parameter._param_fqn or "", ELSEWHERE)
        is_frozen = not shard.requires_grad
        yield shard, Owner("parameters", block, is_frozen)
        # What the shard is cut from: with padding, or what it was made of.
        yield parameter._sharded_param_data, Owner("parameters", block, is_frozen)
        gathered = list(parameter.all_gather_outputs)
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None:
            gathered.append(unsharded)
        for tensor in gathered:
            yield tensor, Owner(GATHERED, block)
        whole = [parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad]
        for gradient in (shard.grad, *whole):
            if gradient is not None:
                yield gradient, Owner("gradients", block)
