"""Every side of the attention benchmark by name, and the environments that some of them run in.

Nothing of a peer is imported until it is asked to attend. An environment is .bench-venv/NAME; it has the torch that
runs here, because the kernels that sides share must be the same everywhere, and one peer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import harness
import torch

from peers import best_case, deepspeed, diffusers, ours, ring_attention_pytorch, torch_native, yunchang
from peers.side import Side

MODULES = (ours, best_case, diffusers, torch_native, yunchang, deepspeed, ring_attention_pytorch)
SIDES: dict[str, Side] = {side.name: side for module in MODULES for side in module.SIDES}

# The peer, and what it needs beside torch. The peer is installed alone: pip would choose another torch.
INSTALLS = {
    "yunchang": ("yunchang==0.6.4", "numpy"),
    "deepspeed": (
        *("deepspeed==0.19.8", "numpy", "einops", "hjson", "msgpack", "packaging", "psutil"),
        *("py-cpuinfo", "pydantic", "tqdm"),
    ),
    "ring-attention-pytorch": ("ring-attention-pytorch==0.5.20", "numpy", "einops", "beartype", "jaxtyping"),
}
# A file that is written last, so that half an environment is made anew.
INSTALLED = "installed"


def is_ours(name: str) -> bool:
    return SIDES[name].kind == "ours"


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
    peer, *needs = INSTALLS[name]
    torch_here = f"torch=={torch.__version__.partition('+')[0]}"
    for arguments in (
        (torch_here, "setuptools", "wheel", *needs),
        ("--no-deps", "--no-build-isolation", peer),
    ):
        harness.say(f"  pip install {' '.join(arguments)}")
        pip = [str(environment / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        # DeepSpeed would build its CUDA kernels.
        subprocess.run([*pip, "install", *arguments], check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    (environment / INSTALLED).touch()
