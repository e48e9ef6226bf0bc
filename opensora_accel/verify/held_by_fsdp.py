"""What FSDP1 holds in flat pieces, whole again and under its own names; and what FSDP2 holds back."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from opensora_accel.verify.parameters import named, plain_name, whole


@dataclass
class Seen:
    """What a step did with FSDP."""

    roots: list[FullyShardedDataParallel] = field(default_factory=list)
    """FSDP1 modules: the outermost one holds what it wraps, not the reverse."""
    is_reduced: dict[nn.Module, bool] = field(default_factory=dict)
    """FSDP2 modules that were told whether to add up gradients over replicas."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        make: Any = FullyShardedDataParallel.__init__
        tell = FSDPModule.set_requires_all_reduce

        def init(module: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
            make(module, *args, **kwargs)
            self.roots.append(module)

        def set_requires_all_reduce(module: Any, requires_all_reduce: bool, *, recurse: bool = True) -> None:
            self.is_reduced |= dict.fromkeys(module.modules() if recurse else [module], requires_all_reduce)
            tell(module, requires_all_reduce, recurse=recurse)

        with (
            mock.patch.object(FullyShardedDataParallel, "__init__", init),
            mock.patch.object(FSDPModule, "set_requires_all_reduce", set_requires_all_reduce),
        ):
            yield

    def held_back(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """The axes of replicas over which FSDP2 was told not to add up a gradient, of those that it does not give."""
        off = {
            parameter
            for module, is_reduced in self.is_reduced.items()
            if not is_reduced
            for parameter in module.parameters(recurse=False)
        }
        return {
            name: tuple(
                axis
                for axis, placement in zip(
                    parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False
                )
                if isinstance(placement, Replicate)
            )
            for name, parameter in named(model)
            if isinstance(parameter, DTensor) and parameter.grad is None and parameter in off
        }


class Flat:
    """The parameters of `model` that FSDP1 has flattened; `made` are the FSDP1 modules that the step made."""

    def __init__(self, model: nn.Module, made: list[FullyShardedDataParallel], names: list[str]):
        self._names = names
        self._roots = dict(_roots(model, made))
        self._ids = {id(parameter) for root in self._roots for parameter in root.parameters()}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._ids

    def whole(self, read: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        """What `read` finds at each, in the shapes that they had before, by name.

        A state dict of an optimizer is what FSDP1 knows to take apart: here that of one whose state is `read`.

        Communication: an all-gather for each FSDP1 module.
        """
        found: dict[str, Tensor] = {}
        for root, prefix in self._roots.items():
            optimizer = torch.optim.SGD(root.parameters(), lr=0.0)
            for parameter in root.parameters():
                value = read(parameter)
                if value is not None:
                    optimizer.state[parameter]["value"] = value.detach().clone()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a call that is to be replaced some day
                states = FullyShardedDataParallel.full_optim_state_dict(root, optimizer, rank0_only=False)[
                    "state"
                ]
            for name, state in states.items():
                if "value" in state:
                    found[plain_name(prefix + name, self._names)] = whole(state["value"])
        return found


def _roots(
    model: nn.Module, made: list[FullyShardedDataParallel]
) -> Iterator[tuple[FullyShardedDataParallel, str]]:
    """FSDP1 modules that lie in no other one, and where they lie in the model."""
    inside = {module: name for name, module in model.named_modules()}
    each = dict.fromkeys([*made, *(m for m in inside if isinstance(m, FullyShardedDataParallel))])
    for root in each:
        if not any(root is not other and root in set(other.modules()) for other in each):
            if root in inside:
                yield root, f"{inside[root]}." if inside[root] else ""
            elif root.module is model:
                yield root, ""
