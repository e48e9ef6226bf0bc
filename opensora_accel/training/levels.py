"""Models of noise levels (diffusion), seen as models of flow: the same straight paths, in other units.

Such a model gets y = a x + b ε with a² + b² = 1, at one of 1,000 levels of noise, and answers v = a ε − b x. Divided by
a + b, y is a point of the straight path, at the time t = b / (a + b); and from y and v follows the velocity. At a = 0.8
and b = 0.6, a clip x = 2 with noise ε = 8:

    y = 0.8 · 2 + 0.6 · 8 = 6.4     y / 1.4 = 4.57 = (1 − t) · 2 + t · 8 at t = 0.6 / 1.4 = 0.43
    v = 0.8 · 8 − 0.6 · 2 = 5.2     (b − a) y + (a + b) v = −1.28 + 7.28 = 6 = ε − x

So the trainer's loss, and the sampler's Euler steps, are those of these models too: a step along the path is the step
of DDIM without noise of its own, and an error of v is one of the velocity times 1 / (a + b).

Source: v-prediction: arXiv:2202.00512; no signal in the last level: arXiv:2305.08891; DDIM: arXiv:2010.02502.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# As many as all that is published has.
NUM_LEVELS = 1000


@dataclass(frozen=True)
class NoiseLevels:
    """1,000 levels, from the least noise to noise alone: the roots of their β grow evenly."""

    first_beta: float
    last_beta: float

    def times(self, alpha: float, device: torch.device | None = None) -> Tensor:
        """[1000] ascending to 1, fp64: the time of each level, where noise counts α times as much as in `alpha` 1.

        A scheduler's `snr_shift_scale` is α².
        """
        roots = torch.linspace(
            self.first_beta**0.5, self.last_beta**0.5, NUM_LEVELS, dtype=torch.float64, device=device
        )
        signal = (1 - roots.square()).cumprod(0)  # a²
        a = (signal / (alpha**2 + (1 - alpha**2) * signal)).sqrt()
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
        """The times that a sample passes, [num_steps + 1] from 1 to 0: evenly many levels apart, the last one first."""
        numbers = torch.tensor([round(NUM_LEVELS * (1 - step / num_steps)) - 1 for step in range(num_steps)])
        return torch.cat([self.times(alpha)[numbers], torch.zeros(1, dtype=torch.float64)])


def variance(times: Tensor) -> Tensor:
    """1 / (a + b)² = (1 − t)² + t² at `times` [B]: that of a point of the path between a clip and noise of variance 1.

    What an error of the velocity, squared, is multiplied by to be one of v.
    """
    return (1 - times).square() + times.square()


def min_snr_weights(times: Tensor, most: float) -> Tensor:
    """min(SNR, most) / (SNR + 1) at `times` [B], [B]: what an error of v, squared, counts. SNR is a² / b².

    Source: arXiv:2303.09556.
    """
    snr = ((1 - times) / times).square()
    return snr.clamp(max=most) / (snr + 1)


def as_noisy(latents: Tensor, times: Tensor) -> Tensor:
    """Points of the path [B, C, t, h, w] at `times` [B] as the model gets them, y of the same shape and type."""
    exact = latents.to(_exact(latents))
    return (exact / _over(variance(times).sqrt(), exact)).to(latents)


def as_velocity(answer: Tensor, latents: Tensor, times: Tensor) -> Tensor:
    """The velocity [B, C, t, h, w], in fp32 or more, at points of the path of this shape and `times` [B].

    Args:
        answer: the model's, v, of the same shape.
    """
    exact = latents.to(_exact(latents))
    root = _over(variance(times).sqrt(), exact)
    # b − a = (2t − 1) / root and a + b = 1 / root.
    return (_over(2 * times - 1, exact) * (exact / root) + answer) / root


def _exact(latents: Tensor) -> torch.dtype:
    """In bf16 each of the operations would round."""
    return torch.promote_types(latents.dtype, torch.float32)


def _over(values: Tensor, like: Tensor) -> Tensor:
    """[B] as [B, 1, 1, 1, 1], in the type of `like`."""
    return values.to(like).view(-1, *[1] * (like.dim() - 1))
