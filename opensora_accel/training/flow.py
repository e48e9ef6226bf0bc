"""Flow matching on straight paths: x_t = (1 − t) x + t ε, velocity ε − x, time shifted towards noise.

A clip x = 2 with noise ε = 8 is at t = 0.5 the noisy 5, and the model learns to answer 6, which points from the clip to
the noise. A sample starts at ε = 8 and walks back in Euler steps: 3 steps of −1/3 with the right answer end at 2.

Every draw follows from a seed, a purpose and a sample's position in the job, and never from the rank that draws.

Source: Rectified Flow (arXiv:2209.03003); logit-normal times and the shift: SD3 (arXiv:2403.03206); the shift's
growth with resolution and length: Open-Sora 2.0 (arXiv:2503.09642); its growth with tokens: LTX-Video
(ltx_video/schedulers/rf.py); the bell: DiffSynth-Studio's training of Wan (diffsynth/diffusion/flow_match.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opensora_accel.training.sections import FlowConfig

# Models take t in 0…1 as a timestep in 0…1000.
TIMESTEPS = 1000


def generator(seed: int, purpose: str, counter: int) -> torch.Generator:
    """A random stream of its own for each (seed, purpose, counter): neighbouring seeds share nothing.

    Keyed by a sample's position in the job, it gives all ranks of a sequence group equal draws, ranks with other
    samples different ones, and any number of data ranks the same job.
    """
    # A hash, because generators that are seeded with neighbouring numbers may begin alike.
    digest = hashlib.sha256(f"{seed}/{purpose}/{counter}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def time_shift(config: FlowConfig, tokens_per_frame: int, num_frames: int) -> float:
    """α of t' = αt / (1 + (α − 1)t).

    "auto" has 1 at 256 tokens a frame and 3 at 4,096, times the root of the latent frames. "ltx" moves the mean of the
    normal distribution, by 0.95 at 1,024 tokens of a clip and by 2.05 at 4,096: sigmoid(x + μ) is sigmoid(x), moved by
    α = exp(μ).
    """
    if config.shift == "ltx":
        return math.exp(0.95 + (2.05 - 0.95) * (tokens_per_frame * num_frames - 1024) / (4096 - 1024))
    if config.shift != "auto":
        return config.shift
    resolution = 1 + 2 * (tokens_per_frame - 256) / (4096 - 256)
    return max(resolution, 0.5) * math.sqrt(num_frames)


def shifted(t: Tensor, alpha: float) -> Tensor:
    """Times t in 0…1, moved towards noise (1) by α; 0 and 1 stay where they are."""
    return alpha * t / (1 + (alpha - 1) * t)


def draw_times(config: FlowConfig, alpha: float, seed: int, positions: Sequence[int]) -> Tensor:
    """[B] in `config.time_range`, fp64: each sample's time follows from the seed and its position in the job.

    A range takes as much of the distribution as lies in it, after the shift: with α = 5 an expert of 0.875 to 1 learns
    the times that are 0.583 to 1 before it.
    """
    rngs = [generator(seed, "time", position) for position in positions]
    if config.time_distribution == "stretched":
        return torch.stack([_draw_stretched(config, alpha, rng) for rng in rngs])
    if config.time_distribution == "uniform":
        shares = torch.stack([torch.rand((), generator=rng, dtype=torch.float64) for rng in rngs])
    else:
        normal = torch.stack([torch.randn((), generator=rng, dtype=torch.float64) for rng in rngs])
        # The draws of old runs, to the bit: by way of their shares they would be rounded once more.
        if config.time_range == (0.0, 1.0):
            return shifted((config.logit_mean + config.logit_std * normal).sigmoid(), alpha)
        shares = torch.special.ndtr(normal)
    return _times_at(config, alpha, shares)


# Of a normal distribution, 0.5 % and 99.9 %.
_LOW, _HIGH = -2.5758, 3.0902
# The least time that is drawn, and the share that is even.
_LEAST_TIME, _EVEN = 1e-3, 0.1


def _draw_stretched(config: FlowConfig, alpha: float, rng: torch.Generator) -> Tensor:
    """A time, fp64, as LTX-2's trainer draws it (ltx_trainer/timestep_samplers.py).

    Many tokens would move nearly all times to noise: at 14,080 hardly one lies below 0.9. So what lies between 0.5 and
    99.9 percent of them is stretched from 0 to 1, and a tenth is even.
    """
    normal = torch.randn((), generator=rng, dtype=torch.float64)
    chosen, even = torch.rand(2, generator=rng, dtype=torch.float64)
    if chosen < _EVEN:
        return _LEAST_TIME + (1 - _LEAST_TIME) * even
    drawn = torch.stack([normal, torch.tensor(_LOW).to(normal), torch.tensor(_HIGH).to(normal)])
    time, low, high = shifted((config.logit_mean + config.logit_std * drawn).sigmoid(), alpha)
    time = (time - low) / (high - low)
    # What lies below is mirrored.
    return torch.where(time < _LEAST_TIME, 2 * _LEAST_TIME - time, time).clamp(0, 1)


def _times_at(config: FlowConfig, alpha: float, shares: Tensor) -> Tensor:
    """The times below which these shares, in 0…1, of all that are drawn lie: the distribution's quantiles."""
    first, last = config.time_range
    # As they are before the shift; rounding may put them beyond 0…1.
    ends = shifted(torch.tensor([first, last], dtype=torch.float64), 1 / alpha).clamp(0, 1)
    if config.time_distribution == "uniform":
        times = _between(ends, shares)
    else:
        below = torch.special.ndtr((ends.logit() - config.logit_mean) / config.logit_std)
        normal = torch.special.ndtri(_between(below, shares))
        times = (config.logit_mean + config.logit_std * normal).sigmoid()
    # A time that rounding put beyond would be one of the other expert.
    return shifted(times, alpha).clamp(first, last)


