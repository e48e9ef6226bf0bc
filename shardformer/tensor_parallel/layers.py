"""Forwards of layers whose weights are shares: the layers keep their classes, their names and their parameters.

A feed-forward layer on P = 3 ranks, with x [S, C] whole on every rank:

    up      x enters (nothing now; in backward its gradient is summed over ranks), x · upᵀ is [S, 12/3]
    GELU    each rank on its own 4 channels
    down    [S, 4] · downᵀ is a term of [S, C]; the terms are summed over ranks, and then the bias is added, once
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from opensora_accel.wrapping import Forward, wrap_forward
from shardformer.tensor_parallel.derive import Exchange, Flow

Undo = Callable[[], None]


class Entrance:
    """The way into a region, once for every tensor.

    Queries, keys and values take one tensor. Copied once for all of them, it gets their gradients added up before
    the all-reduce: one instead of three. `forget` must follow the region's forward, or the last graph stays alive.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._entered: list[tuple[Tensor, int, Tensor]] = []

    def __call__(self, exchange: Exchange, input_: Tensor) -> Tensor:
        """input_ → the copy that all layers of the region take."""
        if not (torch.is_grad_enabled() and input_.requires_grad):
            return input_  # nothing comes back
        # The same object with other values, as after a change in place, has to enter again.
        for before, version, after in self._entered:
            if before is input_ and version == input_._version:
                return after
        after = exchange(input_, self._group)
        self._entered.append((input_, input_._version, after))
        return after

    def forget(self) -> None:
        """Lets go of the tensors that entered."""
        self._entered.clear()


def share_linear(module: nn.Linear, flow: Flow, entrance: Entrance, group: dist.ProcessGroup) -> Undo:
    """Runs a linear layer on its share of the weight; returns the function that undoes it."""

    def wrap(original: Forward) -> Forward:
        def forward(input: Tensor) -> Tensor:
            """[..., in or in/P] → [..., out/P or out], as the weight is cut."""
            x = input if flow.enter is None else entrance(flow.enter, input)
            if flow.leave is None:
                # Column-parallel: the layer's own forward, which finds fewer rows in its weight and its bias.
                return original(x)
            # The bias after the sum: before it, every rank would add one.
            out = flow.leave(F.linear(x, module.weight), group)
            return out if module.bias is None else out + module.bias.to(out.dtype)

        return forward

    return wrap_forward(module, wrap)


def share_region(module: nn.Module, entrance: Entrance) -> Undo:
    """Forgets at the end of the module's forward what entered in it."""

    def wrap(original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                entrance.forget()

        return forward

    return wrap_forward(module, wrap)


def reduce_gradients(module: nn.Module, exchange: Exchange, group: dist.ProcessGroup) -> Undo:
    """Sums the gradients of a module's own parameters over ranks that each apply it to a share.

    The module computes with the parameter passed through `exchange`. Not with a hook on the parameter: FSDP2 puts
    others in its place.
    """

    def wrap(original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            own = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
            # Attributes of the instance are found before parameters.
            vars(module).update({name: exchange(parameter, group) for name, parameter in own.items()})
            try:
                return original(*args, **kwargs)
            finally:
                for name in own:
                    del vars(module)[name]

        return forward

    return wrap_forward(module, wrap)
