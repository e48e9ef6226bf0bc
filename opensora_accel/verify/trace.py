"""Where a wrong forward goes wrong: the first module whose output is not the single device's, though its inputs are.

A rank of a sequence group holds some tokens, one of a tensor group some channels or a part of a sum. So an output is
right where it is the single device's, or rows of it along one dim which all ranks together have, or where the ranks'
outputs add up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_accel.verify.containers import map_tensors
from opensora_accel.verify.fit import TOLERANCE, magnitude
from opensora_accel.verify.parameters import named_modules, whole


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    name: str
    number: int
    """How often it was called before."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def trace(model: nn.Module, calls: list[Call]) -> list[Callable[[], None]]:
    """Notes every call of the model's modules as it ends, recomputation left out. Returns what undoes it."""
    counts: dict[str, int] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: object, kwargs: object, output: object) -> None:
            if torch._C._current_graph_task_id() == -1:
                number = counts.get(name, 0)
                counts[name] = number + 1
                calls.append(Call(name, number, _tensors((args, kwargs)), _tensors(output)))

        return hook

    return [
        module.register_forward_hook(hook_of(name), with_kwargs=True).remove
        for name, module in named_modules(model)
    ]


def _tensors(value: object) -> tuple[Tensor, ...]:
    found: list[Tensor] = []

    def note(_name: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            found.append(whole(tensor))
        return tensor

    map_tensors("", value, note)
    return tuple(found)


@dataclass(frozen=True)
class Origin:
    """The first call that is wrong."""

    name: str | None
    """Of its module; None where every output is right, as far as can be told."""
    are_inputs_right: bool = True
    """Otherwise what it was given was wrong already, and no call before it was."""


def find_origin(expected: Sequence[Sequence[Call]], groups: Sequence[Sequence[Sequence[Call]]]) -> Origin:
    """Where the forward of the ranks goes wrong.

    Args:
        expected: the single device's calls, for each turn.
        groups: for each turn, the calls of the ranks that share its samples.
    """
    wrong = None
    for call in expected[0]:
        found = [_of(call, turn) for turn in expected]
        ranks = [[_of(call, rank) for rank in group] for group in groups]
        if any(each is None for each in found) or any(each is None for group in ranks for each in group):
            continue  # not every rank has it
        pairs = list(zip(found, ranks, strict=True))
        if all(_are_right([one.outputs for one in of], turn.outputs) is not False for turn, of in pairs):  # type: ignore[union-attr]
            continue
        if all(_are_right([one.inputs for one in of], turn.inputs) is not False for turn, of in pairs):  # type: ignore[union-attr]
            return Origin(call.name, True)
        wrong = wrong or Origin(call.name, False)
    return wrong or Origin(None)


def _of(call: Call, calls: Sequence[Call]) -> Call | None:
    return next((each for each in calls if (each.name, each.number) == (call.name, call.number)), None)


def _are_right(ranks: Sequence[Sequence[Tensor]], expected: Sequence[Tensor]) -> bool | None:
    """None where nothing can be told: other tensors, or shapes that are no part of the single device's."""
    if not expected or any(len(rank) != len(expected) for rank in ranks):
        return None
    answers = [_is_right([rank[i] for rank in ranks], tensor) for i, tensor in enumerate(expected)]
    return False if False in answers else None if None in answers else True


def _is_right(ranks: Sequence[Tensor], expected: Tensor) -> bool | None:
    if all(_is_close(each, expected) for each in ranks):
        return True
    if all(each.shape == expected.shape for each in ranks) and _is_close(
        torch.stack(list(ranks)).sum(0), expected
    ):
        return True
    fits = False
    for dim in range(expected.dim()):
        if all(_is_part(each, expected, dim) for each in ranks):
            fits = True
            rows = [_rows(each, expected, dim) for each in ranks]
            if torch.stack(rows).any(0).all() and all(
                r.sum() >= each.size(dim) for r, each in zip(rows, ranks, strict=True)
            ):
                return True
    return False if fits else None


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool(
        ((found - expected).abs() <= TOLERANCE * max(magnitude(expected), 1e-300)).all()
    )


def _is_part(found: Tensor, expected: Tensor, dim: int) -> bool:
    shapes = [list(each.shape) for each in (found, expected)]
    return (
        found.dim() == expected.dim() and shapes[0].pop(dim) <= shapes[1].pop(dim) and shapes[0] == shapes[1]
    )


def _rows(found: Tensor, expected: Tensor, dim: int) -> Tensor:
    """Which rows of `expected` are in `found`: bool, one each."""
    mine, all_ = (each.movedim(dim, 0).flatten(1) for each in (found, expected))
    if not mine.numel() or not all_.numel():
        return torch.zeros(all_.size(0), dtype=torch.bool)
    limit = TOLERANCE * magnitude(expected)
    return torch.stack([((row - mine).abs().amax(1) <= limit).any() for row in all_])
