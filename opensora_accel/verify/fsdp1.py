"""What FSDP1 holds in flat pieces, whole again and under its own names."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from opensora_accel.verify.parameters import plain_name, whole


@contextlib.contextmanager
def noting_roots(roots: list[FullyShardedDataParallel]) -> Iterator[None]:
    """Within it every FSDP1 module that is made is noted: the outermost one holds what it wraps, not the reverse."""
    make: Any = FullyShardedDataParallel.__init__

    def init(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        roots.append(self)

    with mock.patch.object(FullyShardedDataParallel, "__init__", init):
        yield


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
