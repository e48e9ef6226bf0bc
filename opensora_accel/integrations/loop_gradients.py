"""Whether the gradient that an optimizer is about to use is that of the loss, told by what it does to the model.

No second backward would tell: the wrapper around the model (DDP, FSDP2) would repeat its mistake. But a small step Δθ
along a gradient G changes the loss by ⟨G, Δθ⟩, if G is its gradient. What changes is seen in the model's outputs, which
every rank has whole, by two forwards more:

    ⟨G, Δθ⟩  =  mean over ranks of  Σ ⟨∂loss/∂output, Δoutput⟩

With a loss of 3θ on each of 2 ranks that share a sample, G = 3 is right. A loop that adds gradients up over them has
G = 6: a step of Δθ = 0.1 changes the loss by 0.3 and not by 0.6, and the gradient is twice too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_accel.profiler.equality import Holders, local_part
from opensora_accel.profiler.nonfinite import Call, as_then, tensors_in

# Steps of so many times the weights' norm. A curved loss wants a short one, weights in bf16 a long one.
_STEPS = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
# There and back the loss has to change alike, and two steps have to tell the same: else it is curved, or rounded away.
_TOLERANCE = 0.05


def norms_of_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The norm of this rank's part of each gradient, as scalars on the device."""
    parts = {name: local_part(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    norms = torch._foreach_norm(list(parts.values()), 2, dtype=torch.float32) if parts else []
    return dict(zip(parts, norms, strict=True))


@torch.no_grad()
def size_of_gradient(model: nn.Module, holders: Mapping[str, Holders], calls: Sequence[Call]) -> float | None:
    """How many times the gradient of what was backwarded `parameter.grad` is: 1 where it is right and not clipped.

    Weights are left as they were, bit for bit. All ranks call it together, when the gradients of a step are there.

    Args:
        calls: the step's forwards, with the gradients of their outputs [...].

    Communication: that of at most eleven forwards for each of the step's, and a few numbers.

    Returns:
        None where the loss is too curved, or its numbers too coarse, to tell.
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
                promised = {
                    p: ((weight - before[weight]).double() * gradients[p].double()).sum()
                    for p, weight in weights.items()
                }
                moved.append(_over_parts(model, holders, promised))
        there, back = losses[0] - middle, middle - losses[1]
        size = (
            (moved[0] - moved[1]) / (there + back) if math.isclose(there, back, rel_tol=_TOLERANCE) else None
        )
        if size is not None and last is not None and math.isclose(size, last, rel_tol=_TOLERANCE):
            return size
        last = size
    return None


def _loss(model: nn.Module, calls: Sequence[Call]) -> float:
    """Σ ⟨∂loss/∂output, output⟩ of the calls, the mean over all ranks: its changes are those of the loss."""
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for call in calls:
        with as_then(model, call):
            outputs = tensors_in(model(*call.args, **call.kwargs))
        for index, gradient in call.gradients.items():
            total += (outputs[index].double() * gradient.double()).sum()
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
    for groups, found in by_parts.items():
        device = next(model.parameters()).device
        total = torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=device)
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
