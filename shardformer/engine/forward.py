"""Where a forward of the model begins and ends, and the checkpoints within it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from opensora_accel.checkpoint import carrying
from shardformer.engine.tokens import Tokens

_CHECKPOINT = "_gradient_checkpointing_func"
"""What models of diffusers and transformers call to checkpoint a block, once that is enabled."""


def follow_forward(model: nn.Module, tokens: Tokens) -> Callable[[], None]:
    """Keeps `tokens` in step with the model's forwards; returns the function that undoes it."""
    running = ExitStack()

    def begin(*_: Any) -> None:
        tokens.begin()
        running.enter_context(carrying(tokens.carry))
        for module in carriers:
            _carry(module, tokens)

    def end(*_: Any) -> None:
        running.close()
        tokens.end()

    carriers = [module for module in model.modules() if hasattr(module, _CHECKPOINT)]
    # Also after an exception, so that the next forward does not meet this one's state.
    hooks = [
        model.register_forward_pre_hook(begin, prepend=True),
        model.register_forward_hook(end, always_call=True),
    ]

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for module in carriers:
            function = getattr(module, _CHECKPOINT)
            if isinstance(function, _Carrying):
                setattr(module, _CHECKPOINT, function.checkpoint)

    return undo


class _Carrying:
    """A model's own checkpoint function, which brings the state of the tokens along."""

    def __init__(self, checkpoint: Callable[..., Any], tokens: Tokens):
        self.checkpoint, self.tokens = checkpoint, tokens
        functools.update_wrapper(self, checkpoint, updated=())

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(self.tokens.carry(function), *args, **kwargs)


def _carry(module: nn.Module, tokens: Tokens) -> None:
    """At every forward: users enable checkpointing after `shard` too."""
    function = getattr(module, _CHECKPOINT)
    if function is not None and not isinstance(function, _Carrying):
        setattr(module, _CHECKPOINT, _Carrying(function, tokens))
