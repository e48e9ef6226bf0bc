"""Modules by the paths that a policy holds: `*` is any one name, `-1` and `0::2` items of a list as Python counts them.

In a model with `blocks.0` to `blocks.3`, the path `blocks.*.attn` names every block's attention, `blocks.-1` names
`blocks.3`, and `blocks.1::2` names `blocks.1` and `blocks.3`. A path that names nothing is an error which says what
stands where the path leaves the model.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence

from torch import nn

# Wrappers that call the module they hold, and nothing besides.
_TRANSPARENT = ("CheckpointWrapper", "OptimizedModule")
# A place counted from the end, or a slice.
_ITEMS = re.compile(r"-\d+|-?\d*:-?\d*(:\d*)?")


def find(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The modules that a path names, in order, with their full names.

    Raises:
        ValueError: it names none.
    """
    expression = _expression(model, path)
    modules = [(name, module) for name, module in model.named_modules() if expression.fullmatch(name)]
    if not modules:
        for name, module in model.named_modules():
            if _is_transparent(module):
                raise ValueError(_wrapped_already(name, module))
        raise ValueError(
            f"the policy names {path!r}, which fits no module of {type(model).__name__}{_near(model, path)}"
        )
    return modules


def names_several(path: str) -> bool:
    """Whether a path may name more than one module."""
    return "*" in path or ":" in path


def _expression(model: nn.Module, path: str) -> re.Pattern[str]:
    """What the full names of a path's modules match."""
    parts: list[str] = []
    for part in path.split("."):
        if part == "*":
            parts.append(r"[^.]+")
        elif _ITEMS.fullmatch(part):
            holder = re.compile(r"\.".join(parts))
            held = next((module for name, module in model.named_modules() if holder.fullmatch(name)), None)
            names = [] if held is None else [name for name, _child in held.named_children()]
            # Where there is none, the path stays and is reported as one that fits nothing.
            parts.append("|".join(map(re.escape, names[_slice(part)])) or re.escape(part))
            parts[-1] = f"(?:{parts[-1]})"
        else:
            parts.append(re.escape(part))
    return re.compile(r"\.".join(parts))


def _slice(part: str) -> slice:
    """`-1` or `0::2` as Python reads them."""
    if ":" not in part:
        return slice(int(part), int(part) + 1 or None)
    return slice(*(int(each) if each else None for each in part.split(":")))


def check_still_there(model: nn.Module, hooked: Mapping[str, nn.Module]) -> None:
    """Refuses a model in which a module that was hooked has been wrapped since.

    The wrapper's own layers, an adapter's for one, would see one rank's tokens.

    Raises:
        ValueError: a module was replaced.
    """
    for name, module in hooked.items():
        try:
            now: nn.Module | None = model.get_submodule(name)
        except AttributeError:
            now = None
        if now is not module and not _is_transparent(now):
            raise ValueError(
                f"{name} was replaced after shard() (by {type(now).__name__}); call shardformer.unshard(model), add "
                "adapters before it, then shard again"
            )


def children(model: nn.Module, path: str) -> list[nn.Module]:
    """The items of the list that a path names."""
    return [child for _name, module in find(model, path) for child in module.children()]


def check_argument(name: str, module: nn.Module, argument: str) -> inspect.Signature:
    """The signature of a module's forward, whose argument a path names (`opensora_accel.arguments`).

    Raises:
        ValueError: the forward does not have the argument, and does not take any by **kwargs.
    """
    argument, signature = argument.split(".")[0], inspect.signature(module.forward)
    takes_any = any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values())
    if argument not in signature.parameters and not takes_any:
        if _is_transparent(module):
            raise ValueError(_wrapped_already(name, module))
        raise ValueError(
            f"the policy names {name or 'the model'}'s argument {argument!r}, but the forward of "
            f"{type(module).__name__} takes {', '.join(signature.parameters)}"
        )
    return signature


def _is_transparent(module: nn.Module | None) -> bool:
    # fully_shard makes a class of its own of each that it shards, FSDPCheckpointWrapper, whose base is the wrapper's.
    return any(cls.__name__ in _TRANSPARENT for cls in type(module).__mro__)


def _wrapped_already(name: str, module: nn.Module) -> str:
    return f"{name} is wrapped already (by {type(module).__name__}); wrap it after shard()"


def _near(model: nn.Module, path: str) -> str:
    """What stands where the path leaves the model."""
    at, parts = model, path.split(".")
    for depth, part in enumerate(parts):
        names: Sequence[str] = [name for name, _child in at.named_children()]
        if part == "*" or _ITEMS.fullmatch(part):
            part = next(iter(names if part == "*" else names[_slice(part)]), part)
        if part not in names:
            where = ".".join(parts[:depth]) or "it"
            return f": {where} has {', '.join(names[:12]) or 'no modules'}{', …' if len(names) > 12 else ''}"
        at = dict(at.named_children())[part]
    return ""
