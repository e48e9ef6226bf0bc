"""Saved state: safetensors and JSON in one folder per checkpoint, under a manifest of SHA-256 sums.

Nothing in it can execute. It holds whole tensors, so a run may resume on any mesh. The weights are model folders
of diffusers, `transformer` and, averaged, `transformer_ema`. A folder appears under its final name only when it is
whole, and older ones are removed only after that.
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
from opensora_accel.training.together import from_first_rank

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
TOKENIZER = "tokenizer.json"
MODEL_CONFIG, MODEL_WEIGHTS = "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"
AVERAGED_CONFIG, AVERAGED_WEIGHTS = (
    "transformer_ema/config.json",
    "transformer_ema/diffusion_pytorch_model.safetensors",
)
_REQUIRED = (STATE, OPTIMIZER, MODEL_CONFIG, MODEL_WEIGHTS)
_OPTIONAL = (AVERAGED_CONFIG, AVERAGED_WEIGHTS, TOKENIZER)
_STEP = re.compile(r"step_\d+")
_PARTIAL = ".partial"
_ADAM_ENTRIES = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class TrainState:
    """What a run is, beyond its configuration."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: EMA | None
    step: int = 0


def save_checkpoint(
    folder: Path, state: TrainState, extra: Mapping[str, Any], texts: Mapping[str, str], keep: int
) -> None:
    """Writes `folder` whole or not at all, and then removes all but the newest `keep` that the same run wrote.

    Args:
        extra: JSON values stored beside the step (configuration, data position, the run's id under "run").
        texts: further files by name.

    Communication: sharded tensors are gathered one by one, so every rank has to call; rank 0 writes, and its error
    is raised on all of them.

    Raises OSError where the folder cannot be written; what was saved before is left as it was.
    """
    weights = _whole(state.model.state_dict())
    tensors = {MODEL_WEIGHTS: weights, OPTIMIZER: _whole(_optimizer_tensors(state.model, state.optimizer))}
    config = _model_config(state.model)
    record = {
        "step": state.step,
        "model_class": _class_name(state.model),
        "ema_updates": state.ema.num_updates if state.ema is not None else 0,
        **extra,
    }
    files = {STATE: json.dumps(record, indent=2) + "\n", MODEL_CONFIG: config, **texts}
    if state.ema is not None:
        tensors[AVERAGED_WEIGHTS] = {**weights, **_whole(state.ema.weights)}
        files[AVERAGED_CONFIG] = config

    def write() -> None:
        try:
            _write_whole(folder, tensors, files)
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"the checkpoint {folder} could not be saved ({error}); make room for it or make its place writable, "
                "and go on from the newest whole one with --resume"
            ) from error
        _prune(folder, extra.get("run"), keep)

    from_first_rank(write)


def _write_whole(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], files: Mapping[str, str]) -> None:
    """Safetensors and texts by their names in the folder, which appears once all are there."""
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
        set_aside(folder)
        partial.rename(folder)
    finally:
        _remove_partial(folder.parent)  # what a full disk has left; nothing, where all went well


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, by step."""
    found = [path.parent for path in folder.glob(f"step_*/{MANIFEST}") if _STEP.fullmatch(path.parent.name)]
    return sorted(found, key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def set_newer_aside(folder: Path, step: int) -> list[Path]:
    """Renames the checkpoints after `step`, which a run that goes on from there will write again."""
    return [set_aside(path) for path in list_checkpoints(folder) if _step(path) > step]


def set_aside(path: Path) -> Path:
    """Gives whatever is there, a link too, another name, under which nothing touches it; the name it has now."""
    if not os.path.lexists(path):
        return path
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.kept_{number}")):
        number += 1
    return path.rename(target)


def _remove_partial(folder: Path) -> None:
    """What a save left that did not end; a link of that name is removed and not followed."""
    for path in folder.glob(f"step_*{_PARTIAL}"):
        if _STEP.fullmatch(path.name.removesuffix(_PARTIAL)):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)


def _prune(newest: Path, run: Any, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints beside `newest` that this run wrote, by its id.

    Links stay: what they lead to was put elsewhere to be kept. Files that the manifest does not list stay too. What
    cannot be removed is told, and never ends a run whose newest checkpoint is whole.
    """
    others = [path for path in list_checkpoints(newest.parent) if path != newest and not path.is_symlink()]
    mine = [path for path in others if _is_of_run(path, run)]
    for path in mine[: len(mine) + 1 - keep]:
        try:
            _remove(path)
        except OSError as error:
            logger.warning("the old checkpoint %s could not be removed: %s", path, error)


def _is_of_run(folder: Path, run: Any) -> bool:
    try:
        read_manifest(folder)
        return run is not None and json.loads((folder / STATE).read_text(encoding="utf-8"))["run"] == run
    except (OSError, ValueError, LookupError, TypeError):
        return False  # damaged, or of somebody else


