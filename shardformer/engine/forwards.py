"""Where a forward of a model begins and ends: what is known of its tokens is kept in between, and forgotten."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from opensora_accel.checkpoint import preserve_state, with_preserved_state
from shardformer.engine.agreement import Agreement
from shardformer.engine.decisions import watch_decisions
from shardformer.paths import check_still_there
from shardformer.spread import Spread, uncompiled

# Attributes by which modules checkpoint a part of theirs: in diffusers and transformers, in torch's own wrapper.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


def follow_forward(spread: Spread) -> None:
    """Keeps `spread.tokens` in step with the model's forwards.

    Put on last: its first hook comes before all others, also of a model whose own inputs are split.
    """
    model, tokens, undo, running = spread.model, spread.tokens, spread.undo, ExitStack()
    # One for each model that is sharded, because it counts that model's forwards.
    agreement = Agreement(tokens.group)

    @uncompiled
    def begin(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # First, as all that follows would be wrong with a part of the model that is wrapped.
        check_still_there(model, spread.hooked)
        is_compared = agreement.check(
            model, args, kwargs, None if tokens.packed is None else tokens.packed.digest
        )
        running.close()  # of a forward that another hook of the model ended by an error
        tokens.begin(is_compared)
        running.enter_context(tokens.as_running())
        running.enter_context(preserve_state(tokens.preserve))
        running.enter_context(watch_decisions(model, tokens))
        for module in model.modules():  # at every forward: users enable checkpointing after `shard` too
            for name in _CHECKPOINTS:
                function = vars(module).get(name)
                if callable(function) and not isinstance(function, _StatePreserving):
                    # In the place of the user's function, which `release` puts back.
                    setattr(module, name, _StatePreserving(function))

    @uncompiled
    def end(*_: Any) -> None:
        running.close()
        tokens.end()

    def release() -> None:
        for module in model.modules():
            for name in _CHECKPOINTS:
                function = vars(module).get(name)
                if isinstance(function, _StatePreserving):
                    setattr(module, name, function.checkpoint)

    undo.callback(release)
    undo.callback(model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove)
    # Also after an exception, so that the next forward does not meet this one's state.
    undo.callback(model.register_forward_hook(end, always_call=True).remove)


class _StatePreserving:
    """A model's own checkpoint function, which brings along the state of every forward that is running.

    There may be several, as this model may be a part of another one that is sharded too.
    """

    def __init__(self, checkpoint: Callable[..., Any]):
        self.checkpoint = checkpoint
        functools.update_wrapper(self, checkpoint, updated=())

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(with_preserved_state(function), *args, **kwargs)