def _between(ends: Tensor, shares: Tensor) -> Tensor:
    """Of [first, last], so many shares of the way; exactly the shares between 0 and 1."""
    return ends[0] + (ends[1] - ends[0]) * shares


def loss_weights(config: FlowConfig, alpha: float, times: Tensor) -> Tensor | None:
    """What each of `times` [B] counts in the loss, [B]; None where all count 1.

    The bell exp(−2(t − ½)²) is 0 at both ends after its value there is taken off, and 1 in the mean over the times that
    are drawn, so that the learning rate keeps its meaning.
    """
    if config.weighting == "none":
        return None

    def bell(t: Tensor) -> Tensor:
        """t in 0…1 → its height there."""
        return torch.exp(-2 * (t - 0.5).square()) - math.exp(-0.5)

    # The middles of a thousand equally likely parts.
    middles = (torch.arange(TIMESTEPS, dtype=torch.float64) + 0.5) / TIMESTEPS
    return bell(times) / bell(_times_at(config, alpha, middles)).mean()


def draw_noise(
    like: Tensor, seed: int, positions: Sequence[int], offset: float = 0.0, *, purpose: str = "noise"
) -> Tensor:
    """Standard normal noise of the shape of `like` [B, C, …], drawn on the host: every device trains on the same.

    Args:
        offset: every channel of a sample is moved by so many times a standard normal number.
        purpose: of the draw; each stream has its own.
    """
    noise = torch.stack(
        [torch.randn(like.shape[1:], generator=generator(seed, purpose, p)) for p in positions]
    )
    if offset:
        channels = like.size(1), *[1] * (like.dim() - 2)
        moves = [torch.randn(channels, generator=generator(seed, f"{purpose} offset", p)) for p in positions]
        noise = noise + offset * torch.stack(moves)
    return noise.to(like)


def drop_captions(captions: Sequence[str], share: float, seed: int, positions: Sequence[int]) -> list[str]:
    """The captions, a share of them emptied."""
    draws = [torch.rand((), generator=generator(seed, "caption", position)).item() for position in positions]
    return ["" if draw < share else caption for draw, caption in zip(draws, captions, strict=True)]


