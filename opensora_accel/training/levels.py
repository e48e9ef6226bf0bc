"""Models of noise levels (diffusion), seen as models of flow: the same straight paths, in other units.

Such a model gets y = a x + b ε with a² + b² = 1, at one of 1,000 levels of noise, and answers v = a ε − b x. Divided by
a + b, y is a point of the straight path, at the time t = b / (a + b); and from y and v follows the velocity. At a = 0.8
and b = 0.6, a clip x = 2 with noise ε = 8:

    y = 0.8 · 2 + 0.6 · 8 = 6.4     y / 1.4 = 4.57 = (1 − t) · 2 + t · 8 at t = 0.6 / 1.4 = 0.43
    v = 0.8 · 8 − 0.6 · 2 = 5.2     (b − a) y + (a + b) v = −1.28 + 7.28 = 6 = ε − x

So the trainer's loss, and the sampler's Euler steps, are those of these models too: a step along the path is the step
of DDIM without noise of its own, and an error of v is one of the velocity times 1 / (a + b).

Others answer ε, from which follows the velocity as well: of the point 4.57 and ε = 8 it is (8 − 4.57) / (1 − t) = 6,
and an error of ε is one of the velocity times 1 − t. Their last level has some signal left, or it could not be told.

Source: v-prediction: arXiv:2202.00512; no signal in the last level: arXiv:2305.08891; DDIM: arXiv:2010.02502.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

# As many as all that is published has.
NUM_LEVELS = 1000


@dataclass(frozen=True)
class NoiseLevels:
    """1,000 levels, from the least noise to noise alone, or nearly, and what a model answers at them."""

    first_beta: float
    last_beta: float
    # What grows evenly from level to level.
    grows: Literal["root of beta", "beta"] = "root of beta"
    # What the model answers: v, whose last level is noise alone; or the noise ε, whose last level is as β has it, by
    # itself, or before as many channels of a variance, which the steps of DDIM have no use for.
    answer: Literal["v", "noise", "noise and variance"] = "v"

    def times(self, alpha: float, device: torch.device | None = None) -> Tensor:
        """[1000] ascending to 1, or nearly, fp64: the time of each, where noise counts α times as much as in `alpha` 1.

        A scheduler's `snr_shift_scale` is α².
        """
        power = 0.5 if self.grows == "root of beta" else 1.0
        ends = self.first_beta**power, self.last_beta**power
        even = torch.linspace(*ends, NUM_LEVELS, dtype=torch.float64, device=device)
        betas = even.square() if self.grows == "root of beta" else even
        signal = (1 - betas).cumprod(0)  # a²
        a = (signal / (alpha**2 + (1 - alpha**2) * signal)).sqrt()
        if self.answer == "v":
            # The last level has none, and the first what it had.
            a = (a - a[-1]) * (a[0] / (a[0] - a[-1]))
        b = (1 - a.square()).sqrt()
        return b / (a + b)

    def at(self, shares: Tensor, alpha: float) -> Tensor:
        """The times [B] of the levels that lie so many shares, each in 0…1, of the way from the first to the last."""
        numbers = (shares * NUM_LEVELS).long().clamp(max=NUM_LEVELS - 1)
        return self.times(alpha, shares.device)[numbers]

    def numbers(self, times: Tensor, alpha: float) -> Tensor:
        """int64 [B], 0 to 999: the level that each of `times` [B] is nearest to; rounding may have moved them."""
        known = self.times(alpha, times.device)
        return (known - times.to(known).unsqueeze(-1)).abs().argmin(-1)

    def sampled(self, num_steps: int, alpha: float) -> Tensor:
        """The times that a sample passes, [num_steps + 1] down to 0: evenly many levels apart, the last one first."""
        numbers = torch.tensor([round(NUM_LEVELS * (1 - step / num_steps)) - 1 for step in range(num_steps)])
        return torch.cat([self.times(alpha)[numbers], torch.zeros(1, dtype=torch.float64)])

    def velocity(self, answer: Tensor, latents: Tensor, times: Tensor) -> Tensor:
        """The velocity [B, C, t, h, w], in fp32 or more, at points of the path of this shape and `times` [B].

        Args:
            answer: the model's, v or ε, of the same shape, or [B, 2C, t, h, w] with a variance.
        """
        exact = latents.to(_exact(latents))
        if self.answer == "noise and variance":
            answer = answer.chunk(2, dim=1)[0]
        if self.answer != "v":
            return (answer - exact) / _over(1 - times, exact)
        root = _over(_variance(times).sqrt(), exact)
        # b − a = (2t − 1) / root and a + b = 1 / root.
        return (_over(2 * times - 1, exact) * (exact / root) + answer) / root

    def weights(self, times: Tensor, min_snr: float = 0.0) -> Tensor:
        """What an error of the velocity, squared, counts at `times` [B], [B].

        It is one of the model's answer, which counts the same at every level; or with `min_snr` one of the clip that
        follows from it, which counts min(SNR, min_snr). SNR is a² / b².

        Source: arXiv:2303.09556.
        """
        if min_snr:
            # A point of the path less t times the velocity is the clip.
            return times.square() * ((1 - times) / times).square().clamp(max=min_snr)
        return _variance(times) if self.answer == "v" else (1 - times).square()


def snr_shift_scale(scheduler: Mapping[str, Any]) -> float:
    """What the noise of a scheduler counts, squared, by its configuration: α². Those of CogVideoX have 3 unless it says
    another number, and others, as Allegro's and Latte's, know none."""
    usual = 3.0 if str(scheduler.get("_class_name")).startswith("CogVideoX") else 1.0
    found = scheduler.get("snr_shift_scale", usual)
    return float(found) if isinstance(found, (int, float)) else usual


def as_noisy(latents: Tensor, times: Tensor) -> Tensor:
    """Points of the path [B, C, t, h, w] at `times` [B] as the model gets them, y of the same shape and type."""
    exact = latents.to(_exact(latents))
    return (exact / _over(_variance(times).sqrt(), exact)).to(latents)


def of_noise_alone(noise: Tensor, times: Tensor) -> Tensor:
    """Where a sample begins, [B, C, t, h, w] at `times` [B]: the points of the path that a model gets as this noise."""
    return noise * _over(_variance(times).sqrt(), noise)


def _variance(times: Tensor) -> Tensor:
    """1 / (a + b)² = (1 − t)² + t² at `times` [B]: that of a point of the path, of clip and noise of variance 1."""
    return (1 - times).square() + times.square()


def _exact(latents: Tensor) -> torch.dtype:
    """In bf16 each of the operations would round."""
    return torch.promote_types(latents.dtype, torch.float32)


def _over(values: Tensor, like: Tensor) -> Tensor:
    """[B] as [B, 1, 1, 1, 1], in the type of `like`."""
    return values.to(like).view(-1, *[1] * (like.dim() - 1))
