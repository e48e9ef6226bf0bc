"""How the calls of several samples become one, of a row that has all of them (`shardformer.packing`).

Two clips with captions of 77 and 12 tokens, which LTX-Video is called for:

    model(tokens [1, 1200, C], time [1, 1200], text [1, 77, D], …)      the first, by the recipe's `call`
    model(tokens [1, 300, C], time [1, 300], text [1, 12, D], …)        the second
    model(tokens [1, 1500, C], time [1, 1500], text [1, 89, D], …)      the row, told of (1200, 300) and (77, 12)

A family says in a function which of its arguments are joined, and how. Every sample has its caption without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Arguments = Mapping[str, Any]
# (the model, the calls of its samples) → the row's call, and each stream's samples, for `run_packed`.
Join = Callable[[nn.Module, Sequence[Arguments]], tuple[dict[str, Any], dict[str, Any]]]
# (the model, the row's answers, the calls of its samples) → each sample's answers.
Part = Callable[[nn.Module, Sequence[Tensor], Sequence[Arguments]], list[list[Tensor]]]


@dataclass(frozen=True)
class RowOf:
    """What a family's recipe says of rows of several samples."""

    join: Join
    part: Part
    # (the run's configuration, what the model is made with) → what of it rows cannot have, and why; empty is nothing.
    refuses: Callable[[Any, Arguments], str] = lambda _config, _arguments: ""


def joined(calls: Sequence[Arguments], dims: Mapping[str, int]) -> dict[str, Tensor]:
    """Arguments of all calls, one behind the other along their dim."""
    return {name: torch.cat([call[name] for call in calls], dim) for name, dim in dims.items()}


def lengths(calls: Sequence[Arguments], name: str) -> list[int]:
    """Of an argument [1, S, …] of each call, S."""
    return [call[name].size(1) for call in calls]


def part_tokens(*names: str) -> Part:
    """Answers of tokens, [1, S, …], cut as the arguments of these names lie in the row, one name for each answer."""

    def part(_model: nn.Module, answers: Sequence[Tensor], calls: Sequence[Arguments]) -> list[list[Tensor]]:
        pieces = [answer.split(lengths(calls, name), 1) for answer, name in zip(answers, names, strict=False)]
        return [list(each) for each in zip(*pieces, strict=True)]

    return part


def per_token(times: Tensor, num_tokens: int) -> Tensor:
    """A time [1], [1, t] of frames, or [1, S] → [1, S]."""
    times = times.reshape(1, -1)
    return times.repeat_interleave(num_tokens // times.size(1), dim=1)
