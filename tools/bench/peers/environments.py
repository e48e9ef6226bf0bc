"""The environments that peers run in, in .bench-venv/NAME: each has the torch that runs here, and one peer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import harness
import torch

from peers.side import Side

# What each `pip install` is given, in order, after torch. `--no-deps`: pip would choose another torch.
INSTALLS: dict[str, tuple[tuple[str, ...], ...]] = {
    "yunchang": (("numpy",), ("--no-deps", "yunchang==0.6.4")),
    "deepspeed": (
        ("numpy", "einops", "hjson", "msgpack", "packaging", "psutil", "py-cpuinfo", "pydantic", "tqdm"),
        ("setuptools", "wheel"),
        ("--no-deps", "--no-build-isolation", "deepspeed==0.19.8"),
    ),
    "ring-attention-pytorch": (
        ("numpy", "einops", "beartype", "jaxtyping"),
        ("--no-deps", "ring-attention-pytorch==0.5.20"),
    ),
}
# Environment variables of a peer, while it is installed and while it runs.
SETTINGS: dict[str, dict[str, str]] = {"deepspeed": {"DS_BUILD_OPS": "0"}}
# A file that is written last, so that half an environment is made anew.
INSTALLED = "installed"


def python_of(side: Side, folder: Path) -> str | None:
    """The interpreter that a side runs with; None where its environment has not been made."""
    if side.package not in INSTALLS:
        return sys.executable
    environment = folder / side.package
    return str((environment / "bin/python").absolute()) if (environment / INSTALLED).exists() else None


def install(name: str, folder: Path) -> None:
    """Makes the environment of one peer.

    Raises:
        subprocess.CalledProcessError: pip could not install it.
    """
    environment = folder / name
    harness.say(f"making {environment}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    # The kernels that sides share must be the same everywhere.
    version = torch.__version__.partition("+")[0]
    for arguments in ((f"torch=={version}",), *INSTALLS[name]):
        harness.say(f"  pip install {' '.join(arguments)}")
        pip = [str(environment / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", *arguments], check=True, env=os.environ | SETTINGS.get(name, {}))
    (environment / INSTALLED).touch()
