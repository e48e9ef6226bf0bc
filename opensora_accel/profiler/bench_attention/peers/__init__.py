"""Every side by name. Nothing of a peer is imported until it is asked to attend."""

from __future__ import annotations

import dataclasses
import importlib

from opensora_accel.profiler.bench_attention import ours
from opensora_accel.profiler.bench_attention.peers import (
    deepspeed,
    diffusers,
    ring_attention_pytorch,
    torch_native,
    yunchang,
)
from opensora_accel.profiler.bench_attention.side import Side

ROOMS = (ours, diffusers, torch_native, yunchang, deepspeed, ring_attention_pytorch)
SIDES: dict[str, Side] = {side.name: side for room in ROOMS for side in room.SIDES}


def find_side(name: str) -> Side:
    """A side of the table, or "module:NAME" for one that is defined elsewhere, and is called that then."""
    if name in SIDES:
        return SIDES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"there is no side {name!r}; the sides are {', '.join(SIDES)}")
    side = getattr(importlib.import_module(module), attribute)
    if not isinstance(side, Side):
        raise ValueError(f"{name} is a {type(side).__name__}, not a Side")
    return dataclasses.replace(side, name=name)


__all__ = ["SIDES", "find_side"]
