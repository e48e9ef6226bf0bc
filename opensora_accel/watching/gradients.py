"""Whether what is backwarded is the loss that a loop reports, and the gradient its optimizer uses that of the loss.

The first is seen where a backward reaches the model's output: its gradient there is that of the reported loss, divided
by the number of backwards in a step. The second is seen by what the gradient does to the model.

No second backward would show it: the wrapper around the model (DDP, FSDP2) would repeat its mistake. But a small step
Δθ along a gradient G changes the loss by ⟨G, Δθ⟩, if G is its gradient. What changes is seen in the model's outputs,
which every rank has whole, by two forwards more:

    ⟨G, Δθ⟩  =  mean over ranks of  Σ ⟨∂loss/∂output, Δoutput⟩

With a loss of 3θ on each of 2 ranks that share a sample, G = 3 is right. A loop that adds gradients up over them has
G = 6: a step of Δθ = 0.1 changes the loss by 0.3 and not by 0.6, and the gradient is twice too large.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_accel.arguments import tensors_in
from opensora_accel.fsdp import reshard
from opensora_accel.observe import ForwardCall, Holders, as_then, local_part, norms
from opensora_accel.parallel_states import get_data_parallel_group, get_sequence_parallel_group
from opensora_accel.watchdog import named

logger = logging.getLogger(__name__)

# A norm or a loss that was computed on other ranks may be rounded otherwise; factors of ranks are far from 1.
_CLOSE, _ROUGH = 1e-3, 0.1
# Beyond it, a factor of the loss is that of a gradient scaler.
_SCALER = 8.0
# Steps of so many times the weights' norm. A curved loss wants a short one, weights in bf16 a long one.
_STEPS = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
# There and back the loss has to change alike, and two steps have to say the same: else it is curved, or rounded away.
_TOLERANCE = 0.05


class Losses:
    """The losses that a step reports, and how much of each is backwarded."""

    def __init__(self) -> None:
        # For each, by its number, its value, and the samples that it is of.
        self._given: dict[int, tuple[float, tuple[Any, ...]]] = {}
        self.num_given = 0
        # For each output of the model the loss's number, ⟨g, ∂loss/∂output⟩ and
        # ⟨∂loss/∂output, ∂loss/∂output⟩, where g is what is backwarded.
        self._products: list[tuple[int, Tensor, Tensor]] = []

    def add(self, loss: Tensor, outputs: Sequence[Tensor], samples: Sequence[Any]) -> None:
        """One loss, before its backward.

        Args:
            loss: a scalar.
            outputs: those of the model that the loss was computed from, of any shape.
        """
        number, self.num_given = self.num_given, self.num_given + 1
        self._given[number] = loss.item(), tuple(samples)
        if not outputs or not loss.requires_grad:
            return
        of_loss = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
        for output, gradient in zip(outputs, of_loss, strict=True):
            if gradient is not None:
                output.register_hook(self._note(number, gradient))

    def _note(self, number: int, of_loss: Tensor) -> Any:
        def note(backwarded: Tensor) -> None:
            self._products.append((number, (backwarded * of_loss).sum(), of_loss.square().sum()))

        return note

    @property
    def given(self) -> list[tuple[float, tuple[Any, ...]]]:
        return list(self._given.values())

    def forget(self, numbers: range) -> None:
        """Losses whose gradients the loop has thrown away."""
        self._given = {key: loss for key, loss in self._given.items() if key not in numbers}
        self._products = [product for product in self._products if product[0] not in numbers]

    def scale(self) -> float | None:
        """How many times the mean of the losses is backwarded: 1, or a gradient scaler's; None where none is."""
        if not self._products:
            return None
        numbers, *pairs = zip(*self._products, strict=True)
        along, squared = (torch.stack(each).double().sum().item() for each in pairs)
        # A loss that is found wanting may be given and not backwarded.
        return along / squared * len(set(numbers)) if squared else 1.0

    def mistakes(
        self, everyone: Sequence[tuple[int, Any]], by_hand: float | None
    ) -> Iterator[tuple[str, str]]:
        """(Mistake, what).

        Args:
            everyone: the data rank and the losses of each rank, in order of ranks.
            by_hand: what this rank's gradients were multiplied by after the backward, which may mend the scale; None
                where that is not known.
        """
        firsts: dict[int, int] = {}  # the first rank that has each data rank's sample
        for rank, (data_rank, losses) in enumerate(everyone):
            first = firsts.setdefault(data_rank, rank)
            for (value, samples), (other, others) in zip(everyone[first][1], losses, strict=False):
                both = f"{named([first, rank])} share a sample, and have"
                if samples != others:
                    yield "sample", f"{both} {_shown(samples)} and {_shown(others)}"
                    return
                is_nan = math.isnan(value) and math.isnan(other)
                if not is_nan and not math.isclose(value, other, rel_tol=_CLOSE, abs_tol=1e-12):
                    yield "loss", f"{both} the losses {value:.6g} and {other:.6g}"
                    return
        holder_of: dict[str, int] = {}
        for rank in firsts.values():
            for sample in {str(each) for _, samples in everyone[rank][1] for each in samples}:
                if sample in holder_of:
                    yield (
                        "repeated samples",
                        f"{named([holder_of[sample], rank])} both have {sample} in a step",
                    )
                    return
                holder_of[sample] = rank
        scale = self.scale()
        if scale is None:
            yield (
                "loss",
                "what is backwarded does not come from the model's output by way of the loss that is given",
            )
            return
        if by_hand is None:
            return
        num_losses = len({number for number, _, _ in self._products})
        is_mended = math.isclose(scale * by_hand, 1, rel_tol=_CLOSE)
        if scale < _SCALER and abs(scale - 1) > _ROUGH and not is_mended:
            times = f" in each of {num_losses} backwards" if num_losses > 1 else ""
            yield (
                "loss scale",
                f"{scale / num_losses:.4g} times the loss is backwarded{times}, to be {1 / num_losses:.4g}",
            )


