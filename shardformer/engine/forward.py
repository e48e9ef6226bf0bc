"""Where a forward of the model begins and ends, and the checkpoints within it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from opensora_accel.checkpoint import carried, carrying
from shardformer.engine.agreement import Agreement
from shardformer.engine.boundaries import uncompiled
from shardformer.engine.tokens import Tokens
from shardformer.paths import check_still_there

_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes by which modules checkpoint a part of theirs: in diffusers and transformers, in torch's own wrapper."""


def follow_forward(model: nn.Module, tokens: Tokens, hooked: Mapping[str, nn.Module]) -> Callable[[], None]:
    """Keeps `tokens` in step with the model's forwards; returns the function that undoes it.

    `hooked`: the modules that a policy names, by their paths.
    """
    running = ExitStack()
    agreement = Agreement(tokens.group)
    check_agreement = uncompiled(agreement.check)

    def begin(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_still_there(model, hooked)
        check_agreement(model, args, kwargs)
        running.close()  # of a forward that another hook of the model ended
        tokens.begin()
        running.enter_context(tokens.as_running())
        running.enter_context(carrying(tokens.carry))
        for module in model.modules():  # at every forward: users enable checkpointing after `shard` too
            _carry(module)

    def end(*_: Any) -> None:
        running.close()
        tokens.end()

    # Also after an exception, so that the next forward does not meet this one's state.
    hooks = [
        model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
        model.register_forward_hook(end, always_call=True),
    ]

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for module in model.modules():
            for name in _CHECKPOINTS:
                function = vars(module).get(name)
                if isinstance(function, _Carrying):
                    setattr(module, name, function.checkpoint)

    return undo


class _Carrying:
    """A model's own checkpoint function, which brings along the state of every forward that is running.

    Of every one: this model may be a part of another that is sharded as well.
    """

    def __init__(self, checkpoint: Callable[..., Any]):
        self.checkpoint = checkpoint
        functools.update_wrapper(self, checkpoint, updated=())

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(carried(function), *args, **kwargs)


def _carry(module: nn.Module) -> None:
    for name in _CHECKPOINTS:
        function = vars(module).get(name)
        if callable(function) and not isinstance(function, _Carrying):
            setattr(module, name, _Carrying(function))
