"""Numerical gradients of an operation in which every rank's output depends on every rank's input."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def distributed_gradcheck(operation: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> float:
    """Largest difference between backward and central differences, over every element of every rank's inputs.

    `torch.autograd.gradcheck` perturbs its own process's input only, on all ranks at once, and so cannot see
    what one rank's input does to another's output. Here one element of one rank is perturbed at a time while
    every rank runs the operation; the function differentiated is the sum over ranks of <weight, output>.
    """
    group = dist.group.WORLD
    inputs = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)
    outputs = _as_tuple(operation(*inputs))
    generator = torch.Generator().manual_seed(dist.get_rank())
    weights = [torch.randn(out.shape, dtype=torch.float64, generator=generator) for out in outputs]
    sum((w * out).sum() for w, out in zip(weights, outputs, strict=True)).backward()

    def total(perturbed: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad():
            results = _as_tuple(operation(*perturbed))
        value = sum((w * out).sum() for w, out in zip(weights, results, strict=True))
        value = torch.as_tensor(value, dtype=torch.float64).reshape(1).clone()
        dist.all_reduce(value, group=group)
        return value

    worst, step = 0.0, 1e-3
    for index, tensor in enumerate(inputs):
        counts: list[int] = [0] * group.size()
        dist.all_gather_object(counts, tensor.numel())
        for owner, count in enumerate(counts):
            for element in range(count):
                values = []
                for sign in (1, -1):
                    perturbed = [t.detach().clone() for t in inputs]
                    if owner == group.rank():
                        perturbed[index].view(-1)[element] += sign * step
                    values.append(total(tuple(perturbed)))
                if owner == group.rank():
                    numeric = ((values[0] - values[1]) / (2 * step)).item()
                    worst = max(worst, abs(numeric - tensor.grad.view(-1)[element].item()))
    return worst


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs
