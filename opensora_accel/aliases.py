"""This package under another name: code written for Open-Sora imports `opensora.acceleration` as before.

    import opensora_accel
    opensora_accel.install_as("opensora.acceleration")

    from opensora.acceleration.parallel_states import set_sequence_parallel_group  # opensora_accel's own

A line in `sys.modules` is not enough for that: Python would load every submodule once more, under its other name, with
a registry of process groups of its own. So a finder hands out the modules that are loaded already.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# Submodules of Open-Sora's module that are no submodules of this package.
_ELSEWHERE = {"shardformer": "shardformer", "plugin": "shardformer.colossalai.plugin"}


def install_as(name: str) -> None:
    """Every later `import name.x` gives this package's `x`, the module itself and not a copy.

    Args:
        name: a dotted name, "opensora.acceleration". A parent package that is installed stays what it is; one that is
            not is made, empty.

    Raises:
        ValueError: no name, or one whose modules were imported already: they would live on beside ours.
    """
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f'{name!r} is no name of a module; pass one like "opensora.acceleration"')
    if any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        return
    loaded = [each for each in sys.modules if each == name or each.startswith(f"{name}.")]
    if loaded:
        raise ValueError(
            f"{', '.join(sorted(loaded))} was imported already; call opensora_accel.install_as({name!r}) before that"
        )
    sys.meta_path.insert(0, _Finder(name))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules below `name` among ours, and hands out those that are loaded."""

    def __init__(self, name: str):
        self.name = name

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self.name.startswith(f"{fullname}."):
            # A parent of the name: an empty package, unless one of that name is installed.
            others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
            if any(finder.find_spec(fullname, None) is not None for finder in others):
                return None
            return importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        if fullname != self.name and not fullname.startswith(f"{self.name}."):
            return None
        first, _, rest = fullname.removeprefix(self.name).removeprefix(".").partition(".")
        ours = (_ELSEWHERE[first],) if first in _ELSEWHERE else ("opensora_accel", first)
        target = ".".join(filter(None, (*ours, rest)))
        if importlib.util.find_spec(target) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, loader_state=target)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.loader_state)
        # Python writes the spec of the alias on the module that it gets; it keeps its own.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        module.__spec__ = spec.loader_state
