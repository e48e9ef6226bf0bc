"""A package whose names are loaded when they are first used, as SPEC 1 of Scientific Python describes it.

What the package hands out stands once, where type checkers and editors read it, as imports under TYPE_CHECKING:

    if TYPE_CHECKING:
        from opensora_accel.profiler.time import profile

    __all__ = ["profile"]
    __getattr__, __dir__ = lazy.attach(__name__)

`from opensora_accel.profiler import profile` then loads `profiler/time.py`, and what else the package hands out waits.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The package's `__getattr__`, which loads a name from where an import under TYPE_CHECKING has it, and `__dir__`.

    A name must not be that of a module of the package: once loaded, the module would take its place.
    """

    def __getattr__(name: str) -> Any:
        if not name.startswith("__"):
            if home := _homes(package).get(name):
                return getattr(importlib.import_module(home), name)
            if name in vars(sys.modules[package])["__all__"]:
                return importlib.import_module(f"{package}.{name}")  # a module that the package hands out
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """What is there already, and what may be loaded: for completion."""
        own = vars(sys.modules[package])
        return sorted({*own, *own["__all__"]})

    return __getattr__, __dir__


@functools.cache
def _homes(package: str) -> Mapping[str, str]:
    """The module of every name that the package imports under TYPE_CHECKING."""
    loader: Any = vars(sys.modules[package])["__loader__"]
    tree = ast.parse(loader.get_source(package))
    blocks = [
        node.body for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
