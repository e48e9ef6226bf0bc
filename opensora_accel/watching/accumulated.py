"""Which backwards of a step are in the gradients that its optimizer uses, and times what.

A loop may throw away what a backward has left and go on with another batch. It may also take `.grad` into a buffer of
its own after each backward, and hand the buffer to the optimizer. When the next backward begins both look alike: no
parameter has a gradient. What they come to is known when the optimizer steps. So sums of each part of the gradients are
kept, and the sums of those that are used are fitted by them:

    part 1: 3, 1    part 2: 2, -4    used: 2, -4       part 2 alone: part 1 was thrown away
                                     used: 5, -3       1 times each
                                     used: 2.5, -1.5   ½ times each: divided after the backwards

Where no wrapper averages, parts of all ranks are averaged by hand: then the mean over ranks of each part fits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from opensora_accel.observe import ForwardCall, local_part

# So many sums of a rank's gradients.
_NUM_SUMS = 64
# What is left of the sums that fit; that of a part beside the one that counts most, which is thrown away.
_FITS, _THROWN_AWAY = 0.02, 0.05

Sums = list[float]


@torch.no_grad()
def sums_of_gradients(model: nn.Module) -> Tensor:
    """Sums of the elements of this rank's gradients, on the device."""
    device = next(model.parameters()).device
    sums = torch.zeros(_NUM_SUMS, dtype=torch.float64, device=device)
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        flat = local_part(parameter.grad).reshape(-1)
        rows = flat.numel() // _NUM_SUMS
        rest = flat[rows * _NUM_SUMS :]
        sums += flat[: rows * _NUM_SUMS].view(rows, _NUM_SUMS).sum(0, dtype=torch.float64)
        sums[: rest.numel()] += rest
    return sums


def _has_gradient(model: nn.Module) -> bool:
    """Whether a weight has one that is not 0; of a rank that holds no numbers, whether it has any."""
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    filled = [gradient for gradient in gradients if gradient.numel()]
    return any(gradient.any() for gradient in filled) if filled else bool(gradients)


@dataclass(frozen=True)
class Part:
    """What is in `.grad` after one backward, or after several that the loop has not taken anything away between."""

    sums: Tensor
    is_there: bool
    # How many losses were given, forwards made and backwards ended until then, from the step's begin on.
    num_losses: int
    num_calls: int
    num_backwards: int


@dataclass(frozen=True)
class Composition:
    """Times what each part is in the gradients that are used."""

    factors: tuple[float, ...]
    is_average: bool
    """Whether it is the mean over ranks that is in them, and not what this rank has."""

    @property
    def counts(self) -> tuple[bool, ...]:
        """Whether each part is in them at all."""
        least = _THROWN_AWAY * max(map(abs, self.factors))
        return tuple(abs(factor) > least or not least for factor in self.factors)

    @property
    def factor(self) -> float:
        """The mean of the parts that count."""
        return statistics.mean(
            factor for factor, counts in zip(self.factors, self.counts, strict=True) if counts
        )

    @property
    def weights(self) -> tuple[float, ...]:
        """What each part counts beside the others: 1, unless the loop weighs them."""
        mean = self.factor
        return tuple(
            factor / mean if counts and mean else float(counts)
            for factor, counts in zip(self.factors, self.counts, strict=True)
        )


def composition(everyone: Sequence[tuple[Sequence[Sums], Sums]]) -> Composition | None:
    """None where no factors fit: gradients were clipped element by element, or have something else in them.

    Args:
        everyone: the sums of each rank's parts, and of the gradients that it uses; as many parts on all of them.
    """
    if len({len(parts) for parts, _ in everyone}) != 1:
        return None
    # [parts, ranks × sums]
    own = torch.tensor([parts for parts, _ in everyone], dtype=torch.float64).transpose(0, 1)
    used = torch.tensor([used for _, used in everyone], dtype=torch.float64).flatten()
    if not own.numel() or not used.isfinite().all():
        return None
    # What has NaN in it can only have been thrown away.
    own = torch.where(own.isfinite().flatten(1).all(1)[:, None, None], own, 0.0)
    mean = own.mean(1, keepdim=True).expand_as(own)
    # The last part alone comes first: batches that are alike fit in many ways.
    for first in dict.fromkeys((len(own) - 1, 0)):
        for is_average in (False, True):
            columns = (mean if is_average else own).flatten(1)[first:]
            factors = torch.linalg.lstsq(columns.T, used[:, None], driver="gelsd").solution[:, 0]
            if (factors @ columns - used).norm() <= _FITS * used.norm():
                return Composition((0.0,) * first + tuple(factors.tolist()), is_average)
    return None


class Parts:
    """The parts of a step's gradients, by the order in which they were in `.grad`."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.begin_step()

    def begin_step(self) -> None:
        self._taken: list[Part] = []
        self._last: Part | None = None
        self.num_backwards = 0

    def begin_backward(self) -> None:
        """When no weight has a gradient after a backward before, the loop has taken or thrown away what they had."""
        if self._last is not None and self._last.is_there and not _has_gradient(self._model):
            self._taken.append(self._last)
            self._last = None

    def end_backward(self, num_losses: int, num_calls: int) -> None:
        """Notes what is in `.grad` now."""
        self.num_backwards += 1
        # FSDP2 keeps what it has not reduced yet elsewhere.
        is_there = any(p.grad is not None for p in self._model.parameters())
        sums = sums_of_gradients(self._model)
        self._last = Part(sums, is_there, num_losses, num_calls, self.num_backwards)

    @property
    def all(self) -> list[Part]:
        return self._taken + ([] if self._last is None else [self._last])

    def thrown_away(self, made: Composition) -> Iterator[tuple[range, range]]:
        """The numbers of losses and of backwards of parts that are not in the gradients that are used."""
        num_losses = num_backwards = 0
        for part, counts in zip(self.all, made.counts, strict=True):
            if not counts:
                yield range(num_losses, part.num_losses), range(num_backwards, part.num_backwards)
            num_losses, num_backwards = part.num_losses, part.num_backwards

    def weighed(self, made: Composition, calls: Sequence[ForwardCall]) -> list[ForwardCall]:
        """The forwards of parts that are used, whose outputs have the gradients that the parts count for."""
        weighed, begin = list[ForwardCall](), 0
        for part, weight in zip(self.all, made.weights, strict=True):
            for call in calls[begin : part.num_calls] if weight else ():
                # Not to be copied where all count alike.
                is_one = math.isclose(weight, 1, rel_tol=_FITS)
                gradients = call.gradients if is_one else {k: g * weight for k, g in call.gradients.items()}
                weighed.append(replace(call, gradients=gradients))
            begin = part.num_calls
        return weighed

    def by_hand(self, made: Composition, used: Tensor) -> float:
        """By what gradients were multiplied after the backward: on this rank, if it uses what it has."""
        if made.is_average:
            return made.factor
        weighed = [part.sums * weight for part, weight in zip(self.all, made.weights, strict=True) if weight]
        size = torch.stack(weighed).sum(0).norm()
        return float(used.norm() / size) if size else 0.0
