"""Whether a model is the one that a table was made for. A name says little: other packages have classes of that name.

A table of a package's class (`Policy.origin`) fits that class, and a subclass of it. A subclass may bring code of its
own, and so may a program that puts another forward or another attention processor into the model. Three ways, with
diffusers' Wan:

    def forward(self, x, ...):                            runs what the table speaks of, and something around it
        return super().forward(2 * x, ...)

    def forward(self, x, ...):                            computes what nobody has looked at: refused
        return self.proj_out(x)

    attn.processor = ProcessorOfSomebodyElse()            the same, where attention is computed: refused

Authors' own repositories are copied into others under any name. Their tables have no origin: they fit where the
functions that they name are there, with the arguments that they name. The first forward looks whether they are
called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from shardformer.functions import check_function, functions_of
from shardformer.paths import check_argument, children, find
from shardformer.policy.base import Policy
from shardformer.policy.unsupported import ELSEWHERE

# Packages whose code around a forward leaves it as it is: torch's own, and what this project puts on a model.
_OURS = ("torch", "shardformer", "opensora_accel")


def is_meant_for(model: nn.Module, policy: Policy) -> bool:
    """Whether the model is of a class that the table names, or of a subclass, and of the package that it names."""
    return any(_is_from(cls.__module__, policy.origin) for cls in _named(model, policy))


def misfit(model: nn.Module, policy: Policy) -> str | None:
    """Why a model that has the right name is not what the table speaks of; None where it is."""
    if not is_meant_for(model, policy):
        named = _named(model, policy)[0]
        home = named.__module__.split(".")[0]
        reason = ELSEWHERE.get((home, named.__name__))
        return f"the policy is for the class of {' or '.join(policy.origin)}, and this one is of {home}" + (
            f": {reason}" if reason else ""
        )
    for setting, reason in policy.unfit:
        config = getattr(model, "config", None)
        value = getattr(config if hasattr(config, setting) else model, setting, None)
        # A setting that is off, or empty, or that the model does not know, is in nobody's way.
        if value not in (None, False, (), []):
            return f"its {setting} is {value!r}, and {reason}"
    try:
        for path in policy.paths:
            find(model, path)
        for split in policy.split_inputs:
            for name, module in find(model, split.module):
                check_argument(name, module, split.argument)
        _check_positions(model, policy)
    except ValueError as error:
        return str(error)
    return _unknown_input(model, policy) or _foreign_code(model, policy)


def _named(model: nn.Module, policy: Policy) -> list[type]:
    return [cls for cls in type(model).__mro__ if cls.__name__ in policy.models]


def _is_from(module: str, packages: tuple[str, ...]) -> bool:
    return not packages or module.split(".")[0] in packages


def _unknown_input(model: nn.Module, policy: Policy) -> str | None:
    """An input that must be given, and of which the table does not say what it is."""
    known = policy.arguments.split()
    # A subclass may pass on what it is given as `*args, **kwargs`: then its base says what that is.
    base: Any = _named(model, policy)[0]
    takes = {**inspect.signature(base.forward).parameters, **inspect.signature(model.forward).parameters}
    for name, parameter in takes.items():
        if name == "self":
            continue
        is_named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if known and is_named and name not in known and parameter.default is parameter.empty:
            return f"its forward needs {name!r}, and the policy was made for {', '.join(known)}"
    return None


def _foreign_code(model: nn.Module, policy: Policy) -> str | None:
    """Code of another package that stands in the place of the package's own, in the model, a block or attention."""
    if not policy.origin:
        return None
    for what, method, owner, function in _code(model, policy):
        runs = inspect.unwrap(function)
        home = str(getattr(runs, "__module__", None))
        if not _is_from(home, (*policy.origin, *_OURS)) and not _calls(runs, method, owner, policy.origin):
            return f"{what} is of {home}, and does not call that of {' or '.join(policy.origin)}"
    return None


def _code(model: nn.Module, policy: Policy) -> Iterator[tuple[str, str, type, Callable[..., Any]]]:
    """What computes the tokens of each kind of module, once: a name for it, the method, its class and its function."""
    blocks = [module for entry in policy.blocks for path in (entry.module, *entry.alternating)
              for module in children(model, path)]  # fmt: skip
    names = {id(module): name for name, module in model.named_modules()}
    attentions = [module for path in policy.attentions for _name, module in find(model, path)]
    seen: set[Any] = set()
    for module in (model, *blocks, *attentions):
        name, processor = names[id(module)], getattr(module, "processor", None)
        forwards = [(f"{name}'s forward" if name else "its forward", "forward", module)]
        if processor is not None:
            method = "forward" if isinstance(processor, nn.Module) else "__call__"
            forwards.append((f"the processor of {name}", method, processor))
        for what, method, owner in forwards:
            function = getattr(owner, method)
            code = getattr(function, "__func__", function)
            if code not in seen:
                seen.add(code)
                yield what, method, type(owner), function


def _calls(function: Any, method: str, owner: type, packages: tuple[str, ...]) -> bool:
    """Whether a function calls what it takes the place of: as that of a base class, or one that it was given.

    A method's name alone says nothing: blocks have a forward too, which the model's may call.
    """
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return False
    names = set(_names_in(function.__code__))
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    held += [function.__globals__[name] for name in names if name in function.__globals__]
    bases = [cls for cls in owner.__mro__ if method in vars(cls) and _is_from(cls.__module__, packages)]
    named = {id(each) for each in held}
    is_named = "super" in names or any(id(cls) in named or cls.__name__ in names for cls in bases)
    if bases and method in names and is_named:
        return True
    originals = (inspect.unwrap(each) for each in held if callable(each))
    return any(
        getattr(each, "__name__", None) == method and _is_from(str(each.__module__), packages)
        for each in originals
    )


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 — an empty cell raises
    except ValueError:
        return False
    return True


def _names_in(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in a function's code, and in that of functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _check_positions(model: nn.Module, policy: Policy) -> None:
    """Positions are made inside attention, by functions that tell one copy of an author's code from another.

    Raises:
        ValueError: the model's package lacks one that the table names, or has it with other arguments.
    """
    for entry in policy.positions:
        for _holder, function in functions_of(model, entry.function):
            check_function(entry.function, function, (*entry.tables, *entry.tokens))