def _shown(samples: Sequence[Any]) -> str:
    names = [str(sample) for sample in samples]
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}" or "none"


def norms_of_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The norm of this rank's part of each gradient, as scalars on the device."""
    parts = {name: local_part(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return dict(zip(parts, norms([*parts.values()]) if parts else [], strict=True))


@dataclass(frozen=True)
class Scaled:
    """By what factors one rank's gradients were scaled between backward and step, by hand and by torch's clipping."""

    by_hand: float
    by_clip: float | None  # None where no clip function was called
    of_loss: float | None  # how many times the reported loss was backwarded, see `Losses.scale`

    @property
    def in_all(self) -> float:
        return self.by_hand * (1.0 if self.by_clip is None else self.by_clip)


def scaled_since(
    backward: Mapping[str, Tensor],
    clip: Mapping[str, Tensor] | None,
    step: Mapping[str, Tensor],
    of_loss: float | None,
) -> Scaled | None:
    """None where this rank has no gradients after the backward.

    Args:
        backward, clip, step: scalars by name, as `norms_of_gradients` gives them after the backward, before the first
            clip if there is one, and before the optimizer's step.
    """

    def total(norms: Mapping[str, Tensor]) -> float:
        return float(torch.stack(list(norms.values())).norm()) if norms else 0.0

    sizes = total(backward), total(step if clip is None else clip), total(step)
    if not sizes[0]:
        return None
    by_clip = None if clip is None else sizes[2] / sizes[1] if sizes[1] else 0.0
    return Scaled(sizes[1] / sizes[0], by_clip, of_loss)


def _are_alike(factors: Collection[float]) -> bool:
    return math.isclose(min(factors), max(factors), rel_tol=_CLOSE)


def mistakes_of_gradients(
    model: nn.Module,
    holders: Mapping[str, Holders],
    calls: Sequence[ForwardCall],
    scaled: Sequence[Scaled | None],
    keeps_direction: bool,
) -> Iterator[tuple[str, str]]:
    """(Mistake, what), of gradients that are equal on all ranks that hold the same weights.

    Args:
        scaled: by each rank between backward and step; not all None.
        keeps_direction: False where gradients were clipped by value, and have no size any more.
    """
    known = {rank: each for rank, each in enumerate(scaled) if each is not None}
    if all(each.in_all == 0 for each in known.values()):
        yield (
            "cleared gradients",
            "every gradient is gone or 0 when the optimizer steps, and was not after the backward",
        )
        return
    least, most = (choose(known, key=lambda rank: known[rank].in_all) for choose in (min, max))
    are_alike = _are_alike([each.in_all for each in known.values()])
    if not are_alike and any(isinstance(p, DTensor) for p in model.parameters()):
        yield (
            "clipping",
            f"between backward and step the gradients of rank {least} were scaled by {known[least].in_all:.4g}, "
            f"those of rank {most} by {known[most].in_all:.4g}: each by the norm of its own shards",
        )
        return
    counts, one = _counts_of_ranks(), known[least]
    # A gradient scaler is undone by hand. How it scaled is known by the loss that is given, or else it is 1.
    of_loss = next((each.of_loss for each in known.values() if each.of_loss is not None), None)
    by_hand = one.by_hand * (of_loss or 1.0)
    # A clip of one's own scales by some number below 1; by just a share of the ranks only who divides by ranks.
    if _are_alike([each.by_hand for each in known.values()]):
        named_counts = {each for ranks in counts.values() for each in (ranks, 1 / ranks)}
        rough = 1e-4 if of_loss is None or math.isclose(of_loss, 1, rel_tol=_ROUGH) else _CLOSE
        if any(math.isclose(by_hand, each, rel_tol=rough) for each in named_counts):
            times = "" if rough == 1e-4 else " times what undoes the scaler"
            what = f"between backward and step the gradients were scaled by {by_hand:.4g}{times}"
            yield "reduction", what + _told_count(by_hand, counts)
            return
    if not keeps_direction:
        logger.warning("watch: gradients were clipped by value, and so their size is not checked")
        return
    size = size_of_gradient(model, holders, calls)
    if size is None:
        logger.warning("watch: the loss is too curved to measure its gradient")
        return
    # Gradients that were averaged by hand after the backward may have been clipped in the same place.
    size = size / one.in_all if are_alike else size
    is_share = any(math.isclose(size, 1 / ranks, rel_tol=0.02) for ranks in counts.values())
    if abs(size - 1) > _ROUGH and (are_alike or size > 1 or is_share):
        yield "reduction", f"the gradient is {size:.4g} times that of the loss{_told_count(size, counts)}"


def _counts_of_ranks() -> dict[str, int]:
    if not dist.is_initialized():
        return {}
    groups = {
        "ranks that share a sample": get_sequence_parallel_group(),
        "data ranks": get_data_parallel_group(),
    }
    counts = {what: group.size() for what, group in groups.items() if group is not None}
    return {
        what: ranks
        for what, ranks in (counts | {"ranks of the job": dist.get_world_size()}).items()
        if ranks > 1
    }


def _told_count(size: float, counts: Mapping[str, int]) -> str:
    for what, ranks in counts.items():
        if math.isclose(size, ranks, rel_tol=_ROUGH):
            return f": added up over the {ranks} {what}"
        if math.isclose(size, 1 / ranks, rel_tol=_ROUGH):
            return f": divided once too often by the {ranks} {what}"
    return ""


@torch.no_grad()
def size_of_gradient(
    model: nn.Module, holders: Mapping[str, Holders], calls: Sequence[ForwardCall]
) -> float | None:
    """How many times the gradient of what was backwarded `parameter.grad` is: 1 where it is right and not clipped.

    Weights are left as they were, bit for bit. All ranks call it together, when the gradients of a step are there.

    Args:
        calls: the step's forwards, with the gradients of their outputs.

    Communication: that of at most eleven forwards for each of the step's, and a few numbers.

    Returns:
        None where the loss is too curved, or its numbers too coarse, to measure.
    """
    weights = {p: local_part(p) for p in model.parameters() if p.grad is not None}
    gradients = {p: local_part(p.grad) for p in weights if p.grad is not None}
    before = {weight: weight.clone() for weight in weights.values()}
    directions = {weights[p]: gradient for p, gradient in gradients.items()}
    norms = [
        _over_parts(model, holders, {p: part.double().square().sum() for p, part in parts.items()})
        for parts in (weights, gradients)
    ]
    unit = (norms[0] / norms[1]) ** 0.5
    middle, last = _loss(model, calls), None
    for step in _STEPS:
        losses, moved = [], []
        for length in (step * unit, -step * unit):
            with _moved(before, directions, length):
                losses.append(_loss(model, calls))
                # By how far the weights came: in bf16 a part of each step is rounded away.
                promised = {
                    p: ((weight - before[weight]).double() * gradients[p].double()).sum()
                    for p, weight in weights.items()
                }
                moved.append(_over_parts(model, holders, promised))
        there, back = losses[0] - middle, middle - losses[1]
        # Coarse weights may not move at all.
        is_straight = there + back != 0 and math.isclose(there, back, rel_tol=_TOLERANCE)
        # What the gradient promises for the way, over what the loss has changed by.
        size = (moved[0] - moved[1]) / (there + back) if is_straight else None
        if size is not None and last is not None and math.isclose(size, last, rel_tol=_TOLERANCE):
            return size
        last = size
    return None


def _loss(model: nn.Module, calls: Sequence[ForwardCall]) -> float:
    """Σ ⟨∂loss/∂output, output⟩ of the calls, the mean over all ranks: its changes are those of the loss."""
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for call in calls:
        # Gathered parameters that a forward without a backward leaves are those before the step along the gradient.
        reshard(model)
        with as_then(model, call):
            outputs = tensors_in(model(*call.args, **call.kwargs))
        for index, gradient in call.gradients.items():
            total += (outputs[index].double() * gradient.double()).sum()
    reshard(model)
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def _over_parts(
    model: nn.Module, holders: Mapping[str, Holders], numbers: Mapping[nn.Parameter, Tensor]
) -> float:
    """The sum over all parameters of numbers that belong to this rank's parts of them."""
    by_parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {
        each.parts: [] for each in holders.values()
    }
    for name, parameter in model.named_parameters():
        if parameter in numbers:
            by_parts[holders[name].parts].append(numbers[parameter])
    result = 0.0
    for groups, tensors in by_parts.items():
        device = next(model.parameters()).device
        total = torch.stack(tensors).sum() if tensors else torch.zeros((), dtype=torch.float64, device=device)
        for group in groups:
            dist.all_reduce(total, group=group)
        result += total.item()
    return result


@contextmanager
def _moved(
    before: Mapping[Tensor, Tensor], directions: Mapping[Tensor, Tensor], length: float
) -> Iterator[None]:
    try:
        for weight, direction in directions.items():
            weight.add_(direction.to(weight), alpha=length)
        yield
    finally:
        for weight, value in before.items():
            weight.copy_(value)
