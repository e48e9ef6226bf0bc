"""Where a wrong forward goes wrong: the first module whose output is not the single device's, though its inputs are.

A rank of a sequence group holds some tokens, one of a tensor group some channels or a part of a sum. So the ranks'
outputs are right where each is the single device's, where they are rows of it along one dim which all ranks together
have, or where they add up to it. With P = 3 and 11 tokens, a layer before the split gives 11 tokens on every rank, one
after it 4, 4 and 3 of the same 11. A pooling that forgets the other ranks gives three means that are neither.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_accel.verify.causes import Origin
from opensora_accel.verify.fit import TOLERANCE, magnitude
from opensora_accel.verify.parameters import map_tensors, named_modules, whole


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module."""

    name: str
    number: int
    """How often it was called before."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@contextlib.contextmanager
def trace_modules(model: nn.Module, calls: list[ModuleCall]) -> Iterator[None]:
    """Within it, every call of the model's modules is added to `calls` as it ends, recomputation left out."""
    counts: dict[str, int] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: object, kwargs: object, output: object) -> None:
            if torch._C._current_graph_task_id() == -1:  # not recomputed within backward
                calls.append(
                    ModuleCall(name, counts.get(name, 0), _tensors((args, kwargs)), _tensors(output))
                )
                counts[name] = counts.get(name, 0) + 1

        return hook

    with contextlib.ExitStack() as stack:
        for name, module in named_modules(model):
            stack.callback(module.register_forward_hook(hook_of(name), with_kwargs=True).remove)
        yield


def _tensors(value: object) -> tuple[Tensor, ...]:
    found: list[Tensor] = []

    def note(_name: str, tensor: Tensor) -> Tensor:
        # A single whole number is a count, or where a rank's tokens begin: ranks differ in it, and are right.
        is_count = tensor.dim() == 0 and not tensor.is_floating_point() and not tensor.is_complex()
        if not isinstance(tensor, DTensor) and not is_count:
            found.append(whole(tensor))
        return tensor

    map_tensors("", value, note)
    return tuple(found)


@dataclass(frozen=True)
class Turn:
    """The single device's calls in one turn, and those of the ranks that have its samples: by data rank, by rank."""

    expected: Sequence[ModuleCall]
    ranks: Sequence[Sequence[Sequence[ModuleCall]]]

    def are_right(self, call: ModuleCall, what: str) -> bool | None:
        """Whether the ranks' `inputs` or `outputs` are the turn's; None where that cannot be told."""
        right = getattr(_find(call, self.expected), what)
        groups = [[getattr(_find(call, rank), what) for rank in group] for group in self.ranks]
        if any(len(tensors) != len(right) for group in groups for tensors in group):
            return None
        answers = [
            _are_right([[tensors[i] for tensors in group] for group in groups], each)
            for i, each in enumerate(right)
        ]
        return False if False in answers else None if None in answers else True

    def has(self, call: ModuleCall) -> bool:
        ranks = [rank for group in self.ranks for rank in group]
        return all(_find(call, calls) is not None for calls in [self.expected, *ranks])


def _find(call: ModuleCall, calls: Sequence[ModuleCall]) -> ModuleCall | None:
    return next((each for each in calls if (each.name, each.number) == (call.name, call.number)), None)


def find_origin(turns: Sequence[Turn]) -> Origin:
    """Where the ranks' forward goes wrong."""
    first_wrong, is_model_right = None, False
    for call in turns[0].expected:
        if not all(turn.has(call) for turn in turns):
            continue
        gave = [turn.are_right(call, "outputs") for turn in turns]
        if False in gave:
            given = [turn.are_right(call, "inputs") for turn in turns]
            # The first module that makes something wrong of what is right.
            if all(given):
                return Origin(call.name, before=None if first_wrong is None else first_wrong.name)
            first_wrong = first_wrong or Origin(call.name, False if False in given else None)
        is_model_right |= not call.name and all(gave)
    return first_wrong or Origin(None, is_model_right or None)


def _are_right(groups: Sequence[Sequence[Tensor]], expected: Tensor) -> bool | None:
    """Whether one tensor's parts are right, by data rank and by rank; None where shapes are no part of `expected`."""
    ranks = [each for group in groups for each in group]
    if all(_is_close(each, expected) for each in ranks):
        return True
    # A row-parallel layer leaves partial sums.
    if all(each.shape == expected.shape for each in ranks) and _is_close(torch.stack(ranks).sum(0), expected):
        return True
    fits = False
    for dim in range(expected.dim()):
        if all(_could_be_rows(each, expected, dim) for each in ranks):
            fits = True
            if _are_all_rows([[_rows(each, expected, dim) for each in group] for group in groups]):
                return True
    return False if fits else None


def _are_all_rows(groups: Sequence[Sequence[Tensor | None]]) -> bool:
    """Whether the ranks of every data rank have rows that no other data rank has, and all of them together all."""
    of_groups = []
    for group in groups:
        known = [rows for rows in group if rows is not None]
        if len(known) < len(group):
            return False
        of_groups.append(torch.stack(known).any(0))
    return bool((torch.stack(of_groups).sum(0) == 1).all())


def _is_close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    return bool(((found - expected).abs() <= TOLERANCE * max(magnitude(expected), 1e-300)).all())


def _could_be_rows(found: Tensor, expected: Tensor, dim: int) -> bool:
    if found.dim() != expected.dim() or found.size(dim) > expected.size(dim):
        return False
    return all(found.size(d) == expected.size(d) for d in range(expected.dim()) if d != dim)


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
