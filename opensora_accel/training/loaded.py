"""Holds what a run has loaded against the files: model, optimizer, averages, position. A load that is not so ends it.

Two files are read for a model that goes on, and each is compared when it has been read:

    model.path, lora.path    after the model was made: its weights, and its adapter's
    a saved state            after all of it was read: weights, moments, averages; numbers of the optimizer and of the
                             averages, the step, and where the data goes on. Draws follow from seed and step.

What the optimizer or a frozen base keeps in codes of 8 or 4 bits is made anew from what was read, and not compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from opensora_accel.communications import gather_objects
from opensora_accel.observe import unlike_file
from opensora_accel.training.adapters import saved_weights
from opensora_accel.training.build import saved_adapter
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.optim import EMA, is_quantized, numbers_of
from opensora_accel.training.saved_state import Record, TrainState, stored_of
from opensora_accel.watchdog import named
from opensora_accel.weights import Stored, find_stored

_REMEDY = (
    "start again; if it comes back, test this machine's memory and disk, and report it with the files' names"
)


def check_weights(model: nn.Module, config: TrainConfig) -> None:
    """Compares a model that was made with the files that it was made from.

    Communication: two object all-gathers, where there are files.

    Raises:
        ValueError: on all ranks, where a tensor is not what its file has.
    """
    state = dict(model.state_dict())
    if config.model.path:
        stored = find_stored(Path(config.model.path))
        # A layer with an adapter holds its weight one level down.
        below = {_without_adapter(name): tensor for name, tensor in state.items()}
        if config.lora.base != "whole":  # codes have taken the place of some
            stored = {name: each for name, each in stored.items() if name in below}
        _check(f"model.path {config.model.path}", below, stored)
    adapter = saved_adapter(config)
    if adapter is not None:
        _check(f"lora.path {config.lora.path}", state, adapter.stored)


def _without_adapter(name: str) -> str:
    return name.replace(".base_layer.", ".")


def check_loaded(
    folder: Path, record: Record, states: Sequence[TrainState], position: Mapping[str, Any]
) -> None:
    """Compares what was loaded with the saved state.

    Args:
        position: of the data, as it is now.

    Communication: object all-gathers.

    Raises:
        ValueError: on all ranks, where a tensor or a number is not what the files have.
    """
    for number, state in enumerate(states):
        stored = stored_of(folder, number, state)
        held: dict[str, Tensor] = {
            f"weight {name}": each for name, each in saved_weights(state.model).items()
        }
        for name, parameter in state.model.named_parameters():
            for entry, value in state.optimizer.state.get(parameter, {}).items():
                held[f"{entry} of {name}"] = value
        if isinstance(state.ema, EMA):
            held |= {f"average of {name}": each for name, each in state.ema.weights.items()}
        _check(str(folder), held, stored)
        _check_numbers(folder, record, number, state, position)


def _check(what: str, held: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> None:
    coded = {name for name, tensor in held.items() if is_quantized(tensor)}
    unlike = unlike_file(
        {name: tensor for name, tensor in held.items() if name in stored and name not in coded},
        {name: each for name, each in stored.items() if name not in coded},
    )
    if unlike:
        raise ValueError(f"{what} was not loaded as it lies on disk: {unlike}; {_REMEDY}")


def _check_numbers(
    folder: Path, record: Record, number: int, state: TrainState, position: Mapping[str, Any]
) -> None:
    of_model, saved = record.models[number], dataclasses.asdict(record.data)
    pairs: list[tuple[str, Any, Any]] = [
        ("the step", state.step, record.step),
        ("the position of the data", position["position"], saved["position"]),
    ]
    if of_model.optimizer:
        pairs.append(("the numbers of the optimizer", numbers_of(state.optimizer), of_model.optimizer))
    if isinstance(state.ema, EMA):
        pairs.append(("the count of averaged steps", state.ema.num_updates, of_model.ema_updates))
    # Of another list of videos the order is new, which a warning has said.
    if position["order"] == saved["order"]:
        excluded = [each for each in saved["excluded"] if each not in position["excluded"]]
        pairs.append(("videos that were left out and are no more", excluded, []))
    mine = [
        f"{what}: {held} is held, and {expected} was stored"
        for what, held, expected in pairs
        if held != expected
    ]
    everyone = gather_objects(mine)
    ranks = [rank for rank, wrong in enumerate(everyone) if wrong]
    if ranks:
        raise ValueError(
            f"{folder} was not loaded as it lies on disk: {everyone[ranks[0]][0]}, on {named(ranks, 'rank')}; {_REMEDY}"
        )
