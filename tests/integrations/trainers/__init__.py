"""The trainers of docs/integrations, each run from its checkout: as it is on one process, and patched on several.

The trainers' code is not here. Each program of this folder knows one of them. For FastVideo on ulysses 2 the test of
`test_trainers.py` makes two copies of the checkout's Python and patches one by its page, and runs

    torchrun --nproc-per-node 1 -m tests.integrations.trainers.fastvideo COPY         OUT '{}'
    torchrun --nproc-per-node 2 -m tests.integrations.trainers.fastvideo PATCHED_COPY OUT '{"sp_size": 2}'

The program builds a tiny model in fp64, puts stand-ins in the place of what needs a GPU, a download or a package that
is not installed, runs the trainer's own code for a few steps, and writes what those steps were to OUT (`Steps`). Both
see the same clips and draw the same noise, so the two have to be equal. This is the table of its page, measured:

    OPENSORA_ACCEL_TRAINERS=FOLDER_OF_CHECKOUTS pytest -m prove -s tests/integrations/test_trainers.py
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.integrations.pages import ROOT
from tests.tolerances import relative_error, relative_errors

# Beside other work on two cores a run has taken more than 300.
TIMEOUT_S = 1200


@dataclass(frozen=True)
class Case:
    """One row of a page's table: the options of the patched trainer's run, and of the one that it is compared with."""

    ranks: int
    # Both become JSON; a program gives them their meaning.
    options: dict[str, Any]
    reference: dict[str, Any] = field(default_factory=dict)


@dataclass
class Steps:
    """What a run was, on rank 0: whole tensors, by the names that the model's parameters have without wrappers."""

    # One mapping for each step that was looked at.
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    # Behind the last step.
    weights: dict[str, Tensor] = field(default_factory=dict)
    # As the trainer itself measured them: of each step.
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    # Of each rank, the tokens that it held.
    tokens: list[int] = field(default_factory=list)
    # Of each rank, the noise and timesteps that it drew for the first step.
    draws: list[list[Tensor]] = field(default_factory=list)

    def errors(self, expected: Steps) -> dict[str, float]:
        """The largest relative error of gradients, weights, norms and losses, of those that `expected` has."""
        assert len(self.gradients) == len(expected.gradients)
        found = {
            "gradients": max(
                error
                for ours, theirs in zip(self.gradients, expected.gradients, strict=True)
                for error in relative_errors(ours, theirs).values()
            ),
            "weights": max(relative_errors(self.weights, expected.weights).values()),
        }
        for name in ("norms", "losses"):
            theirs = getattr(expected, name)
            if theirs:
                ours = torch.tensor(getattr(self, name), dtype=torch.float64)
                found[name] = relative_error(ours, torch.tensor(theirs, dtype=torch.float64))
        return found


def copy_of(checkout: Path, folder: Path) -> Path:
    """A copy of the checkout's text files in `folder`, to be patched and imported without a trace in the checkout."""

    def ignored(_folder: str, names: list[str]) -> set[str]:
        unread = {name for name in names if name.endswith((".mp4", ".png", ".jpg", ".gif", ".ipynb"))}
        return unread | ({".git", "docs", "documentation", "__pycache__"} & set(names))

    shutil.copytree(checkout, folder, ignore=ignored)
    return folder


def run(program: str, checkout: Path, ranks: int, options: Mapping[str, Any], folder: Path) -> Steps:
    """What `python -m tests.integrations.trainers.PROGRAM` writes, on so many gloo ranks.

    Raises:
        AssertionError: it failed, with the end of what it printed.
    """
    out = folder / "steps.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), "-m", f"tests.integrations.trainers.{program}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = subprocess.Popen(
        [*command, str(checkout), str(out), json.dumps(dict(options))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment,
    )
    try:
        told, _ = launcher.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        launcher.terminate()  # torchrun ends its ranks; killed, it would leave them
        told, _ = launcher.communicate()
    assert launcher.returncode == 0, told[-6000:]
    return torch.load(out, weights_only=False)


# For the programs themselves


def main(train: Callable[[Path, dict[str, Any]], Steps]) -> None:
    """`train(checkout, options)` on the command line that `run` writes, with the checkout first in Python's path."""
    checkout, out, options = sys.argv[1:]
    sys.path.insert(0, checkout)
    torch.set_num_threads(1)
    steps = train(Path(checkout), json.loads(options))
    if int(os.environ["RANK"]) == 0:
        torch.save(steps, out)


def whole(tensor: Tensor) -> Tensor:
    """A copy of a parameter or gradient [...], also of one that FSDP2 shards: every rank has to call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put in it."""
    wrappers = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")
    for wrapper in wrappers:
        name = name.replace(wrapper, "")
    return name


def of_each_rank(value: Any) -> list[Any]:
    """What each rank gives, in order: every rank has to call it."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def count_tokens(layer: nn.Module, dim: int = 1) -> Callable[[], list[int]]:
    """Watches the first input [B, S/P, C] of a layer within a block; what is returned gives S/P of every rank.

    Every rank has to call it.
    """
    seen = [0]

    def look(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[0] = next(iter((*args, *kwargs.values()))).shape[dim]

    layer.register_forward_pre_hook(look, with_kwargs=True)
    return lambda: of_each_rank(seen[0])


def note_step(steps: Steps, model: nn.Module, tokens: Callable[[], list[int]], draws: list[Tensor]) -> None:
    """Behind a step's backward: its gradients; of the first step also what each rank held, and what it drew.

    Every rank has to call it.
    """
    if not steps.gradients:
        steps.tokens, steps.draws = tokens(), of_each_rank(list(draws))
    steps.gradients.append(gradients_of(model))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {plain_name(name): whole(each.grad) for name, each in named if each.grad is not None}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): whole(each) for name, each in model.named_parameters() if each.requires_grad}


@contextlib.contextmanager
def drawn(*functions: str) -> Iterator[list[Tensor]]:
    """What functions of torch return within it, `"randn_like"`, in fp64: a trainer's noise and timesteps."""
    draws = []

    def noted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def draw(*args: Any, **kwargs: Any) -> Tensor:
            value = function(*args, **kwargs)
            draws.append(value.to(torch.float64, copy=True))
            return value

        return draw

    with mock.patch.multiple(torch, **{name: noted(getattr(torch, name)) for name in functions}):
        yield draws


def stand_in(*packages: str, given: Mapping[str, Any] | None = None) -> None:
    """Makes packages that are not installed importable: whatever is asked of them is a mock that is never to matter.

    Args:
        packages: top-level names. One that is installed is left alone; a folder of the checkout is not one.
        given: attributes by their full name, `"wandb.run"`, for those that do matter.
    """
    specs = {name: importlib.util.find_spec(name) for name in packages}
    # A folder without an __init__.py has no origin.
    absent = {name for name, spec in specs.items() if spec is None or spec.origin is None}
    sys.meta_path.insert(0, _StandIns(absent, dict(given or {})))


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, absent: Iterable[str], given: dict[str, Any]):
        self._absent, self._given = frozenset(absent), given

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._absent:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        start = f"{module.__name__}."
        for name, value in self._given.items():
            if name.startswith(start) and "." not in name[len(start) :]:
                setattr(module, name[len(start) :], value)


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A class, so that it can be derived from, named in annotations and called.
        found = _AnyClass(name, (_Anything,), {})
        setattr(self, name, found)
        return found


class _AnyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Anything()


class _Anything(mock.MagicMock, metaclass=_AnyClass):
    def __init__(self, *_args: Any, **kwargs: Any):
        super().__init__(**kwargs)  # a mock would take the first argument for what it is to look like
