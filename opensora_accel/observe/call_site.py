"""Which line made a call, read from the Python frames that stand above it."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # opensora_accel
_TOOLKIT = (_PACKAGE + os.sep, os.path.join(os.path.dirname(_PACKAGE), "shardformer") + os.sep)
# Files outside of torch that pass a call on.
_PLUMBING = (
    _HERE,
    os.path.join(_PACKAGE, "verify", "communication") + os.sep,
    os.path.join(_PACKAGE, "planner", "recording.py"),
    os.path.join(_PACKAGE, "communications", "transport.py"),
    # What FSDP2, and a collective by node, call in place of torch's own collectives.
    *(
        os.path.join(_PACKAGE, "experiments", f"{name}.py")
        for name in ("by_node", "compressed", "fsdp_collectives")
    ),
    "<",
)
# Files of torch that pass a call on: they stand between whoever communicates and its operator.
_PLUMBING_OF_TORCH = (
    *("_compile.py", "_dynamo/", "_library/", "_ops.py", "_subclasses/", "autograd/function.py"),
    *(
        "distributed/_functional_collectives.py",
        "distributed/c10d_logger.py",
        "distributed/distributed_c10d.py",
    ),
    *("distributed/utils.py", "nn/modules/module.py", "overrides.py", "utils/_contextlib.py"),
    *("utils/_python_dispatch.py", "utils/_stats.py"),
)
_PASSES_ON = ("__torch_dispatch__", "__torch_function__", "__call__")
_ENGINE = "autograd/graph.py"
# Files of torch that stand between autograd's engine and a call only where a forward runs again.
_RECOMPUTES = ("utils/checkpoint.py", "nn/modules/module.py")
_OWNERS = (
    ("distributed/fsdp/_fully_shard/", "FSDP2"),
    ("distributed/fsdp/", "FSDP1"),
    ("distributed/_composable/", "composable"),
    ("distributed/tensor/", "DTensor"),
    ("distributed/device_mesh.py", "DeviceMesh"),
    ("nn/parallel/", "DDP"),
)


@dataclass(frozen=True)
class CallSite:
    """The lines behind one call."""

    # The innermost line outside of torch: `path/file.py:123 in function`.
    source: str = "no Python frame"
    # The innermost line outside of torch and of this toolkit: mostly the model's, or the step's.
    caller: str = "no Python frame"
    # Which part of torch made the call on behalf of that line; empty where the line itself did.
    via: str = ""
    # Whether, within backward, a forward runs again.
    is_recomputed: bool = False

    def __str__(self) -> str:
        source = self.source if self.caller == self.source else f"{self.source} ← {self.caller}"
        return f"{self.via}, under {source}" if self.via else source


# Where C++ made a call outside of any line.
NOWHERE = CallSite()


def find_call_site() -> CallSite:
    """The lines behind the call that is being made."""
    source = caller = via = ""
    is_recomputed = passed_engine = False
    # From the innermost frame outwards: first what passes the call on, then who makes it, then the model.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (caller and passed_engine):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path.startswith(_TORCH):
            inner = path[len(_TORCH) :]
            # What stands above the engine called backward, and not this collective.
            passed_engine = passed_engine or inner == _ENGINE
            is_recomputed = is_recomputed or (not passed_engine and inner in _RECOMPUTES)
            passes_on = inner.startswith(_PLUMBING_OF_TORCH) or name in _PASSES_ON
            if not source and not via and not passes_on:
                via = _owner(inner, name)
        elif not caller and name not in _PASSES_ON and not _is_plumbing(path):
            line = f"{_short(path)}:{frame.f_lineno} in {name}"
            # The first such line is the source. The caller goes on outwards, until a line is not this toolkit's.
            source = source or line
            caller = "" if path.startswith(_TOOLKIT) else line
        frame = frame.f_back
    source = source or NOWHERE.source
    # A checkpoint's frames stand above its forward as well. It is a recomputation only under autograd's engine.
    return CallSite(source, caller or source, via, is_recomputed and passed_engine)


@functools.cache
def _is_plumbing(path: str) -> bool:
    """Whether the file is this package's, or Python's own: decorators and context managers."""
    is_of_python = path.startswith(_PYTHON) and "site-packages" not in path
    return is_of_python or path.startswith(_PLUMBING) or path.endswith("typing_extensions.py")


def _owner(path: str, function: str) -> str:
    if path == _ENGINE:
        # No frame between the engine and the call: a hook of C++, and the only one that communicates is DDP's.
        at_leaf = getattr(torch._C._current_autograd_node(), "variable", None) is not None
        return "DDP (reducer, C++)" if at_leaf else "autograd (C++)"
    owner = next((name for start, name in _OWNERS if path.startswith(start)), f"torch/{path}")
    return f"{owner} ({function})"


@functools.cache
def _short(path: str) -> str:
    """The path from the folder that Python imports it from, or else its last folders."""
    roots = [os.path.abspath(entry) + os.sep for entry in sys.path]
    inside = [path[len(root) :] for root in roots if path.startswith(root)]
    return min(inside, key=len) if inside else os.sep.join(path.split(os.sep)[-3:])
