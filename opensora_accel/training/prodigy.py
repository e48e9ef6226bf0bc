"""Prodigy: Adam that finds its learning rate.

It estimates how far the weights that it looks for are from those that it began with, and steps as far: d, which begins
at d₀ = 1e-6 and only grows. With the first weights x₀, the weights x, their gradient g and the rate η of the schedule,
which is 1 at its height:

    r ← √β₂ r + (d / d₀) d η ⟨g, x₀ − x⟩      a number
    s ← √β₂ s + (d / d₀) d g                  as many numbers as weights
    d ← max(d, r / ‖s‖₁)

Both sums are over all weights, each of which has to count once, however many ranks hold it. A matrix in 2 shards and 2
copies, and a bias that all ranks hold:

    rank 0    shard 0, bias    counts both            rank 2    shard 0, bias    counts nothing
    rank 1    shard 1, bias    counts its shard       rank 3    shard 1, bias    counts nothing

One all-reduce of the two numbers over all ranks then gives all of them the same d, also where a copy's sum is rounded
otherwise.

Source: Mishchenko and Defazio, Prodigy (arXiv:2306.06101). On one device steps are those of their library, prodigyopt
1.1.2, with `use_bias_correction` and `safeguard_warmup`, as it has them for diffusion models. That library itself knows
FSDP's former flat shards alone, adds up what all ranks hold, copies as well, and makes the host wait for two numbers of
every parameter, and for CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from opensora_accel.training.optim import shard_of

_FIRST_D = 1e-6


class Prodigy(torch.optim.Optimizer):
    """Steps shards as plain tensors; what it keeps of a parameter are DTensors all the same, and saved as such.

    Its names are the library's: `d`, `d_numerator` (r) and `k` (steps) in every group of parameters, and of a parameter
    `exp_avg` and `exp_avg_sq`, Adam's moments of d·g, `s`, and `p0` (x₀).

    Communication: an all-reduce of two numbers over all ranks. The host waits for it once a step.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ):
        numbers = {"d": _FIRST_D, "d_numerator": 0.0, "k": 0}
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, **numbers})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """A step of all parameters that have gradients; none where no gradient has been other than 0."""
        group = self.param_groups[0]
        (beta1, beta2), d, num_steps = group["betas"], group["d"], group["k"] + 1
        beta3 = math.sqrt(beta2)
        rate: float = d * group["lr"] * ((1 - beta2**num_steps) ** 0.5 / (1 - beta1**num_steps))
        stepped = [(p, each["weight_decay"]) for each in self.param_groups for p in each["params"]]
        parameters, decays = zip(*(each for each in stepped if each[0].grad is not None), strict=True)
        weights, gradients = list(map(shard_of, parameters)), [shard_of(p.grad) for p in parameters]
        averages, squares, sums, first = (
            [shard_of(self._state_of(parameter)[name]) for parameter in parameters]
            for name in ("exp_avg", "exp_avg_sq", "s", "p0")
        )
        torch._foreach_mul_(averages, beta1)
        torch._foreach_add_(averages, gradients, alpha=d * (1 - beta1))
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=d * d * (1 - beta2))
        torch._foreach_mul_(sums, beta3)
        torch._foreach_add_(sums, gradients, alpha=d / _FIRST_D * d)
        counted = [number for number, parameter in enumerate(parameters) if _counts_here(parameter)]
        products = [
            torch.dot(gradients[each].reshape(-1), (first[each] - weights[each]).reshape(-1))
            for each in counted
        ]
        sizes = (
            torch._foreach_norm([sums[each] for each in counted], 1, dtype=torch.float64) if counted else ()
        )
        product, size = _over_all_ranks(products, sizes, weights[0].device)
        if not size:
            return
        numerator = beta3 * group["d_numerator"] + d / _FIRST_D * rate * product
        d = max(d, numerator / size)
        for weight, average, square, decay in zip(weights, averages, squares, decays, strict=True):
            weight.add_(weight, alpha=-decay * rate)
            weight.addcdiv_(average, square.sqrt().add_(d * group["eps"]), value=-rate)
        for each in self.param_groups:
            each.update(d=d, d_numerator=numerator, k=num_steps)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            for name in ("exp_avg", "exp_avg_sq", "s"):
                state[name] = torch.zeros_like(parameter, requires_grad=False)
            state["p0"] = parameter.detach().clone()
        return state


def _counts_here(parameter: Tensor) -> bool:
    """Whether this rank is the first of those that hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    places = zip(parameter.placements, parameter.device_mesh.get_coordinate() or (), strict=True)
    return all(placement.is_shard() or place == 0 for placement, place in places)


def _over_all_ranks(products: Sequence[Tensor], sizes: Sequence[Tensor], device: torch.device) -> list[float]:
    """The sums of both, in fp64. A rank may have none."""
    none = torch.zeros((), dtype=torch.float64, device=device)
    both = torch.stack([torch.stack([none, *each]).sum() for each in (products, sizes)])
    if dist.is_initialized():
        dist.all_reduce(both)
    found: list[float] = both.tolist()
    return found
