"""What a run leaves on disk to go on from: written whole, verified before it is read, agreed on by all ranks.

A saved state is one folder, `checkpoints/step_000300`, of safetensors and JSON under a manifest of SHA-256 sums, and
nothing in it can execute. It holds whole tensors, so a run may go on with any mesh: P = 3 ranks that hold thirds of a
weight gather it, rank 0 writes it, and on 2 ranks each reads the whole and keeps its half. The weights are model
folders of diffusers, `transformer` and, averaged, `transformer_ema`. A folder gets its final name
when it is whole, and older ones are removed after that.

Ranks on different machines may see different folders, because a listing on a network file system can be old. Each rank
looks for itself, tells the others what it sees, and all of them take the same saved state or fail together.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from opensora_accel.training.optim import EMA
from opensora_accel.training.ranks import from_all_ranks, from_first_rank, is_first_rank

logger = logging.getLogger(__name__)

# Name of the folder with the saved states of a run.
FOLDER = "checkpoints"
# The newest saved state of the output; an error where there is none, or it is damaged.
NEWEST = "newest"
# The newest whole saved state of the output; damaged ones are told and skipped, and without one a run starts.
AUTO = "auto"

MANIFEST = "manifest.json"
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
TOKENIZER = "tokenizer.json"
_CONFIG, _WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
MODEL_CONFIG, MODEL_WEIGHTS = f"transformer/{_CONFIG}", f"transformer/{_WEIGHTS}"
AVERAGED_CONFIG, AVERAGED_WEIGHTS = f"transformer_ema/{_CONFIG}", f"transformer_ema/{_WEIGHTS}"
_REQUIRED = (STATE, OPTIMIZER, MODEL_CONFIG, MODEL_WEIGHTS)
_OPTIONAL = (AVERAGED_CONFIG, AVERAGED_WEIGHTS, TOKENIZER)
_STEP = re.compile(r"step_\d+")
_PARTIAL = ".partial"
_ADAM_ENTRIES = ("exp_avg", "exp_avg_sq", "step")
_TAKE_ANOTHER = "resume from another saved state of this run"
_SHARE_THE_FOLDER = (
    "--output must lie on a file system that all machines share; if it does, wait a minute for its listing and "
    "start again"
)


@dataclass
class TrainState:
    """What a run is, beyond its configuration."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: EMA | None
    step: int = 0


# Saving


def save_state(
    folder: Path, state: TrainState, extra: Mapping[str, Any], texts: Mapping[str, str], keep: int
) -> None:
    """Writes `folder` whole or not at all, and then removes all but the newest `keep` that the same run wrote.

    Args:
        extra: JSON values stored beside the step (configuration, data position, the run's id under "run").
        texts: further files by name.

    Communication: sharded tensors are gathered one by one, so every rank has to call; rank 0 writes.

    Raises:
        OSError: on all ranks, where the folder cannot be written; what was saved before is left as it was.
    """
    weights = _gather(state.model.state_dict())
    moments = {
        f"{name}.{entry}": state.optimizer.state[parameter][entry]
        for name, parameter in state.model.named_parameters()
        for entry in _ADAM_ENTRIES
        if entry in state.optimizer.state.get(parameter, {})
    }
    tensors = {MODEL_WEIGHTS: weights, OPTIMIZER: _gather(moments)}
    # What `from_pretrained` of diffusers reads, without the class that FSDP makes and paths of this machine.
    values = json.loads(state.model.to_json_string())  # type: ignore[operator]
    values.pop("_name_or_path", None)
    values["_class_name"] = _class_name(state.model)
    config = json.dumps(values, indent=2, sort_keys=True) + "\n"
    record = {
        "step": state.step,
        "model_class": _class_name(state.model),
        "ema_updates": state.ema.num_updates if state.ema is not None else 0,
        **extra,
    }
    files = {STATE: json.dumps(record, indent=2) + "\n", MODEL_CONFIG: config, **texts}
    if state.ema is not None:
        tensors[AVERAGED_WEIGHTS] = {**weights, **_gather(state.ema.weights)}
        files[AVERAGED_CONFIG] = config

    def write() -> None:
        try:
            _write_folder(folder, tensors, files)
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"the saved state {folder} could not be saved ({error}); make room for it or make its place writable, "
                "and go on from the newest whole one with --resume"
            ) from error
        _remove_old(folder, extra.get("run"), keep)

    from_first_rank(write)


