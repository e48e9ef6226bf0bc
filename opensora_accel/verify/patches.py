"""What a step leaves changed in its process: a class whose method was replaced, a function of a module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

_ALWAYS = ("torch.nn.functional",)


class Patches:
    """The classes of a model, and the modules that define them and the step, as they were before the step ran."""

    def __init__(self, model: nn.Module | None, step: Callable[..., Any]):
        classes = {
            cls for module in (model.modules() if model is not None else ()) for cls in type(module).__mro__
        }
        names = {*_ALWAYS, getattr(step, "__module__", ""), *(cls.__module__ for cls in classes)}
        self._owners: list[Any] = [cls for cls in classes if cls is not object]
        self._owners += [sys.modules[name] for name in sorted(names) if name in sys.modules]
        self._before = [_functions(owner) for owner in self._owners]

    def left(self) -> bool:
        """Whether any function was exchanged and not put back: the next step in this process would meet it."""
        return any(
            now.keys() != before.keys()
            or any(now[n][0] is not f or now[n][1] is not c for n, (f, c) in before.items())
            for now, before in zip(map(_functions, self._owners), self._before, strict=True)
        )


def _functions(owner: Any) -> dict[str, tuple[Any, Any]]:
    """By name, with their code: a decorator may keep the function and exchange what it does."""
    return {
        name: (value, getattr(value, "__code__", None))
        for name, value in list(vars(owner).items())
        if callable(value) or isinstance(value, (staticmethod, classmethod, property))
    }
