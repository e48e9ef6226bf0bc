"""Hooks by which a model's tokens are spread over the ranks: on modules by their paths, in order, with their undo.

The engine puts on what a policy's entries say, and a policy's functions (`Policy.functions`) what no entry says. Both
do it through one `Spread`. With P = 3 ranks and 7 tokens, of which rank 1 has 3 4:

    change_arguments("blocks.0", "x", …)             blocks.0(x)   →  its own forward gets 2 of the 7 rows of x
    change_arguments("blocks.*", "num_tokens", …)    num_tokens=7  →  the forward of each gets 2
    change_output("blocks.-1", …)                    2 rows        →  its caller gets 7

Hooks of a module run in the order in which they are put on, and `unshard` takes off all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from opensora_accel.arguments import Arguments
from shardformer.paths import check_argument, find
from shardformer.spread.tokens import Tokens


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` kept out of compiled graphs. Not at import, as torch's compiler is loaded by it."""
    reason = "what crosses the edge of a sharded region depends on the forward that runs, which a graph cannot hold"
    return torch.compiler.disable(function, reason=reason)


@dataclass(frozen=True)
class Spread:
    """A model whose tokens are spread, and what puts hooks on it: what a policy's functions are handed."""

    model: nn.Module
    # How the tokens of the running forward are spread. Nothing of it is known while hooks are put on.
    tokens: Tokens
    # Takes back what was put on. What a function does to the model besides hooks, it adds the undo of.
    undo: ExitStack
    # The modules that were asked for, by their names: none of them may be replaced later.
    hooked: dict[str, nn.Module] = field(default_factory=dict)

    def modules(self, path: str) -> list[tuple[str, nn.Module]]:
        """The modules that a path names, in order, with their full names (`shardformer.paths`).

        Raises:
            ValueError: it names none.
        """
        modules = find(self.model, path)
        self.hooked.update(modules)
        return modules

    def change_arguments(self, path: str, names: str, change: Callable[[Arguments, str], None]) -> None:
        """Calls `change` with the arguments of each of the modules, before its forward runs, to be changed in place.

        Args:
            path: of the modules; "" is the model.
            names: the arguments that their forward must have, or paths into them, with blanks between.
            change: gets all that were given, by name, defaults not among them, and the module's name for messages.
                What the forward takes as **kwargs has names as well, and stands beside the others; its *args are one
                tuple.

        Raises:
            ValueError: there is no such module, or its forward lacks an argument.
        """
        for name, module in self.modules(path):
            for argument in names.split():
                check_argument(name, module, argument)
            hook = _argument_hook(inspect.signature(module.forward), name or type(module).__name__, change)
            self.undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def change_output(self, path: str, change: Callable[[Any, str], Any]) -> None:
        """Puts `change(output, name)` in the place of what each of the modules returns, `name` as above.

        Raises:
            ValueError: there is no such module.
        """
        for name, module in self.modules(path):
            # The name is bound here, because the hook runs when the loop is over.
            def hook(_module: nn.Module, _args: Any, output: Any, name: str = name) -> Any:
                return change(output, name or type(self.model).__name__)

            self.undo.callback(module.register_forward_hook(uncompiled(hook)).remove)


def _argument_hook(
    signature: inspect.Signature, name: str, change: Callable[[Arguments, str], None]
) -> Callable[..., Any]:
    """A pre-hook that binds what a forward of this signature gets by name, so that an argument is found however the
    caller passes it.
    """
    rest = next((name for name, p in signature.parameters.items() if p.kind == p.VAR_KEYWORD), None)

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> tuple[Any, Arguments]:
        bound = signature.bind(*args, **kwargs)
        arguments = {**bound.arguments, **bound.arguments.get(rest or "", {})}
        arguments.pop(rest or "", None)
        change(arguments, name)
        named = {name: value for name, value in arguments.items() if name in signature.parameters}
        if rest is not None:
            named[rest] = {name: value for name, value in arguments.items() if name not in named}
        bound.arguments = named
        return bound.args, bound.kwargs

    return uncompiled(hook)
