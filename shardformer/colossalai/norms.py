"""Norm swaps by the class of the parent, which is how ColossalAI finds a module."""

from __future__ import annotations

from torch import nn

from shardformer.modeling import NORMS
from shardformer.paths import find
from shardformer.policy import Policy


def norm_replacements(model: nn.Module, table: Policy) -> dict[type, dict[str, type]]:
    """The norms that the table swaps, as ColossalAI names them: class of the parent, name in it, new class.

    Raises:
        ValueError: that names a module besides them, as another instance of the parent's class has something else
            under that name, or a norm that the table leaves alone.
    """
    found: dict[type, dict[str, type]] = {}
    swapped: set[int] = set()
    for swap in table.norm_swaps:
        target = NORMS[swap.target]
        for _name, scope in find(model, swap.module):
            for parent in scope.modules():
                for suffix, child in parent.named_children():
                    if type(child).__name__ in swap.sources and type(child) is not target:
                        found.setdefault(type(parent), {})[suffix] = target
                        swapped.add(id(child))
    for name, module in model.named_modules():
        for suffix in found.get(type(module), {}):
            other = getattr(module, suffix, None)
            if other is not None and id(other) not in swapped:
                raise ValueError(
                    f"ColossalAI replaces {suffix!r} in every {type(module).__name__}, but {name}.{suffix} is a "
                    f"{type(other).__name__} that the policy leaves alone; use shardformer.shard(model, plan)"
                )
    return found
