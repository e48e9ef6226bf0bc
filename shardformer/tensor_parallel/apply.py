"""`shard_tensors`: cuts the parameters that a table names, and runs the layers on their shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardformer.policy import TensorRegion
from shardformer.tensor_parallel.cut import Cut
from shardformer.tensor_parallel.derive import derive_shared
from shardformer.tensor_parallel.layers import (
    Entrance,
    Undo,
    reduce_gradients,
    share_linear,
    share_region,
)
from shardformer.tensor_parallel.plan import PlannedRegion, plan_region
from shardformer.tensor_parallel.state import ATTRIBUTE, TensorShards


def shard_tensors(model: nn.Module, regions: Sequence[TensorRegion], group: dist.ProcessGroup) -> Undo:
    """Cuts a model's layers between the P ranks of `group`; returns the function that undoes it.

    A weight [out, in] becomes [out/P, in] (ColumnParallel) or [out, in/P] (RowParallel).

    Every rank holds the same whole model before, calls the sharded one with the same input, gets the same output and
    computes the same loss. Parameters keep their names and identity; their data, and a gradient that is there already,
    become this rank's shares. Heads that do not divide are shared unevenly.

    Call it before checkpointing is applied and before parameters are sharded by FSDP2, and undo it after those.

    Communication: none here. In forward one all-reduce of the output of each RowParallel layer; in backward one of
    the gradient of each tensor that enters ColumnParallel layers, and one of each gradient of a `shared` norm. Undoing
    gathers each share once: all ranks call it. Whole copies are not kept, as they would take the memory that was won.

    Raises:
        ValueError: a table that does not fit the model, before anything is changed.
    """
    if hasattr(model, ATTRIBUTE):
        raise ValueError(f"this {type(model).__name__} is tensor-parallel already; undo that first")
    planned = [each for region in regions for each in plan_region(model, region, group.size(), group.rank())]
    cuts = _cuts_by_name(model, planned)
    # Whatever fails on the way is undone; only at the end does the stack outlive this block.
    with ExitStack() as undo:
        for region in planned:
            _share(region, group, undo)
        # Parameters come last, when nothing can be refused any more.
        for layer in (layer for region in planned for layer in region.layers):
            for name, cut in layer.cuts.items():
                undo.callback(_cut_parameter(layer.module, name, cut, group))
        setattr(model, ATTRIBUTE, TensorShards(group, cuts))
        undo.callback(delattr, model, ATTRIBUTE)
        return undo.pop_all().close


def _cuts_by_name(model: nn.Module, planned: Sequence[PlannedRegion]) -> dict[str, Cut]:
    layers = [layer for region in planned for layer in region.layers]
    regions = Counter(layer.name for layer in layers)
    # A tied weight would be cut in the other module as well, which knows nothing of it.
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for layer in layers:
        if regions[layer.name] > 1 or holders[id(layer.module.weight)] > 1:
            raise ValueError(
                f"{layer.name} is in two regions, or another module holds its weight too; a weight can be cut in one "
                "way only"
            )
    return {f"{layer.name}.{name}": cut for layer in layers for name, cut in layer.cuts.items()}


def _share(region: PlannedRegion, group: dist.ProcessGroup, undo: ExitStack) -> None:
    # One for the region, so that what enters several of its layers is reduced once in backward.
    entrance = Entrance(group)
    for layer in region.layers:
        if isinstance(layer.module, nn.Linear):  # whole numbers enter an embedding: nothing comes back
            undo.callback(share_linear(layer.module, layer.flow, entrance, group))
        undo.callback(_set_attribute(layer.module, *layer.width))
    for module in region.shared:
        undo.callback(reduce_gradients(module, derive_shared(), group))
    for path, value in region.attributes.items():
        undo.callback(_set_attribute(region.module, path, value))
    undo.callback(share_region(region.module, entrance))


def _set_attribute(module: nn.Module, path: str, value: int) -> Undo:
    *parents, name = path.split(".")
    owner = attrgetter(".".join(parents))(module) if parents else module
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _cut_parameter(module: nn.Module, name: str, cut: Cut, group: dist.ProcessGroup) -> Undo:
    """Makes a parameter this rank's shares.

    The undo looks the parameter up again, because a model that has left the meta device has other ones.
    """
    _convert(getattr(module, name), lambda whole: cut.local(whole, group.rank()))
    return lambda: _convert(getattr(module, name), lambda local: cut.whole(local, group))


@torch.no_grad()
def _convert(parameter: nn.Parameter, convert: Callable[[Tensor], Tensor]) -> None:
    """Replaces the data of a parameter, and its gradient where there is one."""
    # The gradient is taken off while shapes differ, and put back once both are converted.
    grad, parameter.grad = parameter.grad, None
    parameter.data = convert(parameter.data)
    if grad is not None:
        parameter.grad = convert(grad)
