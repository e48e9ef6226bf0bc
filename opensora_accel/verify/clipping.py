"""Gradients before and after they are clipped.

Clipped to one norm, all gradients look alike whatever factor they had: a gradient of half its size is clipped to the
same one. So what is compared is each gradient as a clip function found it; and, apart from that, whether all ranks
clip by the norm of the whole gradient.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

_EPSILON = 1e-6
"""That torch adds to a norm before it divides by it."""
_NORMS = (2.0, float("inf"), 1.0)


@dataclass(frozen=True)
class Clip:
    """One call of a clip function."""

    how: Literal["norm", "value"]
    limit: float
    names: tuple[str, ...]
    """Of the parameters that it was given."""

    def without(self, names: Collection[str]) -> Clip:
        return replace(self, names=tuple(name for name in self.names if name not in names))


Seen = Callable[[Literal["norm", "value"], float, Sequence[Tensor]], None]
"""How, the limit, and the parameters whose gradients are about to be clipped."""


@contextlib.contextmanager
def before_clipping(see: Seen) -> Iterator[None]:
    """Within it, `see` is told of every call of torch's clip functions, before they change a gradient.

    accelerate, lightning and others call these; FSDP1 has a method of its own. A clip written by hand is not seen.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    def by_norm(function: Any) -> Any:
        def call(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            see("norm", float(max_norm), given)
            return function(given, max_norm, *args, **kwargs)

        return call

    def by_value(function: Any) -> Any:
        def call(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            see("value", float(clip_value), given)
            return function(given, clip_value, *args, **kwargs)

        return call

    def by_fsdp(function: Any) -> Any:
        def call(self: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            see("norm", float(max_norm), list(self.parameters()))
            return function(self, max_norm, *args, **kwargs)

        return call

    clip_with_fsdp = FullyShardedDataParallel.clip_grad_norm_
    with (
        _wrapped(torch.nn.utils.clip_grads_with_norm_, by_norm),
        _wrapped(torch.nn.utils.clip_grad_value_, by_value),
        mock.patch.object(FullyShardedDataParallel, "clip_grad_norm_", by_fsdp(clip_with_fsdp)),
    ):
        yield


@contextlib.contextmanager
def _wrapped(function: Any, wrapper: Callable[[Any], Any]) -> Iterator[None]:
    """Within it, `function` runs what `wrapper` makes of it, for those too that have imported it by its name.

    torch decorates its clip functions, so the one that does the work lies in a cell of what is imported.
    """
    (cell,) = (cell for cell in function.__closure__ if cell.cell_contents is function.__wrapped__)
    original = cell.cell_contents
    cell.cell_contents = wrapper(original)
    try:
        yield
    finally:
        cell.cell_contents = original


Limits = Mapping[tuple[str, str], float]
"""By how it is clipped ("norm", "value") and the parameter's name."""


def clipped(
    clips: Sequence[Clip], gradients: Mapping[str, Tensor | None], limits: Limits
) -> list[dict[str, Tensor]]:
    """What `gradients` should be after `clips`: one answer for each norm that may have been meant.

    That of each call's parameters, or of all that are clipped by norm (accelerate calls once for each mesh).
    `limits` are those of the single device, where it clips too.
    """
    present = {name: g for clip in clips for name in clip.names if (g := gradients.get(name)) is not None}
    together = tuple(dict.fromkeys(name for clip in clips if clip.how == "norm" for name in clip.names))
    answers = []
    for order, is_together in itertools.product(_NORMS, (False, True)):
        found = dict(present)
        of_all = _norm([found[name] for name in together if name in found], order)
        for clip in clips:
            names = [name for name in clip.names if name in found]
            norm = of_all if is_together else _norm([found[name] for name in names], order)
            for name in names:
                limit = limits.get((clip.how, name), clip.limit)
                if clip.how == "norm":
                    found[name] = found[name] * min(1.0, limit / (norm + _EPSILON))
                else:
                    found[name] = found[name].clamp(-limit, limit)
        answers.append(found)
    return answers


def _norm(tensors: Sequence[Tensor], order: float) -> float:
    if not tensors:
        return 0.0
    return torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in tensors]), order).item()
