"""Runs the tests on the lowest and the newest versions of what setup.py promises, each in an environment of its own.

    make versions                                            # all of them: an hour, and 5 GB for each torch
    make versions ARGS='--only lowest'                       # those with this in their name
    make versions ARGS='-- tests/attention -x'               # other tests: what follows goes to pytest

A lower bound that nobody has installed is a guess. `uv pip install --resolution lowest-direct` takes of every
requirement in setup.py the oldest version that it allows: `torch>=2.12,<2.14` is torch 2.12.0. The core promises an
older Python than training, whose diffusers needs 3.11. An environment whose interpreter is not here is left out, and
told.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).with_name("uv")
# What needs no more than the core does: no model of diffusers.
CORE = (
    "tests/attention",
    "tests/checkpoint",
    "tests/communications",
    "tests/sharding",
    "tests/test_parallel_states.py",
    "tests/test_plan.py",
    *("--ignore=tests/checkpoint/test_chunked.py", "--ignore=tests/checkpoint/test_compiled.py"),
    *("--ignore=tests/checkpoint/test_fsdp.py", "--ignore=tests/experiments/test_by_node.py"),
    "--ignore=tests/communications/test_missing_ranks.py",
)
TRAINING = ".[train,plot,schedulefree,lowbit,kernels]"


@dataclass(frozen=True)
class Environment:
    """A Python, what is installed into it, and the tests that it is to pass."""

    python: str
    requirements: tuple[str, ...]
    resolution: str = "highest"
    tests: tuple[str, ...] = field(default=("tests",))


ENVIRONMENTS = {
    "core, lowest": Environment("3.10", (".",), "lowest-direct", CORE),
    "training, lowest": Environment("3.11", (TRAINING,), "lowest-direct"),
    "training, torch 2.12": Environment("3.12", (TRAINING, "torch==2.12.*")),
    "training, newest": Environment("3.13", (TRAINING,)),
}


@dataclass(frozen=True)
class Outcome:
    """What came of an environment: versions that were installed, and how its tests ended."""

    is_right: bool
    told: str


def interpreter(version: str) -> str | None:
    """A Python of this version: on the path, or one that pyenv or uv keeps."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(map(str, kept.glob(f"{version}.*/bin/python")))]
    candidates.append(_output([str(UV), "python", "find", "--managed-python", "--offline", version]))
    for candidate in candidates:
        if (
            candidate
            and _output([candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]) == version
        ):
            return candidate
    return None


def _output(command: Sequence[str]) -> str:
    """What a command prints; nothing if it fails, as a shim of pyenv does without its version."""
    if shutil.which(command[0]) is None:
        return ""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else ""


def try_versions(environment: Environment, folder: Path, pytest_arguments: Sequence[str]) -> Outcome:
    """Makes the environment anew in a folder, and runs its tests."""
    python = interpreter(environment.python)
    if python is None:
        return Outcome(
            True,
            f"left out: there is no Python {environment.python} (uv python install {environment.python})",
        )
    path = folder / f"python{environment.python}-{environment.resolution}"
    into = ["--python", str(path / "bin/python")]
    commands = [
        [UV, "venv", "--quiet", "--clear", "--python", python, path],
        [UV, "pip", "install", "--quiet", "--resolution", environment.resolution, *into]
        + ["--editable", environment.requirements[0], *environment.requirements[1:]],
        # These are no promise: whichever are newest.
        [UV, "pip", "install", "--quiet", *into, "pytest", "pytest-xdist", "hypothesis"],
    ]
    for command in commands:
        ended = subprocess.run(
            list(map(str, command)), cwd=ROOT, text=True, stderr=subprocess.PIPE, check=False
        )
        if ended.returncode != 0:
            return Outcome(False, f"cannot be installed:\n{ended.stderr.strip()}")
    versions = _output([str(UV), "pip", "freeze", *into])
    shown = [
        line
        for line in versions.splitlines()
        if line.partition("==")[0] in ("torch", "diffusers", "transformers")
    ]
    as_make_test = ("-m", "not prove and not alone", "--numprocesses", "2", "--dist", "loadfile")
    tests = [str(path / "bin/python"), "-m", "pytest", "--quiet"]
    tests += pytest_arguments or (*environment.tests, *as_make_test)
    tested = subprocess.run(tests, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=False)
    return Outcome(
        tested.returncode == 0,
        f"Python {environment.python}, {', '.join(shown)}: pytest ended with {tested.returncode}",
    )


def main(arguments: Sequence[str]) -> int:
    """Tries the environments; 0 if the tests of all of them pass."""
    parser = argparse.ArgumentParser(
        prog="versions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD", help=f"of: {'; '.join(ENVIRONMENTS)}")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".venv/versions", help="where environments are made"
    )
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args(arguments)
    chosen = {name: each for name, each in ENVIRONMENTS.items() if options.only in name}
    if not chosen:
        parser.error(f"no environment has {options.only!r} in its name: {'; '.join(ENVIRONMENTS)}")
    outcomes = {}
    for name, environment in chosen.items():
        print(f"{name}: installing", flush=True)
        start = time.monotonic()
        outcomes[name] = try_versions(environment, options.folder, options.pytest)
        print(f"{name}: {outcomes[name].told} ({time.monotonic() - start:.0f} s)", flush=True)
    wrong = [name for name, outcome in outcomes.items() if not outcome.is_right]
    for name, outcome in outcomes.items():
        print(f"{'✓' if outcome.is_right else '✗'} {name}: {outcome.told.splitlines()[0]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