def _gather(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On rank 0 every tensor whole, on the host; elsewhere nothing is kept."""
    kept = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            kept[name] = full.detach().to("cpu", copy=True).contiguous()
    return kept


def _class_name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")


def _write_folder(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], files: Mapping[str, str]
) -> None:
    _remove_partial(folder.parent)
    partial = folder.with_name(folder.name + _PARTIAL)
    partial.mkdir(parents=True)
    try:
        for name in (*tensors, *files):
            (partial / name).parent.mkdir(exist_ok=True)
        for name, entries in tensors.items():
            save_file(dict(entries), partial / name, metadata={"format": "pt"})
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        sums = {name: _sha256(partial / name) for name in sorted([*tensors, *files])}
        (partial / MANIFEST).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")
        # Only what is whole gets the name; what had it before is kept under another one.
        set_aside(folder)
        partial.rename(folder)
    finally:
        _remove_partial(folder.parent)  # what a full disk has left; nothing, where all went well


def _remove_partial(folder: Path) -> None:
    """Removes what a save left that did not end; a link of that name is removed and not followed."""
    for path in folder.glob(f"step_*{_PARTIAL}"):
        if _STEP.fullmatch(path.name.removesuffix(_PARTIAL)):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)


def _remove_old(newest: Path, run: Any, keep: int) -> None:
    """Removes all but the newest `keep` saved states beside `newest` that this run wrote, by its id.

    Links stay: what they lead to was put elsewhere to be kept. Files that the manifest does not list stay too. What
    cannot be removed is told, and never ends a run whose newest saved state is whole.
    """
    mine = []
    for path in list_saved_states(newest.parent):
        try:
            sums = read_manifest(path)
            writer = json.loads((path / STATE).read_text(encoding="utf-8"))["run"]
        except (OSError, ValueError, LookupError, TypeError):
            continue  # damaged, or somebody else's
        if run is not None and writer == run and path != newest and not path.is_symlink():
            mine.append((path, sums))
    for path, sums in mine[: len(mine) + 1 - keep]:
        try:
            # These two last: by them, a removal that was killed is found and ended by the next one.
            for name in [*(name for name in sums if name != STATE), STATE, MANIFEST]:
                (path / name).unlink(missing_ok=True)
            for place in [*{(path / name).parent for name in sums} - {path}, path]:
                if place.is_dir() and not any(place.iterdir()):
                    place.rmdir()
        except OSError as error:
            logger.warning("the old saved state %s could not be removed: %s", path, error)


# Reading


def list_saved_states(folder: Path) -> list[Path]:
    """The whole saved states in a folder, by step."""
    found = [path.parent for path in folder.glob(f"step_*/{MANIFEST}") if _STEP.fullmatch(path.parent.name)]
    return sorted(found, key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def set_newer_aside(folder: Path, step: int) -> list[Path]:
    """Renames the saved states after `step`, which a run that goes on from there will write again."""
    return [set_aside(path) for path in list_saved_states(folder) if _step(path) > step]


def set_aside(path: Path) -> Path:
    """Gives whatever is there, a link too, another name, under which nothing touches it; the name it has now."""
    if not os.path.lexists(path):
        return path
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.kept_{number}")):
        number += 1
    return path.rename(target)


def read_manifest(folder: Path) -> dict[str, str]:
    """The SHA-256 sum of every file of a saved state.

    Raises:
        ValueError: the manifest is damaged, or it leaves out a file that a saved state is read from, which would be
            loaded unverified.
    """
    path = folder / MANIFEST
    try:
        sums = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {_TAKE_ANOTHER}") from error
    is_sum = re.compile("[0-9a-f]{64}").fullmatch
    if not isinstance(sums, dict) or not all(
        isinstance(text, str) and is_sum(text) for text in sums.values()
    ):
        raise ValueError(f"{path} is damaged (it is no table of SHA-256 sums); {_TAKE_ANOTHER}")
    for name in sums:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{path} lists {name!r}, which is outside of the saved state; {_TAKE_ANOTHER}")
    unlisted = [name for name in _REQUIRED if name not in sums]
    unlisted += [name for name in _OPTIONAL if name not in sums and os.path.lexists(folder / name)]
    if unlisted:
        raise ValueError(
            f"{path} does not list {', '.join(unlisted)}: whether they are as they were written cannot be told; "
            f"{_TAKE_ANOTHER}"
        )
    return sums


def read_record(folder: Path) -> dict[str, Any]:
    """The JSON of a saved state whose files are all as they were written.

    Raises:
        FileNotFoundError: the folder is no saved state.
        ValueError: the manifest is damaged or leaves files out, or a file is missing or was changed.
    """
    if not (folder / MANIFEST).is_file():
        whole = list_saved_states(folder) or list_saved_states(folder.parent)
        hint = f"; there are {', '.join(map(str, whole))}" if whole else ""
        raise FileNotFoundError(f"{folder} is no saved state (it has no {MANIFEST}){hint}")
    for name, expected in read_manifest(folder).items():
        path = folder / name
        if not path.is_file() or _sha256(path) != expected:
            what = "was changed since it was written" if path.is_file() else "is missing"
            raise ValueError(f"{path} {what}; {_TAKE_ANOTHER}")
    record = json.loads((folder / STATE).read_text(encoding="utf-8"))
    lacking = {"step", "config", "data", "ema_updates"} - set(record if isinstance(record, dict) else ())
    if lacking:
        missing = ", ".join(sorted(lacking))
        raise ValueError(
            f"{folder / STATE} is no record of a saved state: it lacks {missing}; {_TAKE_ANOTHER}"
        )
    return record


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_saved_state(resume: str, output: Path) -> tuple[Path, dict[str, Any]] | None:
    """The saved state to go on from and its record, the same on all ranks; None where `resume` is "auto" and none is.

    Args:
        resume: a folder, "newest" or "auto".
        output: the run whose newest saved state is meant.

    Communication: two object all-gathers, and one for each saved state that is looked at.

    Raises:
        FileNotFoundError: on all ranks, where there is no such saved state.
        ValueError: on all ranks, where one is damaged (not with "auto"), or where ranks see different ones.
    """
    if resume not in (NEWEST, AUTO):
        return Path(resume), _agreed_record(Path(resume))
    folder = output / FOLDER
    listings = from_all_ranks([path.name for path in list_saved_states(folder)])
    # The newest that every rank sees: a rank whose listing is old must not go on from another one.
    seen_by_all = [name for name in listings[0] if all(name in names for names in listings)]
    told = []
    for name in sorted({name for names in listings for name in names} - set(seen_by_all)):
        blind = ", ".join(str(rank) for rank, names in enumerate(listings) if name not in names)
        told.append(f"{name} is not seen by rank {blind}")
    if told and not seen_by_all:
        raise ValueError(
            f"no saved state in {folder} is seen by all ranks ({'; '.join(told)}): {_SHARE_THE_FOLDER}"
        )
    if told and is_first_rank():
        print(f"not all ranks see the same saved states in {folder}: {'; '.join(told)}", flush=True)
    for name in reversed(seen_by_all):
        try:
            return folder / name, _agreed_record(folder / name)
        except ValueError as error:
            if resume != AUTO:
                raise
            if is_first_rank():
                print(f"skipping a saved state: {error}", flush=True)
    if resume == AUTO:
        return None
    raise FileNotFoundError(
        f"there is no saved state in {output}; start without --resume (or with --resume auto), or name a saved state "
        "or another --output"
    )


def _agreed_record(folder: Path) -> dict[str, Any]:
    """The record of a saved state that every rank finds whole, and with the same manifest."""
    record: dict[str, Any] = {}
    error: ValueError | OSError | None = None
    try:
        record = read_record(folder)
        seen = f"manifest {_sha256(folder / MANIFEST)}"
    except (ValueError, OSError) as failure:
        error, seen = failure, f"error: {failure}"
    # Every rank tells what it found before any of them raises, so that all raise together.
    views = from_all_ranks(seen)
    if len(set(views)) == 1:
        if error is not None:
            raise error
        return record
    failed = [f"rank {rank}: {view}" for rank, view in enumerate(views) if view.startswith("error: ")]
    found = failed or [f"rank {rank}: {view[:21]}" for rank, view in enumerate(views)]
    raise ValueError(
        f"the ranks see different files in {folder} ({'; '.join(found[:4])}): {_SHARE_THE_FOLDER}"
    )


def run_of(folder: Path) -> Path:
    """The output folder of the run that a saved state lies in: the one above its folder `checkpoints`.

    The path is taken as it was given where it says so, and else where its links lead: a saved state of a run may be a
    link to an archive, and a link `latest` may lie anywhere.

    Raises:
        ValueError: the saved state lies in no run.
    """
    for path in (folder, Path(os.path.abspath(folder)), folder.resolve()):
        if path.parent.name == FOLDER:
            return path.parent.parent
    raise ValueError(
        f"the saved state {folder} lies in no run (no folder {FOLDER} is above it); say with --output where to go on"
    )


# Loading


def load_state(folder: Path, record: Mapping[str, Any], state: TrainState) -> None:
    """Fills model, optimizer and EMA from a saved state that `read_record` has found whole.

    Raises:
        ValueError: the saved state belongs to another model; nothing was changed.
    """
    weights = load_file(folder / MODEL_WEIGHTS)
    _check_same_model(folder, record, state.model, weights)
    for name, tensor in state.model.state_dict().items():
        _fill(tensor.detach(), weights[name])
    moments = load_file(folder / OPTIMIZER)
    for name, parameter in state.model.named_parameters():
        if f"{name}.step" in moments:
            entries = state.optimizer.state[parameter]
            entries["step"] = moments[f"{name}.step"].clone()
            for entry in ("exp_avg", "exp_avg_sq"):
                entries[entry] = torch.zeros_like(parameter, requires_grad=False)
                _fill(entries[entry], moments[f"{name}.{entry}"])
    if state.ema is not None:
        saved = folder / AVERAGED_WEIGHTS
        averaged = load_file(saved) if saved.is_file() else weights
        for name, weight in state.ema.weights.items():
            _fill(weight, averaged[name])
        state.ema.num_updates = record["ema_updates"]
    state.step = record["step"]


@torch.no_grad()
def _fill(target: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor into a parameter or into this rank's shard of it."""
    if isinstance(target, DTensor):
        # src_data_rank=None: every rank has read the file, so each cuts its own shard.
        whole = distribute_tensor(
            whole.to(target.device, target.dtype), target.device_mesh, target.placements, src_data_rank=None
        )
    target.copy_(whole)


def _check_same_model(
    folder: Path, record: Mapping[str, Any], model: nn.Module, weights: Mapping[str, Tensor]
) -> None:
    mine = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    saved = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    different = [name for name in {**mine, **saved} if mine.get(name) != saved.get(name)]
    if not different:
        return
    shown = "; ".join(
        f"{name}: {saved.get(name, 'absent')} in the saved state, {mine.get(name, 'absent')} here"
        for name in different[:3]
    )
    raise ValueError(
        f"{folder} is of another model ({record.get('model_class')}, {len(different)} tensors differ from this "
        f"{_class_name(model)}): {shown}. Resume with the saved configuration (leave out --model options), or "
        "start a new run in another --output"
    )
