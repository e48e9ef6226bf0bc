"""Saved state: safetensors and JSON in one folder per checkpoint, under a manifest of SHA-256 sums.

Nothing in it can execute. It holds whole tensors, so a run may resume on any mesh. A folder appears under its
final name only when it is whole, and older ones are removed only after that.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from opensora_accel.training.optim import EMA

MANIFEST = "manifest.json"
STATE = "state.json"
_STEP = re.compile(r"step_\d+")
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
    """Writes `folder` whole or not at all, and then removes all but the newest `keep` beside it.

    Args:
        extra: JSON values stored beside the step (configuration, data position).
        texts: further files by name.

    Communication: sharded tensors are gathered one by one, so every rank has to call; rank 0 writes.
    """
    tensors = {
        "model": _whole(dict(state.model.named_parameters())),
        "optimizer": _whole(_optimizer_tensors(state.model, state.optimizer)),
    }
    if state.ema is not None:
        tensors["ema"] = _whole(state.ema.weights)
    if dist.get_rank() == 0:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, entries in tensors.items():
            save_file(entries, partial / f"{name}.safetensors")
        record = {
            "step": state.step,
            "model_class": _class_name(state.model),
            "ema_updates": state.ema.num_updates if state.ema is not None else 0,
            **extra,
        }
        (partial / STATE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        _write_manifest(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        for old in list_checkpoints(folder.parent)[:-keep]:
            if old != folder:
                shutil.rmtree(old)
    dist.barrier()


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, by step."""
    found = [path.parent for path in folder.glob(f"step_*/{MANIFEST}") if _STEP.fullmatch(path.parent.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def set_newer_aside(folder: Path, step: int) -> list[Path]:
    """Renames the checkpoints after `step`, which a run that goes on from there will write again."""
    renamed = []
    for path in list_checkpoints(folder):
        if int(path.name.removeprefix("step_")) > step:
            number = 1
            while (target := path.with_name(f"{path.name}.before_resume_{number}")).exists():
                number += 1
            renamed.append(path.rename(target))
    return renamed


def read_record(folder: Path) -> dict[str, Any]:
    """The JSON of a checkpoint whose files are all as they were written.

    Raises:
        FileNotFoundError: not a checkpoint.
        ValueError: a file is missing or was changed.
    """
    if not (folder / MANIFEST).is_file():
        whole = [str(path) for path in list_checkpoints(folder)] or [
            str(p) for p in list_checkpoints(folder.parent)
        ]
        hint = f"; there are {', '.join(whole)}" if whole else ""
        raise FileNotFoundError(f"{folder} is no checkpoint (it has no {MANIFEST}){hint}")
    for name, expected in json.loads((folder / MANIFEST).read_text(encoding="utf-8")).items():
        path = folder / name
        if not path.is_file() or _sha256(path) != expected:
            what = "was changed since it was written" if path.is_file() else "is missing"
            raise ValueError(f"{path} {what}; resume from another checkpoint of this run")
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def load_checkpoint(folder: Path, record: Mapping[str, Any], state: TrainState) -> None:
    """Fills model, optimizer and EMA from a checkpoint that `read_record` has found whole.

    Raises ValueError, and changes nothing, where the checkpoint is of another model.
    """
    weights = load_file(folder / "model.safetensors")
    _check_same_model(folder, record, state.model, weights)
    for name, parameter in state.model.named_parameters():
        _fill(parameter.detach(), weights[name])
    _load_optimizer(load_file(folder / "optimizer.safetensors"), state)
    if state.ema is not None:
        saved = folder / "ema.safetensors"
        averaged = load_file(saved) if saved.is_file() else weights
        for name, weight in state.ema.weights.items():
            _fill(weight, averaged[name])
        state.ema.num_updates = record["ema_updates"]
    state.step = record["step"]


def _class_name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")


def _check_same_model(
    folder: Path, record: Mapping[str, Any], model: nn.Module, weights: Mapping[str, Tensor]
) -> None:
    mine = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
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


def _write_manifest(folder: Path) -> None:
    sums = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
