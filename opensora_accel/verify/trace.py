"""Where a wrong forward goes wrong: the first module whose output is not the single device's, though its inputs are.

A rank of a sequence group holds some tokens, one of a tensor group some channels or a part of a sum. So an output is
right where it is the single device's, or rows of it along one dim which all ranks together have, or where the ranks'
outputs add up to it.
"""

from __future__ import annotations

import math
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
        # A whole number is a count, or where a rank's tokens begin: ranks differ in it, and are right.
        is_count = tensor.dim() == 0 and not tensor.is_floating_point() and not tensor.is_complex()
        if not isinstance(tensor, DTensor) and not is_count:
            found.append(whole(tensor))
        return tensor

    map_tensors("", value, note)
    return tuple(found)


@dataclass(frozen=True)
class Origin:
    """The first call that is wrong."""

    name: str | None
    """Of its module; None where no output is wrong, as far as can be told."""
    are_inputs_right: bool | None = True
    """False where what it was given was wrong already, and no call before it was; None where that cannot be told.

    Where no output is wrong: whether the model's own is known to be right.
    """
    before: str | None = None
    """The first of its modules that was given something wrong, where it has several."""


Spread = Sequence[Sequence[Sequence[Call]]]
"""The calls of ranks, by data rank, then by rank."""


def find_origin(expected: Sequence[Sequence[Call]], ranks: Sequence[Spread]) -> Origin:
    """Where the forward of the ranks goes wrong.

    Args:
        expected: the single device's calls, for each of its turns.
        ranks: for each turn, the calls of the ranks that have its samples.
    """
    wrong, is_model_right = None, False
    for call in expected[0]:
        turns = [_of(call, turn) for turn in expected]
        found = [[[_of(call, rank) for rank in group] for group in spread] for spread in ranks]
        pairs = [
            (turn, [[one for one in group if one is not None] for group in spread])
            for turn, spread in zip(turns, found, strict=True)
            if turn is not None and all(one is not None for group in spread for one in group)
        ]
        if len(pairs) < len(expected):
            continue  # not every rank has it
        gave = [_are_right([[c.outputs for c in g] for g in spread], turn.outputs) for turn, spread in pairs]
        if False in gave:
            given = [
                _are_right([[c.inputs for c in g] for g in spread], turn.inputs) for turn, spread in pairs
            ]
            if all(given):
                return Origin(call.name, before=None if wrong is None else wrong.name)
            wrong = wrong or Origin(call.name, False if False in given else None)
        is_model_right |= not call.name and all(gave)
    return wrong or Origin(None, is_model_right or None)


def _of(call: Call, calls: Sequence[Call]) -> Call | None:
    return next((each for each in calls if (each.name, each.number) == (call.name, call.number)), None)


Tuples = Sequence[Sequence[Sequence[Tensor]]]
"""The tensors of ranks, by data rank, then by rank."""


def _are_right(ranks: Tuples, expected: Sequence[Tensor]) -> bool | None:
    """None where nothing can be told: other tensors, or shapes that are no part of the single device's."""
    if any(len(rank) != len(expected) for group in ranks for rank in group):
        return None
    answers = [
        _is_right([[rank[i] for rank in group] for group in ranks], tensor)
        for i, tensor in enumerate(expected)
    ]
    return False if False in answers else None if None in answers else True


def _is_right(groups: Sequence[Sequence[Tensor]], expected: Tensor) -> bool | None:
    ranks = [each for group in groups for each in group]
    if all(_is_close(each, expected) for each in ranks):
        return True
    if all(each.shape == expected.shape for each in ranks) and _is_close(torch.stack(ranks).sum(0), expected):
        return True
    fits = False
    for dim in range(expected.dim()):
        if all(_is_part(each, expected, dim) for each in ranks):
            fits = True
            if _are_rows([[_rows(each, expected, dim) for each in group] for group in groups]):
                return True
    return False if fits else None


def _are_rows(groups: Sequence[Sequence[Tensor | None]]) -> bool:
    """Whether the ranks of every data rank have rows that no other data rank has, and all of them together all."""
    known = [[rows for rows in group if rows is not None] for group in groups]
    if any(len(some) < len(all_) for some, all_ in zip(known, groups, strict=True)):
        return False
    of_groups = torch.stack([torch.stack(group).any(0) for group in known]).sum(0)
    return bool((of_groups == 1).all())


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool(
        ((found - expected).abs() <= TOLERANCE * max(magnitude(expected), 1e-300)).all()
    )


def _is_part(found: Tensor, expected: Tensor, dim: int) -> bool:
    shapes = [list(each.shape) for each in (found, expected)]
    return (
        found.dim() == expected.dim() and shapes[0].pop(dim) <= shapes[1].pop(dim) and shapes[0] == shapes[1]
    )


def _rows(found: Tensor, expected: Tensor, dim: int) -> Tensor | None:
    """Which rows of `expected` are in `found`: bool, one each. None where `found` has others.

    Rows are told apart by their products with a few random vectors: comparing each with each would take too long.
    """
    mine, all_ = (each.movedim(dim, 0).reshape(each.size(dim), -1) for each in (found, expected))
    if not mine.numel():
        return torch.zeros(all_.size(0), dtype=torch.bool)
    vectors = torch.randn(all_.size(1), 3, dtype=all_.dtype, generator=torch.Generator().manual_seed(0))
    limit = TOLERANCE * magnitude(expected) * math.sqrt(all_.size(1))
    is_same = ((mine @ vectors)[:, None] - all_ @ vectors).abs().amax(-1) <= limit  # [mine, all]
    return is_same.any(0) if bool(is_same.any(1).all()) else None