@dataclass(frozen=True)
class Stream:
    """What a model makes of B samples at a time: clips, or the sound of clips, each a stream of its own."""

    # Latents [B, C, …], and noise of that shape.
    clean: Tensor
    noise: Tensor
    # Shares in 0…1, or bool, to be broadcast over the latents: what a sample's mean is over. A sample without any
    # counts nothing; None is all.
    learned: Tensor | None = None
    # The velocity that is learned, [B, C, …]; None is that from latents to noise.
    target: Tensor | None = None
    # Its times are those of the clips, shifted by so much.
    alpha: float = 1.0

    def noisy(self, times: Tensor) -> Tensor:
        """[B, C, …] at the clips' times [B] in 0…1."""
        t = self._each(shifted(times, self.alpha).to(self.clean))
        return (1 - t) * self.clean + t * self.noise

    def loss(self, velocity: Tensor, weights: Tensor | None, huber: float) -> Tensor:
        """Mean squared error of a predicted velocity [B, C, …]; arguments are those of `flow_loss`."""
        error = velocity - (self.noise - self.clean if self.target is None else self.target)
        # bf16 would round the sum of squares; fp64 stays.
        squares = (error.float() if error.dtype != torch.float64 else error).square()
        if huber:
            squares = 2 * huber * ((squares + huber**2).sqrt() - huber)
        if self.learned is not None:
            learned = self.learned.to(squares)
            share = learned.mean(tuple(range(1, learned.dim())), keepdim=True)
            squares = squares * (learned / torch.where(share > 0, share, 1.0))
        if weights is not None:
            squares = squares * self._each(weights.to(squares))
        return squares.mean()

    def _each(self, of_samples: Tensor) -> Tensor:
        """[B] → [B, 1, …], to be broadcast over the latents."""
        return of_samples.view(-1, *[1] * (self.clean.dim() - 1))


def flow_loss(
    predict: Callable[[list[Tensor], Tensor], Sequence[Tensor]],
    streams: Sequence[Stream],
    times: Tensor,
    *,
    weights: Tensor | None = None,
    huber: float = 0.0,
) -> Tensor:
    """Mean squared error of the predicted velocities, over all elements of each sample, then over samples.

    Where a model makes several streams, it is the sum over these.

    Args:
        predict: gives the velocity [B, C, …] of each stream, for latents of that shape and timesteps [B].
        times: [B] in 0…1.
        weights: [B], what each sample's mean counts; 1 without.
        huber: c of 2c(√(e² + c²) − c) in place of the square of an error e: e² where it is small, 2c|e| where it is
            large. 0 is the square everywhere.
    """
    noisy = [stream.noisy(times) for stream in streams]
    # Before the model is given its work, for which a copy from the host would wait.
    weights = None if weights is None else weights.to(noisy[0].device)
    velocities = predict(noisy, times.to(noisy[0].device) * TIMESTEPS)
    first, *others = (
        stream.loss(velocity, weights, huber) for stream, velocity in zip(streams, velocities, strict=True)
    )
    return sum(others, start=first)


@torch.no_grad()
def sample(
    predict: Callable[[list[Tensor], Tensor], Sequence[Tensor]],
    noise: Sequence[Tensor],
    times: Tensor,
    alphas: Sequence[float] | None = None,
) -> list[Tensor]:
    """Latents [B, C, …] from noise of that shape, by Euler steps along the times [steps + 1], from about 1 to 0.

    Args:
        predict: gives the velocity of each stream, for the latents of each and a timestep [B] of the clips.
        noise: of each stream.
        alphas: by how much the times of each stream are shifted, against those of the clips; None shifts none.
    """
    latents, first = [*noise], noise[0]
    # Of each stream, from one time to the next: below 0, from noise towards the clip.
    steps = [shifted(times, alpha).diff().tolist() for alpha in alphas or [1.0] * len(noise)]
    for number, now in enumerate(times[:-1].tolist()):
        timestep = torch.full((first.size(0),), now * TIMESTEPS, dtype=torch.float64, device=first.device)
        velocities = predict(latents, timestep)
        # x_{t'} = x_t + (t' − t)·v
        latents = [
            each + step[number] * velocity.to(each.dtype)
            for each, velocity, step in zip(latents, velocities, steps, strict=True)
        ]
    return latents
