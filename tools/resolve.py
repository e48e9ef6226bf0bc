"""Shows whether what the Makefile installs can be installed elsewhere: other systems, processors and Pythons.

    make resolve                                       # 16 environments; 5 to 15 minutes of waiting for the index
    make resolve ARGS='--constraints my_versions.txt'

A requirement that no index can meet shows on the machine that asks for it, and nowhere else. torch 2.13.0 requires
triton 3.7.1 on Linux, its build for a CPU requires none: with `triton==3.9.0` among the constraints, the second
installs and the first cannot.

The installs are read from what `make` would run, so that no list here can differ from it. uv resolves each of them for
each environment. It evaluates the markers of the environment (`pip --platform` evaluates those of the machine it runs
on), reads the metadata of packages without their files, and knows nothing of the machine's pip configuration.

The index of torch's builds for a CPU is not asked. A wheel that has nothing but such a build's name, version and
requirements stands in for it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import requires
from itertools import groupby
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# All that README.md's two commands and `make prove` install.
TARGETS = (
    ".venv/.torch",
    ".venv/.train",
    ".venv/.dev",
    ".venv/.docs",
    ".venv/.kernels",
    ".venv/.deepspeed",
    ".venv/.peers",
    ".venv/.trackers",
)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = {
    "Linux x86_64": "x86_64-manylinux_2_28",
    "Linux aarch64": "aarch64-manylinux_2_28",
    "macOS arm64": "aarch64-apple-darwin",
}
# What torch's builds for a CPU require, on every system (read from the metadata of 2.13.0+cpu).
CPU_BUILD_REQUIRES = (
    "filelock",
    "typing-extensions>=4.10.0",
    "setuptools",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
)
# torch's wheels for macOS are for 14 and newer.
MACOS = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}


@dataclass(frozen=True)
class Environment:
    """One machine to install on. `cpu_build`: torch comes from an index of builds for a CPU."""

    platform: str
    python: str
    cpu_build: bool = False

    def __str__(self) -> str:
        return f"{self.platform}{', CPU build of torch' if self.cpu_build else ''}, Python {self.python}"


@dataclass(frozen=True)
class Install:
    """One `pip install` of the Makefile.

    `is_alone`: without what the packages require. `may_build`: from source. `may_fail`: what needs it is then skipped.
    """

    requirements: tuple[str, ...]
    is_alone: bool
    may_build: bool
    may_fail: bool

    def __str__(self) -> str:
        return " ".join(self.requirements[:4]) + (" …" if len(self.requirements) > 4 else "")


def environments() -> list[Environment]:
    """Every environment that the README promises."""
    pairs = [(platform, python) for platform in PLATFORMS for python in PYTHONS]
    return [Environment(*pair) for pair in pairs] + [
        Environment("Linux x86_64", python, True) for python in PYTHONS
    ]


def installs_of_make() -> list[Install]:
    """What `make` would install for TARGETS, in order."""
    command = ["make", "--dry-run", "--always-make", *TARGETS]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines = printed.replace("\\\n", " ").splitlines()
    return [_read_install(line) for line in lines if " -m pip " in line and " install " in line]


def _read_install(line: str) -> Install:
    command, may_fail, _ = line.partition(" install ")[2].partition("||")
    words = shlex.split(command)
    asked, options, at = [], set(), iter(words)
    for word in at:
        if word in ("-c", "--target"):
            next(at)
        elif word.startswith("-") and word != "-e":
            options.add(word)
        elif word.startswith(".["):
            asked += _own_requirements(extras=word[2:-1].split(","))
        elif word != "-e":
            asked.append(word)
    return Install(tuple(asked), "--no-deps" in options, "--no-build-isolation" in options, bool(may_fail))


def _own_requirements(extras: Sequence[str]) -> list[str]:
    """What setup.py asks for, as the installed package tells it."""
    found = []
    for line in requires("opensora-accel") or ():
        requirement = Requirement(line)
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras
        ):
            requirement.marker = None
            found.append(str(requirement))
    return found


def write_cpu_build(folder: Path, version: str) -> None:
    """A wheel of torch that has a name, a version and requirements, as an index of CPU builds offers one."""
    name = f"torch-{version}+cpu"
    metadata = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}+cpu"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in CPU_BUILD_REQUIRES]
    wheel = "Wheel-Version: 1.0\nGenerator: resolve\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.dist-info/METADATA", "\n".join(metadata) + "\n")
        archive.writestr(f"{name}.dist-info/WHEEL", wheel)
        archive.writestr(f"{name}.dist-info/RECORD", "")


def resolve(install: Install, environment: Environment, constraints: Path, cpu_builds: Path) -> str:
    """The reason why `install` cannot be had in `environment`, or "" where it can."""
    command = [
        _find_uv(),
        "--no-config",
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "-",
        "--constraints",
        str(constraints),
    ]
    command += ["--python-version", environment.python, "--python-platform", PLATFORMS[environment.platform]]
    command += ["--no-deps"] if install.is_alone else []
    command += [] if install.may_build else ["--only-binary", ":all:"]
    command += ["--find-links", str(cpu_builds)] if environment.cpu_build else []
    # Indexes and cut-off dates that this machine has set are not what others have.
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    ended = subprocess.run(
        command, input="\n".join(install.requirements), capture_output=True, text=True, env=variables | MACOS
    )
    return "" if ended.returncode == 0 else ended.stderr.strip()


def _find_uv() -> str:
    own = Path(sysconfig.get_path("scripts")) / "uv"
    if not own.exists():
        raise SystemExit(f"{own} is missing: make resolve installs it")
    return str(own)


def _torch_version(constraints: Path) -> str:
    pins = [
        line.strip()
        for line in constraints.read_text(encoding="utf-8").splitlines()
        if line.startswith("torch==")
    ]
    if len(pins) != 1:
        raise SystemExit(f"{constraints} has to pin torch once, as torch==2.13.0; it has {pins}")
    return pins[0].removeprefix("torch==")


def _report(environment: Environment, wrong: dict[Install, str]) -> int:
    """Prints what cannot be installed there, and returns how much of it is needed."""
    print(f"{environment}: " + ("" if wrong else "all of it installs"), flush=True)
    for install, reason in wrong.items():
        print(f"  {'without' if install.may_fail else 'CANNOT INSTALL'} {install}")
        print("    " + reason.replace("\n", "\n    "))
    return sum(not install.may_fail for install in wrong)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--constraints", type=Path, default=ROOT / "constraints.txt", help="the versions to try"
    )
    options = parser.parse_args(arguments)
    pairs = [(environment, install) for environment in environments() for install in installs_of_make()]
    failures = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=8) as pool:
        write_cpu_build(Path(folder), _torch_version(options.constraints))
        # The time goes into waiting for the index.
        reasons = pool.map(lambda pair: resolve(pair[1], pair[0], options.constraints, Path(folder)), pairs)
        outcomes = ((*pair, reason) for pair, reason in zip(pairs, reasons, strict=True))
        for environment, group in groupby(outcomes, key=lambda outcome: outcome[0]):
            failures += _report(environment, {install: reason for _, install, reason in group if reason})
    print(f"{failures} of {len(pairs)} installs fail" if failures else f"all {len(pairs)} installs resolve")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
