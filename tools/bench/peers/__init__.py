"""Every side of the attention benchmark by name. Nothing of a peer is imported until it is asked to attend."""

from __future__ import annotations

import dataclasses
import importlib

from peers import best_case, deepspeed, diffusers, ours, ring_attention_pytorch, torch_native, yunchang
from peers.side import Side

MODULES = (ours, best_case, diffusers, torch_native, yunchang, deepspeed, ring_attention_pytorch)
SIDES: dict[str, Side] = {side.name: side for module in MODULES for side in module.SIDES}


def find_side(name: str) -> Side:
    """A side of the table, or "module:NAME" for one that is defined elsewhere, and is called that then.

    Raises:
        ValueError: there is no such side, or the object is not one.
    """
    if name in SIDES:
        return SIDES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"there is no side {name!r}; the sides are {', '.join(SIDES)}")
    side = getattr(importlib.import_module(module), attribute)
    if not isinstance(side, Side):
        raise ValueError(f"{name} is a {type(side).__name__}, not a Side")
    return dataclasses.replace(side, name=name)


def is_ours(name: str) -> bool:
    return name in SIDES and SIDES[name].kind == "ours"
