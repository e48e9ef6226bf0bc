"""How the engine looks into a model's forward: hooks on modules, and where a forward of the model begins and ends.

Everything here is undone by the ExitStack that it is given.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from opensora_accel.arguments import Arguments
from opensora_accel.checkpoint import preserve_state, with_preserved_state
from shardformer.engine.agreement import Agreement
from shardformer.engine.decisions import watch_decisions
from shardformer.engine.tokens import Tokens
from shardformer.paths import check_still_there

# Attributes by which modules checkpoint a part of theirs: in diffusers and transformers, in torch's own wrapper.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` kept out of compiled graphs. Not at import, as torch's compiler is loaded by it."""
    reason = "what crosses the edge of a sharded region depends on the forward that runs, which a graph cannot hold"
    return torch.compiler.disable(function, reason=reason)


def change_arguments(
    module: nn.Module, signature: inspect.Signature, change: Callable[[Arguments], None], undo: ExitStack
) -> None:
    """Calls `change` with a module's arguments by name before its forward runs, defaults not among them.

    What a forward takes as **kwargs has names as well, and stands beside the others; its *args are one tuple.
    """
    rest = next((name for name, p in signature.parameters.items() if p.kind == p.VAR_KEYWORD), None)

    @uncompiled
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> tuple[Any, Arguments]:
        # Bound by name, so that an argument is found however the caller passes it.
        bound = signature.bind(*args, **kwargs)
        arguments = {**bound.arguments, **bound.arguments.get(rest or "", {})}
        arguments.pop(rest or "", None)
        change(arguments)
        named = {name: value for name, value in arguments.items() if name in signature.parameters}
        if rest is not None:
            named[rest] = {name: value for name, value in arguments.items() if name not in named}
        bound.arguments = named
        return bound.args, bound.kwargs

    undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def change_output(module: nn.Module, change: Callable[[Any], Any], undo: ExitStack) -> None:
    """Puts `change(output)` in the place of what a module returns."""

    @uncompiled
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return change(output)

    undo.callback(module.register_forward_hook(hook).remove)


def follow_forward(
    model: nn.Module, tokens: Tokens, hooked: Mapping[str, nn.Module], undo: ExitStack
) -> None:
    """Keeps `tokens` in step with the model's forwards.

    `hooked`: the modules that a policy names, by their paths.
    """
    running = ExitStack()
    # One for each model that is sharded, because it counts that model's forwards.
    agreement = Agreement(tokens.group)

    @uncompiled
    def begin(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # First, as all that follows would be wrong with a part of the model that is wrapped.
        check_still_there(model, hooked)
        agreement.check(model, args, kwargs)
        running.close()  # of a forward that another hook of the model ended by an error
        tokens.begin()
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
