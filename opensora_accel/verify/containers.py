"""Tensors wherever an argument or a result holds them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten


def map_tensors(name: str, value: Any, function: Callable[[str, Tensor], Tensor]) -> Any:
    """`value` with `function(name, tensor)` for every tensor; itself where nothing has changed.

    In what torch takes apart (lists, dicts, named tuples), in dataclasses, and in what is like a dict.
    """
    leaves, structure = tree_flatten_with_path(value)
    mapped = [_map_leaf(name + keystr(path), leaf, function) for path, leaf in leaves]
    if all(new is old for new, (_, old) in zip(mapped, leaves, strict=True)):
        return value
    return tree_unflatten(mapped, structure)


def _map_leaf(name: str, leaf: Any, function: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return function(name, leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        values = {each.name: getattr(leaf, each.name) for each in dataclasses.fields(leaf)}
        mapped = {key: map_tensors(f"{name}.{key}", value, function) for key, value in values.items()}
        if all(mapped[key] is value for key, value in values.items()):
            return leaf
        changed = copy.copy(leaf)
        for key, value in mapped.items():
            object.__setattr__(changed, key, value)  # a frozen one, too
        return changed
    if isinstance(leaf, MutableMapping):
        mapped = {key: map_tensors(f"{name}[{key!r}]", value, function) for key, value in leaf.items()}
        if all(mapped[key] is value for key, value in leaf.items()):
            return leaf
        like_dict = copy.copy(leaf)
        like_dict.update(mapped)
        return like_dict
    return leaf
