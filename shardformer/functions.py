"""Functions of a model's own package, replaced while the model is sharded.

`F.scaled_dot_product_attention` and module hooks do not see a function that a model's package defines or imports for
itself: flash-attn's kernels, or a rotary embedding that is called inside attention. A policy names such functions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from torch import nn

Function = Callable[..., Any]


def packages_of(model: nn.Module) -> list[ModuleType]:
    """The files that define the classes of the model's modules, except torch's, and their siblings in a package."""
    homes = {type(module).__module__ for module in model.modules()}
    homes = {home for home in homes if home.split(".")[0] != "torch"}
    folders = {home.rpartition(".")[0] for home in homes} - {""}
    # A copy of the table, which another thread may add to meanwhile.
    imported = list(sys.modules.items())
    return [file for home, file in imported if home in homes or home.rpartition(".")[0] in folders]


def functions_of(model: nn.Module, name: str) -> list[tuple[Any, Function]]:
    """What holds a function of the model's packages, a file or a class, and the function.

    Args:
        name: of a function ("rope_apply"), of a method ("RoPE3D.forward"), or of a function of any package that the
            model imports where it calls it ("flash_attn.flash_attn_func").

    Raises:
        ValueError: there is no such function.
    """
    holder_name, _, attribute = name.rpartition(".")
    package = packages_of(model)
    holders: list[Any]
    if not holder_name:
        holders = package
    elif holder_name in sys.modules:
        holders = [sys.modules[holder_name]]
    else:
        classes = (vars(each).get(holder_name) for each in package)
        holders = list({id(cls): cls for cls in classes if isinstance(cls, type)}.values())
    functions = [
        (holder, vars(holder)[attribute]) for holder in holders if callable(vars(holder).get(attribute))
    ]
    if not functions:
        raise ValueError(
            f"the policy names the function {name!r}, which the package of {type(model).__name__} "
            f"({type(model).__module__}) does not have; import what defines it before shard(), or correct the name"
        )
    return functions


def replace_function(model: nn.Module, name: str, wrap: Callable[[Function], Function]) -> Callable[[], None]:
    """Replaces the function `name` by `wrap(function)` wherever the model's packages hold it; returns the undo.

    Raises:
        ValueError: there is no such function.
    """
    attribute = name.rpartition(".")[2]
    undo = ExitStack()
    # A function that several files import is held by each of them under its name.
    for holder, original in functions_of(model, name):
        setattr(holder, attribute, wrap(original))
        undo.callback(setattr, holder, attribute, original)
    return undo.close


def check_function(name: str, function: Function, arguments: tuple[str, ...]) -> inspect.Signature:
    """The signature of a function that a policy names.

    Raises:
        ValueError: it does not have one of the arguments.
    """
    signature = inspect.signature(function)
    for argument in arguments:
        if argument not in signature.parameters:
            raise ValueError(
                f"the policy names {name}'s argument {argument!r}, but it takes {', '.join(signature.parameters)}"
            )
    return signature
