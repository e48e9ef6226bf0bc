"""A user's Python file that defines `step(model, run)` and `model_fn()`."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from opensora_accel.verify.on_cpu import flash_attn_stand_in


@dataclass(frozen=True)
class StepFile:
    """The file, which every process loads for itself."""

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise FileNotFoundError(
                f"there is no file {self.path}; --step names a Python file with step and model_fn"
            )
        module = self.load()
        for name, signature in (("step", "step(model, run)"), ("model_fn", "model_fn()")):
            if not callable(getattr(module, name, None)):
                raise ValueError(
                    f"{self.path} defines no {signature}; `opensora-accel verify --help` shows a step file"
                )

    def load(self) -> ModuleType:
        """Once in each process; what the file imports may lie beside it."""
        path = self.path.resolve()
        name = f"_step_file_{path.stem}"
        if name not in sys.modules:
            if str(path.parent) not in sys.path:
                sys.path.insert(0, str(path.parent))
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise ValueError(f"{self.path} cannot be loaded as Python")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                with flash_attn_stand_in():
                    spec.loader.exec_module(module)
            except BaseException as error:
                del sys.modules[name]
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise ValueError(
                    f"{self.path} cannot be loaded{_place(error, path)}: {_words(error)}"
                ) from error
        return sys.modules[name]

    @property
    def meshes(self) -> Sequence[Mapping[str, int]] | None:
        """`MESHES` of the file, where it has some."""
        return getattr(self.load(), "MESHES", None)

    def function(self, name: str) -> StepFunction:
        return StepFunction(self, name)


def _place(error: BaseException, path: Path) -> str:
    """The line of the file in which `error` arose, as words to append."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f" (line {error.lineno} of {Path(error.filename or path).name})"
    return f" (line {frames[-1].lineno})" if frames else ""


def _words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return 'it ends the program while it is imported; put that under `if __name__ == "__main__":`'
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"


@dataclass(frozen=True)
class StepFunction:
    """A function of the file, as something that can be sent to another process."""

    file: StepFile
    name: str

    def __call__(self, *arguments: Any) -> Any:
        return getattr(self.file.load(), self.name)(*arguments)
