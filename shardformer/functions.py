"""Functions of a model's own package, replaced while the model is sharded.

`F.scaled_dot_product_attention` and module hooks do not see a function that a model's package defines or imports for
itself: flash-attn's kernels, or a rotary embedding that is called inside attention. A policy names such functions.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

Function = Callable[..., Any]
_WRAPS = "_opensora_accel_wraps"


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


def replace_function(model: nn.Module, name: str, wrap: Callable[[Function], Function]) -> Callable[[], Any]:
    """Replaces the function `name` by `wrap(function)` wherever the model's packages hold it; returns the undo.

    Several models may replace the same function, and each takes back its own: of f → b(a(f)) the undo of a leaves b(f).
    A model that is gone has taken back its own too, as a package outlives it, and would keep what `wrap` refers to.

    Raises:
        ValueError: there is no such function.
    """
    attribute = name.rpartition(".")[2]
    # A function that several files import is held by each of them under its name.
    holders, key = [holder for holder, _ in functions_of(model, name)], object()

    def remove() -> None:
        for holder in holders:
            _wrap_again(holder, attribute, lambda wraps: wraps.pop(key, None))

    for holder in holders:
        _wrap_again(holder, attribute, lambda wraps: wraps.update({key: wrap}))
    undo = weakref.finalize(model, remove)
    undo.atexit = False
    return undo


def _wrap_again(holder: Any, attribute: str, change: Callable[[dict[object, Any]], Any]) -> None:
    """Changes what wraps a function: all of it is kept at the function that stands in its place."""
    found = vars(holder)[attribute]
    ours, original, before = getattr(found, _WRAPS, (None, found, {}))
    if ours is not found:  # the original, or what somebody else made of ours
        original, before = found, {}
    change(wraps := dict(before))
    if wraps == before:
        return
    function = original
    for wrap in wraps.values():
        function = wrap(function)
    if wraps:
        setattr(function, _WRAPS, (function, original, wraps))
    setattr(holder, attribute, function)


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
