"""A defect put into our own code for one step: a text of one function replaced, its code swapped, and put back.

The function object stays, so every reference to it meets the defect: imports, tables, staticmethods of autograd
functions. Functions nested in it come along.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest import mock

from opensora_accel.verify.findings import Finding, Kind
from opensora_accel.verify.pool import RankPool
from opensora_accel.verify.report import Report
from opensora_accel.verify.results import Reference
from opensora_accel.verify.run import Run
from opensora_accel.verify.verify import verify
from tests.verify.meshes import Meshes


@dataclass(frozen=True)
class Edit:
    """`old`, which stands exactly once in the function, becomes `new`."""

    place: str
    """`package.module:Class.method`."""
    old: str
    new: str

    @property
    def module_name(self) -> str:
        return self.place.split(":")[0]

    @property
    def qualified_name(self) -> str:
        return self.place.split(":")[1]

    def apply(self) -> Iterator[None]:
        module = importlib.import_module(self.module_name)
        function = _function(module, self.qualified_name)
        original = function.__code__
        _forget_cached(module)
        function.__code__ = self.code(module)
        try:
            yield
        finally:
            function.__code__ = original
            _forget_cached(module)

    def code(self, module: ModuleType) -> CodeType:
        """Of the function with the defect."""
        assert module.__file__ is not None
        source = Path(module.__file__).read_text(encoding="utf-8")
        start, end = _extent(source, self.qualified_name)
        text = source[start:end]
        assert text.count(self.old) == 1, f"{self.place} has {self.old!r} {text.count(self.old)} times"
        mutated = source[:start] + text.replace(self.old, self.new) + source[end:]
        code = compile(mutated, module.__file__, "exec", dont_inherit=True)
        for name in self.qualified_name.split("."):
            code = next(each for each in code.co_consts if getattr(each, "co_name", None) == name)
        return code


@dataclass(frozen=True)
class Replacement:
    """An attribute of a module, replaced: tables that are data."""

    place: str
    value: Any

    def apply(self) -> Iterator[None]:
        module, name = self.place.split(":")
        with mock.patch.object(importlib.import_module(module), name, self.value):
            yield


@dataclass(frozen=True)
class Mutated:
    """The step, with edits in force on the ranks, and not on the single device."""

    step: Any
    edits: tuple[Edit | Replacement, ...]

    def __call__(self, *args: Any) -> Any:
        run = args[-1]
        assert isinstance(run, Run)
        if run.is_reference:
            return self.step(*args)
        with contextlib.ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(contextlib.contextmanager(edit.apply)())
            return self.step(*args)


@dataclass(frozen=True)
class Mutant:
    """One defect, where it is tried, and its right name: kind, axes, and the factor where there is one."""

    name: str
    edits: tuple[Edit | Replacement, ...]
    step: Any
    meshes: Meshes
    kind: Kind
    axes: tuple[str, ...]
    factor: str = ""
    timeout_s: float = 30
    reference: Reference | None = None
    """By default one batch for a step that builds its model itself, and else a batch for each data rank."""

    def verify(self, pool: RankPool) -> Report:
        model_fn = getattr(self.step, "model", None)
        return verify(
            Mutated(self.step, self.edits),
            model_fn,
            self.meshes,
            reference=self.reference or ("whole" if model_fn is None else "turns"),
            timeout_s=self.timeout_s,
            pool=pool,
        )

    def is_named_by(self, finding: Finding) -> bool:
        return (finding.kind, sorted(finding.axes), finding.factor) == (
            self.kind,
            sorted(self.axes),
            self.factor,
        )

    def __str__(self) -> str:
        return f"{self.name}: {' '.join(filter(None, [self.kind, self.factor, *self.axes]))}"


def _function(module: ModuleType, qualified_name: str) -> FunctionType:
    found: Any = module
    for name in qualified_name.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    found = found.fget if isinstance(found, property) else found
    found = found.func if isinstance(found, cached_property) else found
    found = inspect.unwrap(found)  # `once_differentiable` and other decorators
    assert isinstance(found, FunctionType), qualified_name
    return found


def _extent(source: str, qualified_name: str) -> tuple[int, int]:
    node: Any = ast.parse(source)
    for name in qualified_name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == name)
    lines = source.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1]))
    return start, start + sum(map(len, lines[node.lineno - 1 : node.end_lineno]))


def _forget_cached(module: ModuleType) -> None:
    namespace: Mapping[str, Any] = vars(module)
    for value in namespace.values():
        if getattr(value, "__module__", None) == module.__name__ and hasattr(value, "cache_clear"):
            value.cache_clear()
