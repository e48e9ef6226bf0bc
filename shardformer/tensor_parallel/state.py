"""Whole tensors from the ranks' shares, and shares from whole ones: for checkpoints, tests and the gradient's norm.

A model that is not tensor-parallel is whole already, and these functions leave its tensors alone.

Shares are plain tensors beside a table of cuts. DTensors on a mesh of the tensor ranks would have to describe fused
weights, for which there is no placement; plain ones are what FSDP2 shards, and what the layers' own code computes
with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_accel.dtensors import is_dtensor
from shardformer.tensor_parallel.cut import Cut

ATTRIBUTE = "_tensor_shards"


@dataclass(frozen=True)
class TensorShards:
    """What `shard_tensors` leaves on a model: how each parameter is cut, by its name."""

    group: dist.ProcessGroup
    cuts: Mapping[str, Cut]


# Parts of names that torch's compiled and checkpointed modules add.
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")


def whole_name(name: str) -> str:
    """A parameter's name without the wrappers of torch.compile and checkpointing."""
    return _WRAPPERS.sub("", name)


def cuts_of(model: nn.Module) -> dict[str, tuple[Cut, dist.ProcessGroup]]:
    """By parameter name, without wrappers: of the model itself, of what DDP holds, of each part that was sharded.

    Raises:
        ValueError: a cut parameter has another name now, and would be taken for whole.
    """
    cuts = {}
    for path, module in model.named_modules():
        shards: TensorShards | None = vars(module).get(ATTRIBUTE)
        if shards is None:
            continue
        for name, cut in shards.cuts.items():
            cuts[whole_name(f"{path}.{name}" if path else name)] = cut, shards.group
    lost = cuts.keys() - {whole_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    if lost:
        raise ValueError(
            f"{min(lost)} was cut by shard_tensors and has another name now: a layer was wrapped since (an adapter?); "
            "wrap it before"
        )
    return cuts


def _cut_of(model: nn.Module, name: str) -> tuple[Cut, dist.ProcessGroup] | None:
    return cuts_of(model).get(whole_name(name))


def group_of_cut(model: nn.Module) -> dict[str, dist.ProcessGroup]:
    """The tensor ranks that hold the other shares of a parameter, by its name, for those that are cut."""
    cuts = cuts_of(model)
    names = (name for name, _ in model.named_parameters())
    return {name: cuts[key][1] for name in names if (key := whole_name(name)) in cuts}


def full_tensor(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The whole of a tensor that is cut as parameter `name` is: the parameter, its gradient, an optimizer's average.

    [..., N/P at the dim that is cut, ...] → [..., N, ...]. A DTensor (FSDP2) is gathered over its mesh first. What is
    not cut, or is a single number, comes back as it is.
    Communication: an all-gather over the tensor ranks, for a parameter that is cut; all of them call it.
    """
    return _whole(tensor, _cut_of(model, name))


def _whole(tensor: Tensor, found: tuple[Cut, dist.ProcessGroup] | None) -> Tensor:
    """[..., N/P at the dim that is cut, ...] → [..., N, ...]."""
    tensor = tensor.detach()
    # FSDP2 has cut what the tensor ranks had left, so its mesh is gathered first.
    tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    # An optimizer's count of steps is a single number, however its parameter is cut.
    if found is None or tensor.dim() == 0:
        return tensor
    cut, group = found
    return cut.whole(tensor, group)


def full_shape(model: nn.Module, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that parameter `name`, of this shape here, has on one device."""
    cut = _cut_of(model, name)
    return tuple(shape) if cut is None else cut[0].full_shape(shape)


def local_tensor(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """This tensor rank's shares of a whole tensor that is cut as parameter `name` is, without communication.

    [..., N at the dim that is cut, ...] → [..., N/P, ...].

    Raises:
        ValueError: the tensor is not whole.
    """
    return _local(name, whole, _cut_of(model, name))


def _local(name: str, whole: Tensor, found: tuple[Cut, dist.ProcessGroup] | None) -> Tensor:
    """[..., N at the dim that is cut, ...] → [..., N/P, ...]."""
    if found is None or whole.dim() == 0:
        return whole
    cut, group = found
    if whole.shape != cut.full_shape(whole.shape):
        raise ValueError(
            f"{name} has size {cut.size} along dim {cut.dim} in the model on one device; got a tensor of shape "
            f"{tuple(whole.shape)}: load a whole state dict, as full_state_dict(model) gives"
        )
    return cut.local(whole, group.rank())


def full_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`full_tensor` of each, by name, one after another; all ranks call it with the same names, and take all."""
    cuts = cuts_of(model)
    for name, tensor in tensors.items():
        yield name, _whole(tensor, cuts.get(whole_name(name)))


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict of the model on one device, on every rank. All ranks call it."""
    state, cuts = {}, cuts_of(model)
    for name, tensor in model.state_dict().items():
        cut = cuts.get(whole_name(name))
        whole = _whole(tensor, cut)
        # What was gathered is a copy already.
        state[name] = whole.clone() if cut is None else whole
    return state


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads a state dict of the model on one device; every rank cuts its shares from it, without communication.

    Args:
        state: by name, whole tensors: [N, ...] where this rank holds [N/P, ...].

    Raises:
        ValueError: names are missing or unknown, or shapes do not fit.
    """
    targets = model.state_dict()
    if targets.keys() != state.keys():
        missing, unknown = sorted(targets.keys() - state.keys()), sorted(state.keys() - targets.keys())
        raise ValueError(
            f"the state dict does not fit the {type(model).__name__}: missing {missing[:5]}, unknown {unknown[:5]}"
        )
    cuts = cuts_of(model)
    local = {name: _local(name, whole, cuts.get(whole_name(name))) for name, whole in state.items()}
    for name, target in targets.items():
        if local[name].shape != target.shape:
            raise ValueError(
                f"{name} has shape {tuple(target.shape)} on this rank; got {tuple(local[name].shape)}"
            )
    for name, target in targets.items():
        # Nothing is copied before all names and shapes have been found to fit.
        value = local[name].to(target.device, target.dtype)
        if is_dtensor(target):
            from torch.distributed.tensor import distribute_tensor

            # src_data_rank=None: every rank has the whole, so each cuts its own shard.
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)
