"""The environments that sides run in: how each is made, and which sides import in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import opensora_accel
from opensora_accel.profiler.bench_attention.side import Side

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
"""What each `pip install` is given, in order, after torch. `--no-deps`: pip would choose another torch."""

SETTINGS: dict[str, dict[str, str]] = {"deepspeed": {"DS_BUILD_OPS": "0"}}
"""Of a peer, while it is installed and while it runs."""

PROBE = "opensora_accel.profiler.bench_attention.probe"
PROBE_TIMEOUT_S = 180.0
INSTALLED = "installed"
"""A file that is written last, so that half an environment is made anew."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where a side runs."""

    name: str | None
    python: str

    @property
    def settings(self) -> dict[str, str]:
        return {} if self.name is None else SETTINGS.get(self.name, {})


def place_of(side: Side, folder: Path) -> Place | None:
    """None where its environment has not been made."""
    if side.environment is None:
        return Place(None, sys.executable)
    if not (folder / side.environment / INSTALLED).exists():
        return None
    return Place(side.environment, _python(folder / side.environment))


def _python(environment: Path) -> str:
    return str((environment / "bin" / "python").absolute())


def install(name: str, folder: Path, say: Say) -> None:
    """Makes an environment with the torch that runs here, then the peer. Raises CalledProcessError."""
    environment = folder / name
    say(f"making {environment}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    # The kernels that sides share must be the same everywhere.
    version = torch.__version__.partition("+")[0]
    for arguments in ((f"torch=={version}",), *INSTALLS[name]):
        say(f"  pip install {' '.join(arguments)}")
        command = [_python(environment), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([*command, *arguments], check=True, env=os.environ | SETTINGS.get(name, {}))
    (environment / INSTALLED).touch()


def lend(folder: Path) -> str:
    """A value of PYTHONPATH that brings this package into another environment, and nothing installed beside it."""
    (folder / "path").mkdir()
    (folder / "path" / "opensora_accel").symlink_to(Path(opensora_accel.__file__).resolve().parent)
    return os.pathsep.join([str(folder / "path"), *filter(None, [os.environ.get("PYTHONPATH")])])


def probe(names: Sequence[str], place: Place) -> dict[str, dict[str, str | None]]:
    """By name: the version of each side's package, and why it does not import. All in one environment."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        try:
            done = subprocess.run(
                [place.python, "-m", PROBE, str(answer), *names],
                env=os.environ | place.settings | {"PYTHONPATH": lend(Path(folder))},
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {name: {"version": None, "reason": f"does not import: {error}"} for name in names}
        if answer.exists():
            found: dict[str, dict[str, str | None]] = json.loads(answer.read_text(encoding="utf-8"))
            return found
    words = done.stderr.strip().splitlines()[-1:] or [f"its process ended with {done.returncode}"]
    return {name: {"version": None, "reason": f"does not import: {words[0]}"} for name in names}