def _remove(folder: Path) -> None:
    """The checkpoint's own files; the folder stays where somebody has put others into it."""
    sums = read_manifest(folder)
    # These two last: by them, a removal that was killed is found and ended by the next one.
    for name in [*(name for name in sums if name != STATE), STATE, MANIFEST]:
        (folder / name).unlink(missing_ok=True)
    for place in [*{(folder / name).parent for name in sums} - {folder}, folder]:
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def read_manifest(folder: Path) -> dict[str, str]:
    """The SHA-256 sum of every file of a checkpoint.

    Raises ValueError where the manifest is damaged, or does not list every file that a checkpoint is read from: a
    file that it leaves out would be loaded unseen.
    """
    path = folder / MANIFEST
    try:
        sums = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}); resume from another checkpoint of this run"
        ) from error
    if not isinstance(sums, dict) or not all(
        isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text) for text in sums.values()
    ):
        raise ValueError(
            f"{path} is damaged (it is no table of SHA-256 sums); resume from another checkpoint of this run"
        )
    for name in sums:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(
                f"{path} lists {name!r}, which is outside of the checkpoint; resume from another one"
            )
    unlisted = [name for name in _REQUIRED if name not in sums]
    unlisted += [name for name in _OPTIONAL if name not in sums and os.path.lexists(folder / name)]
    if unlisted:
        raise ValueError(
            f"{path} does not list {', '.join(unlisted)}: whether they are as they were written cannot be told; "
            "resume from another checkpoint of this run"
        )
    return sums


def digest(folder: Path) -> str:
    """Equal for two checkpoints whose manifests are equal, and so all of their files, once they are verified."""
    return _sha256(folder / MANIFEST)


def read_record(folder: Path) -> dict[str, Any]:
    """The JSON of a checkpoint whose files are all as they were written.

    Raises:
        FileNotFoundError: not a checkpoint.
        ValueError: the manifest is damaged or leaves files out, or a file is missing or was changed.
    """
    if not (folder / MANIFEST).is_file():
        whole = [str(path) for path in list_checkpoints(folder)] or [
            str(p) for p in list_checkpoints(folder.parent)
        ]
        hint = f"; there are {', '.join(whole)}" if whole else ""
        raise FileNotFoundError(f"{folder} is no checkpoint (it has no {MANIFEST}){hint}")
    for name, expected in read_manifest(folder).items():
        path = folder / name
        if not path.is_file() or _sha256(path) != expected:
            what = "was changed since it was written" if path.is_file() else "is missing"
            raise ValueError(f"{path} {what}; resume from another checkpoint of this run")
    record = json.loads((folder / STATE).read_text(encoding="utf-8"))
    lacking = {"step", "config", "data", "ema_updates"} - set(record if isinstance(record, dict) else ())
    if lacking:
        raise ValueError(
            f"{folder / STATE} is no record of a checkpoint: it lacks {', '.join(sorted(lacking))}; resume from "
            "another checkpoint"
        )
    return record


def load_checkpoint(folder: Path, record: Mapping[str, Any], state: TrainState) -> None:
    """Fills model, optimizer and EMA from a checkpoint that `read_record` has found whole.

    Raises ValueError, and changes nothing, where the checkpoint is of another model.
    """
    weights = load_file(folder / MODEL_WEIGHTS)
    _check_same_model(folder, record, state.model, weights)
    for name, tensor in state.model.state_dict().items():
        _fill(tensor.detach(), weights[name])
    _load_optimizer(load_file(folder / OPTIMIZER), state)
    if state.ema is not None:
        saved = folder / AVERAGED_WEIGHTS
        averaged = load_file(saved) if saved.is_file() else weights
        for name, weight in state.ema.weights.items():
            _fill(weight, averaged[name])
        state.ema.num_updates = record["ema_updates"]
    state.step = record["step"]


def _class_name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")


def _model_config(model: Any) -> str:
    """What `from_pretrained` of diffusers reads, without the class that FSDP makes and paths of this machine."""
    values = json.loads(model.to_json_string())
    values.pop("_name_or_path", None)
    return json.dumps({**values, "_class_name": _class_name(model)}, indent=2, sort_keys=True) + "\n"


def _check_same_model(
    folder: Path, record: Mapping[str, Any], model: nn.Module, weights: Mapping[str, Tensor]
) -> None:
    mine = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    saved = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if mine == saved:
        return
    different = [name for name in {**mine, **saved} if mine.get(name) != saved.get(name)]
    shown = "; ".join(
        f"{name}: {saved.get(name, 'absent')} in the checkpoint, {mine.get(name, 'absent')} here"
        for name in different[:3]
    )
    raise ValueError(
        f"{folder} is of another model ({record.get('model_class')}, {len(different)} tensors differ from this "
        f"{_class_name(model)}): {shown}. Resume with the saved configuration (leave out --model options), or "
        "start a new run in another --output"
    )


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On rank 0 every tensor whole, on the host; elsewhere nothing is kept."""
    kept = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            kept[name] = full.detach().to("cpu", copy=True).contiguous()
    return kept


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        entries = optimizer.state.get(parameter, {})
        for entry in _ADAM_ENTRIES:
            if entry in entries:
                found[f"{name}.{entry}"] = entries[entry]
    return found


def _load_optimizer(tensors: Mapping[str, Tensor], state: TrainState) -> None:
    for name, parameter in state.model.named_parameters():
        if f"{name}.step" not in tensors:
            continue
        entries = state.optimizer.state[parameter]
        entries["step"] = tensors[f"{name}.step"].clone()
        for entry in ("exp_avg", "exp_avg_sq"):
            entries[entry] = torch.zeros_like(parameter, requires_grad=False)
            _fill(entries[entry], tensors[f"{name}.{entry}"])


@torch.no_grad()
def _fill(target: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor into a parameter or into this rank's shard of it."""
    if isinstance(target, DTensor):
        # src_data_rank=None: every rank has read the file, so each cuts its own shard.
        local = distribute_tensor(
            whole.to(target.device, target.dtype), target.device_mesh, target.placements, src_data_rank=None
        )
        target.copy_(local)
    else:
        target.copy_(whole)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
