"""Runs a file of tests that imports Triton in a process of its own; what such files share.

Whether Triton interprets a kernel is settled when it is imported, and other tests of this process may have done that.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
# `make prove` installs it apart: it takes 1 GB, and nothing else needs it on a CPU.
APART = Path(sys.prefix) / "kernels"


def needs_triton():
    if importlib.util.find_spec("triton") is None and not APART.exists():
        pytest.skip(f"Triton is not installed: make .venv/.kernels, or pip install --target {APART} triton")


def environment(tmp_path):
    """Of a process that finds Triton, and compiles into a folder of its own."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(APART)]))
    return os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}


def run_with_triton(file, tmp_path, interpret):
    """All tests of a file; with `interpret` Triton's interpreter runs the kernels on the CPU."""
    needs_triton()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env=environment(tmp_path) | {"TRITON_INTERPRET": "1" if interpret else "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    print(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", autouse=True)
def interpreter_that_rounds():
    """Triton 3.9's interpreter cuts the low bits of a value that becomes bf16; a GPU rounds to the nearest."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def rounds(values, source, target, mode):
        if target == interpreter.tl.bfloat16 and source in (interpreter.tl.float32, interpreter.tl.float64):
            return (
                torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).view(torch.uint16).numpy()
            )
        return convert(values, source, target, mode)

    interpreter._convert_float = rounds
    yield
    interpreter._convert_float = convert
