"""Values within a call's arguments, by the paths that a policy holds.

    forward(self, video, grid, *args, **options)

    "video"      the argument                       "video.x"     a field of the object, or a key of the dict
    "grid.0"     an item of a tuple or list         "args.1"      an argument that has no name
    "mask"       also where it is in **options

What holds a value is copied where the value changes: the caller's own objects stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

Arguments = dict[str, Any]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors, of any shape, in nested lists, tuples and dicts, outputs of diffusers' models among them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def value_at(arguments: Arguments, path: str) -> Any:
    """The value that a path names; None where the argument is None or was not given.

    Raises:
        ValueError: what the argument holds has no such field, key or item.
    """
    name, *keys = path.split(".")
    value = arguments.get(name)
    for key in keys:
        value = None if value is None else _held(value, key, path)
    return value


def change_at(arguments: Arguments, path: str, change: Callable[[Any], Any]) -> None:
    """Puts `change(value)` in the place of the value that a path names; where it is None, everything stays.

    Raises:
        ValueError: what the argument holds has no such field, key or item.
    """
    name, *keys = path.split(".")
    if value_at(arguments, path) is not None:
        arguments[name] = _changed(arguments[name], keys, change, path)


def _changed(holder: Any, keys: list[str], change: Callable[[Any], Any], path: str) -> Any:
    if not keys:
        return change(holder)
    key, value = keys[0], _changed(_held(holder, keys[0], path), keys[1:], change, path)
    if isinstance(holder, (tuple, list)):
        items = list(holder)
        items[int(key)] = value
        return holder._make(items) if hasattr(holder, "_make") else type(holder)(items)
    changed = copy.copy(holder)
    if isinstance(holder, dict):
        changed[key] = value
    else:
        object.__setattr__(changed, key, value)  # a dataclass may be frozen
    return changed


def _held(holder: Any, key: str, path: str) -> Any:
    if isinstance(holder, (tuple, list)):
        if key.lstrip("-").isdigit() and -len(holder) <= int(key) < len(holder):
            return holder[int(key)]
        has = f"{len(holder)} items"
    elif isinstance(holder, dict):
        if key in holder:
            return holder[key]
        has = ", ".join(map(str, holder)) or "nothing"
    else:
        if hasattr(holder, key):
            return getattr(holder, key)
        has = ", ".join(vars(holder)) if hasattr(holder, "__dict__") else "no fields"
    raise ValueError(f"the policy names the argument {path!r}, but this {type(holder).__name__} has {has}")
