"""What a table replaces in a model, by the class of the parent, which is how ColossalAI finds a module."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from shardformer.policy import Policy


def norm_replacements(model: nn.Module, table: Policy) -> dict[type, dict[str, type]]:
    """The norms that the table replaces, as ColossalAI names them: class of the parent, name in it, new class.

    It replaces them to see which they are, and puts them back.

    Raises:
        ValueError: that names a module besides them, as another instance of the parent's class has something else
            under that name, or a norm that the table leaves alone.
    """
    held = [(parent, *each) for parent in model.modules() for each in parent.named_children()]
    replacements: dict[type, dict[str, type]] = {}
    swapped: set[int] = set()
    with ExitStack() as undo:
        for replace in table.replacements:
            undo.callback(replace(model))
        for parent, suffix, child in held:
            now = getattr(parent, suffix)
            if now is not child:
                replacements.setdefault(type(parent), {})[suffix] = type(now)
                swapped.add(id(child))
    for name, module in model.named_modules():
        for suffix in replacements.get(type(module), {}):
            other = getattr(module, suffix, None)
            if other is not None and id(other) not in swapped:
                raise ValueError(
                    f"ColossalAI replaces {suffix!r} in every {type(module).__name__}, but {name}.{suffix} is a "
                    f"{type(other).__name__} that the policy leaves alone; use shardformer.shard(model, plan)"
                )
    return replacements
