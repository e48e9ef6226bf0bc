"""Whether the ranks that share a sample really have the same one.

Ranks of a sequence group each hold a part of one clip. Where a loop seeds by RANK, they hold parts of different clips,
or of different noise: the loss looks as always, and every gradient is wrong. So in a model's first forwards, in
those that whoever watches a run asks for, and in all with OPENSORA_ACCEL_DEBUG=1, its inputs are compared within the
group, and in the first one its weights.

What is compared of a tensor x are its norm and the projections cos(k·i)·x / ‖x‖ for four numbers k. Other noise moves a
projection by about 1; encoders that round otherwise on another GPU move it by about their rounding, which must not be
an error. Few or whole numbers, as timesteps are, have to be equal.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from opensora_accel.communications import every_forward_is_compared, gather_objects, inputs_are_compared

NUM_COMPARED_FORWARDS = 3

_FREQUENCIES = (1.0, math.sqrt(2), math.sqrt(3), math.sqrt(5))
_FEW, _TOLERANCE, _TOLERANCE_OF_FEW = 64, 0.05, 1e-6


@dataclass(frozen=True)
class Summary:
    """Numbers that two ranks must have alike, to a tolerance (absolute, and relative for large ones)."""

    numbers: tuple[float, ...]
    tolerance: float

    def agrees(self, other: Summary | None) -> bool:
        if other is None or len(self.numbers) != len(other.numbers):
            return False
        return all(
            math.isclose(a, b, rel_tol=self.tolerance, abs_tol=self.tolerance)
            or (math.isnan(a) and math.isnan(b))
            for a, b in zip(self.numbers, other.numbers, strict=True)
        )


class Agreement:
    """Compares a model's inputs within its sequence group, in its first forwards."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._num_forwards = 0

    def check(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], packed: str | None = None
    ) -> bool:
        """Compares this forward's inputs, what it is told of its samples, and in the first forward the weights.

        Returns:
            Whether this forward was compared, on all ranks alike.

        Communication: one gather of a few numbers a tensor, in the forwards that are compared.

        Raises:
            ValueError: on every rank of the group, where one of them has other inputs or weights.
        """
        if not inputs_are_compared() or self._group.size() == 1:
            return False
        # A few forwards are enough, because a loop that seeds by RANK does so from its first step.
        number, self._num_forwards = self._num_forwards, self._num_forwards + 1
        if number >= NUM_COMPARED_FORWARDS and not every_forward_is_compared():
            return False
        # By parameter name: what one rank passes by position, another may pass by keyword.
        values = dict(named_values("", inspect.signature(model.forward).bind(*args, **kwargs).arguments))
        if not all(is_real(value) for value in values.values() if isinstance(value, Tensor)):
            return False
        # Not part of what the step computes: who records its operations or communication should not meet this.
        with _disable_current_modes(), torch.no_grad():
            mine = {f"input {name}": summarise(value) for name, value in values.items()}
            if packed is not None:
                mine["input run_packed's lengths"] = Summary((float(int(packed[:12], 16)),), 0.0)
            if number == 0:
                for name, weight in model.named_parameters():
                    if is_real(weight):
                        flat = (torch.view_as_real(weight) if weight.is_complex() else weight).flatten()
                        # Two sums are enough, because weights are equal to the last bit, or they are others.
                        sums = [flat.sum(dtype=torch.float64), flat.abs().sum(dtype=torch.float64)]
                        mine[f"weight {name}"] = Summary(tuple(torch.stack(sums).tolist()), _TOLERANCE_OF_FEW)
            everyone = gather_objects(mine, self._group)
        self._compare(model, everyone, number + 1)
        return True

    def _compare(self, model: nn.Module, everyone: list[dict[str, Summary]], number: int) -> None:
        names = list(dict.fromkeys(name for each in everyone for name in each))
        first = everyone[0]
        # Every rank has the same list, and so all of them raise the same error, or none.
        for rank, theirs in enumerate(everyone):
            differing = [
                name for name in names if name not in first or not first[name].agrees(theirs.get(name))
            ]
            if not differing:
                continue
            ranks = dist.get_process_group_ranks(self._group)
            kind, _, name = differing[0].partition(" ")
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            remedy = (
                "Load or initialise the same weights on all of them"
                if kind == "weight"
                else "Ranks of a sequence group share a sample: draw samples, noise and timesteps by "
                "parallel_states.get_data_parallel_group().rank(), and not by the global rank"
            )
            raise ValueError(
                f"in forward {number} rank {ranks[0]} and rank {ranks[rank]} of a sequence group called "
                f"{type(model).__name__} with "
                f"different {'weights' if kind == 'weight' else 'inputs'}: {name}{more}. {remedy}"
            )


def named_values(name: str, value: Any) -> Iterator[tuple[str, Tensor | float]]:
    """Tensors and numbers among the arguments, by a name that says where they are."""
    if isinstance(value, (Tensor, int, float)):
        yield name, value
    elif is_dataclass(value):
        yield from named_values(name, vars(value))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_values(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from named_values(f"{name}[{index}]", item)


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has values: no fake one, no share of one, none that a compiler traces."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def summarise(value: Tensor | float) -> Summary:
    """What is compared of a tensor or of a number."""
    if not isinstance(value, Tensor):
        return Summary((float(value),), _TOLERANCE_OF_FEW)
    flat = (torch.view_as_real(value) if value.is_complex() else value).flatten()
    # Timesteps, lengths and indices must be equal; a latent may be rounded otherwise on another GPU.
    if flat.numel() <= _FEW or not flat.is_floating_point():
        few = torch.cat([flat[:_FEW].double(), flat.double().sum()[None]])
        return Summary((flat.numel(), *few.tolist()), _TOLERANCE_OF_FEW)
    wide = flat.float()
    # Four projections on cosines: other noise moves them by about 1, rounding by about its own size.
    norm, index = wide.norm(), torch.arange(wide.numel(), device=wide.device, dtype=wide.dtype)
    projections = [torch.dot((index * k).cos(), wide) / norm.clamp_min(1e-30) for k in _FREQUENCIES]
    return Summary((flat.numel(), *torch.stack([norm.log(), *projections]).tolist()), _TOLERANCE)
