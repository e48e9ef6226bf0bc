"""Reads a saved state into a run of any Plan: each rank the rows that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_accel.deferred import region_of
from opensora_accel.training.adapters import saved_weights
from opensora_accel.training.optim import EMA, new_moment
from opensora_accel.training.saved_state.folder import WEIGHTS_STEM, ModelRecord, Record
from opensora_accel.training.saved_state.save import ENTRIES, TrainState, class_name, stems_of
from opensora_accel.weights import Stored, find_stored


def load_states(folder: Path, record: Record, states: Sequence[TrainState]) -> None:
    """Fills models, optimizers and averages from a saved state that `read_record` has found whole.

    Communication: none.

    Raises:
        ValueError: the saved state belongs to another model, or to a run of more or fewer; nothing was changed.
    """
    if len(states) != len(record.models):
        raise ValueError(
            f"{folder} was saved by a run of {len(record.models)} model(s), and this one trains {len(states)} "
            "(flow.boundary); resume with the saved configuration, or start a new run with its folders transformer "
            "and transformer_2 as model.path and model.path_2"
        )
    stored = []
    for number, (of_model, state) in enumerate(zip(record.models, states, strict=True)):
        weights = find_stored(folder / stems_of(number).model, WEIGHTS_STEM)
        _check_same_model(folder, of_model, state.model, weights)
        stored.append(weights)
    for number, (of_model, state) in enumerate(zip(record.models, states, strict=True)):
        _load_state(folder, number, of_model, state, stored[number])
        state.step = record.step


def _load_state(
    folder: Path, number: int, record: ModelRecord, state: TrainState, weights: Mapping[str, Stored]
) -> None:
    """Of the model of this number, whose weights are found already."""
    stems = stems_of(number)
    for name, tensor in saved_weights(state.model).items():
        _fill(tensor.detach(), weights[name])
    moments = find_stored(folder, stems.optimizer)
    fused = state.optimizer.defaults.get("fused")
    for name, parameter in state.model.named_parameters():
        for entry in ENTRIES:
            stored = moments.get(f"{name}.{entry}")
            if stored is None:
                continue
            entries = state.optimizer.state[parameter]
            if entry == "step":
                # The fused kernel counts steps on the device, the others on the host.
                entries[entry] = stored.read(torch.float32).to(parameter.device if fused else "cpu")
            else:
                entries[entry] = new_moment(state.optimizer, parameter, entry)
                _fill(entries[entry], stored)
    if isinstance(state.ema, EMA):
        # A run without averages goes on with them from its weights.
        has_averages = (folder / stems.averaged).is_dir()
        averaged = find_stored(folder / stems.averaged, WEIGHTS_STEM) if has_averages else weights
        for name, weight in state.ema.weights.items():
            _fill(weight, averaged[name])
        state.ema.num_updates = record.ema_updates


def stored_of(folder: Path, number: int, state: TrainState) -> dict[str, Stored]:
    """What the state of a model of this number has to be, by "weight NAME", "ENTRY of NAME" and "average of NAME"."""
    stems = stems_of(number)
    weights = find_stored(folder / stems.model, WEIGHTS_STEM)
    stored = {f"weight {name}": each for name, each in weights.items()}
    for name, each in find_stored(folder, stems.optimizer).items():
        parameter, _, entry = name.rpartition(".")
        stored[f"{entry} of {parameter}"] = each
    if isinstance(state.ema, EMA):
        has_averages = (folder / stems.averaged).is_dir()
        averaged = find_stored(folder / stems.averaged, WEIGHTS_STEM) if has_averages else weights
        # Only what is trained has an average; the files have all.
        stored |= {f"average of {name}": averaged[name] for name in state.ema.weights}
    return stored


@torch.no_grad()
def _fill(target: Tensor, stored: Stored) -> None:
    """Reads a tensor, or this rank's shard of it."""
    if isinstance(target, DTensor):
        region = region_of(target.shape, target.device_mesh, target.placements)
        target.to_local().copy_(stored.read(target.dtype, region))
    else:
        target.copy_(stored.read(target.dtype))


def _check_same_model(
    folder: Path, record: ModelRecord, model: nn.Module, weights: Mapping[str, Stored]
) -> None:
    mine = {name: tuple(tensor.shape) for name, tensor in saved_weights(model).items()}
    saved = {name: stored.shape for name, stored in weights.items()}
    different = [name for name in {**mine, **saved} if mine.get(name) != saved.get(name)]
    if not different:
        return
    shown = "; ".join(
        f"{name}: {saved.get(name, 'absent')} in the saved state, {mine.get(name, 'absent')} here"
        for name in different[:3]
    )
    raise ValueError(
        f"{folder} is of another model ({record.model_class}, {len(different)} tensors differ from this "
        f"{class_name(model)}): {shown}. Resume with the saved configuration (leave out --model options), or "
        "start a new run in another --output"
    )
