"""A file with a user's step in it, as a module."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from opensora_accel.documents import open_plain
from opensora_accel.flash_attn import flash_attn_stand_in
from opensora_accel.observe.on_cpu import without_exit


def load_file(given: Path) -> ModuleType:
    """The file as a module, loaded once in each process; what it imports may lie beside it.

    Raises:
        ValueError: the file cannot be loaded, and why.
        OSError: it cannot be read.
    """
    path = given.resolve()
    open_plain(path).close()
    # Files of one name in two folders are two modules.
    name = f"_step_file_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    # As a script's folder: what the file imports may lie beside it.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{given} cannot be loaded as Python")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with without_exit(), flash_attn_stand_in():
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        # The innermost line of the file itself, not of what it imports.
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        place, words = f" (line {lines[-1]})" if lines else "", f"{type(error).__name__}: {error}"
        if isinstance(error, SyntaxError):
            words = f"{type(error).__name__}: {error.msg}"
            if error.lineno is not None:
                place = f" (line {error.lineno} of {Path(error.filename or path).name})"
        if isinstance(error, SystemExit):
            words = 'it ends the program while it is imported; put that under `if __name__ == "__main__":`'
        raise ValueError(f"{given} cannot be loaded{place}: {words}") from error
    return module
