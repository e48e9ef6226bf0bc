"""Flow matching on straight paths: x_t = (1 − t) x + t ε, velocity ε − x, time shifted towards noise.

A clip x = 2 with noise ε = 8 is at t = 0.5 the noisy 5, and the model learns to answer 6, which points from the clip to
the noise. A sample starts at ε = 8 and walks back in Euler steps: 3 steps of −1/3 with the right answer end at 2.

Under diffusion forcing each latent frame has a time of its own. A clip of three latent frames 2 with noise 8, at times
0.25, 0.5 and 1, is the noisy 3.5, 5 and 8. The answer is still 6 everywhere, and a sample may finish its first frames
while the last ones have not begun (`staggered`).

Every draw follows from a seed, a purpose and a sample's position in the job, and never from the rank that draws.

Source: Rectified Flow (arXiv:2209.03003); logit-normal times and the shift: SD3 (arXiv:2403.03206); the shift's
growth with resolution and length: Open-Sora 2.0 (arXiv:2503.09642); its growth with tokens: LTX-Video
(ltx_video/schedulers/rf.py); the bell: DiffSynth-Studio's training of Wan (diffsynth/diffusion/flow_match.py); times of
frames: Diffusion Forcing (arXiv:2407.01392); non-decreasing ones: AR-Diffusion's FoPP (arXiv:2503.07418), which
SkyReels-V2 was trained with (arXiv:2504.13074).
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

    "open-sora-1.2" has 1 at 1,024 tokens of a clip, an image of 512 × 512 pixels, and grows with their root. "auto" has
    1 at 256 tokens a frame and 3 at 4,096, times the root of the latent frames. "ltx" moves the mean of the
    normal distribution, by 0.95 at 1,024 tokens of a clip and by 2.05 at 4,096: sigmoid(x + μ) is sigmoid(x), moved by
    α = exp(μ).
    """
    if config.shift == "open-sora-1.2":
        return math.sqrt(tokens_per_frame * num_frames / 1024)
    if config.shift == "ltx":
        return math.exp(0.95 + (2.05 - 0.95) * (tokens_per_frame * num_frames - 1024) / (4096 - 1024))
    if config.shift != "auto":
        return config.shift
    resolution = 1 + 2 * (tokens_per_frame - 256) / (4096 - 256)
    return max(resolution, 0.5) * math.sqrt(num_frames)


def shifted(t: Tensor, alpha: float) -> Tensor:
    """Times t in 0…1, moved towards noise (1) by α; 0 and 1 stay where they are."""
    return alpha * t / (1 + (alpha - 1) * t)


def draw_times(
    config: FlowConfig, alpha: float, seed: int, positions: Sequence[int], num_frames: int = 1
) -> Tensor:
    """[B] in `config.time_range`, fp64: each sample's time follows from the seed and its position in the job.

    Under diffusion forcing they are [B, num_frames], a time for each latent frame.

    A range takes as much of the distribution as lies in it, after the shift: with α = 5 an expert of 0.875 to 1 learns
    the times that are 0.583 to 1 before it.
    """
    rngs = [generator(seed, "time", position) for position in positions]
    if config.is_forced:
        draw = _draw_non_decreasing if config.diffusion_forcing == "non-decreasing" else _draw_independent
        return _times_at(config, alpha, torch.stack([draw(num_frames, rng) for rng in rngs]))
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


def _draw_independent(num_frames: int, rng: torch.Generator) -> Tensor:
    """[num_frames], fp64: shares of all times, even in 0…1."""
    return torch.rand(num_frames, generator=rng, dtype=torch.float64)


def _draw_non_decreasing(num_frames: int, rng: torch.Generator) -> Tensor:
    """[num_frames], fp64: shares of all times, none less than the one before it.

    One frame, any of them, has a share u that is even in 0…1. All non-decreasing shares with this one are as likely:
    those of the frames before it are even in 0…u and sorted, those behind it in u…1. FoPP draws the same of a thousand
    timesteps, by a table of how many ways lead on from each.
    """
    frame = int(torch.randint(num_frames, (), generator=rng))
    shares = torch.rand(num_frames, generator=rng, dtype=torch.float64)
    before, known, behind = shares[:frame], shares[frame], shares[frame + 1 :]
    behind = known + (1 - known) * behind
    return torch.cat([known * before.sort().values, known[None], behind.sort().values])


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
    """What each of `times`, [B] or [B, t], counts in the loss, of that shape; None where all count 1.

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


def drop_captions(
    captions: Sequence[str], share: float, seed: int, positions: Sequence[int], *, purpose: str = "caption"
) -> list[str]:
    """The captions, a share of them emptied; `purpose` is that of the draw."""
    draws = [torch.rand((), generator=generator(seed, purpose, position)).item() for position in positions]
    return ["" if draw < share else caption for draw, caption in zip(draws, captions, strict=True)]


def over_latents(values: Tensor, like: Tensor) -> Tensor:
    """values [B], or [B, t] of latent frames → [B, 1, 1, …] or [B, 1, t, …], to broadcast over `like` [B, C, t, …]."""
    values = values.unsqueeze(1) if values.dim() > 1 else values
    return values.view(*values.shape, *[1] * (like.dim() - values.dim()))


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
        """[B, C, …] at the clips' times in 0…1, [B] or [B, t]."""
        t = over_latents(shifted(times, self.alpha).to(self.clean), self.clean)
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
            squares = squares * over_latents(weights.to(squares), squares)
        return squares.mean()


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
        predict: gives the velocity [B, C, …] of each stream, for latents of that shape and timesteps like `times`.
        times: [B] in 0…1, or [B, t] of latent frames.
        weights: like `times`, what each sample's or frame's mean counts; 1 without.
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
        predict: gives the velocity of each stream, for the latents of each and a timestep [B], or [B, t], of the clips.
        times: or [steps + 1, t], of each latent frame (`staggered`).
        noise: of each stream.
        alphas: by how much the times of each stream are shifted, against those of the clips; None shifts none.
    """
    latents, first = [*noise], noise[0]
    # Of each stream, from one time to the next: below 0, from noise towards the clip.
    steps = [shifted(times, alpha).diff(dim=0) for alpha in alphas or [1.0] * len(noise)]
    for number, now in enumerate(times[:-1].double()):
        timestep = (now * TIMESTEPS).repeat(first.size(0), *[1] * now.dim()).to(first.device)
        velocities = predict(latents, timestep)
        # x_{t'} = x_t + (t' − t)·v
        latents = [
            _stepped(each, step[number], velocity.to(each.dtype))
            for each, velocity, step in zip(latents, velocities, steps, strict=True)
        ]
    return latents


def _stepped(latents: Tensor, step: Tensor, velocity: Tensor) -> Tensor:
    """Latents [B, C, t, …], moved along a velocity of that shape by a step, a number or [t] of each latent frame."""
    if not step.dim():
        return latents + step.item() * velocity
    # In fp64, as the steps are, and rounded once.
    return (latents + over_latents(step[None].to(latents.device), latents) * velocity).to(latents.dtype)


def staggered(times: Tensor, num_frames: int, ar_step: int, block: int, num_given: int = 0) -> Tensor:
    """The times of each latent frame in a sample whose blocks begin one after the other, [rows + 1, num_frames].

    Three frames in blocks of one, each `ar_step` 1 behind the one before it, at the times 1, 0.5 and 0:

        1    0.5  0    0    0
        1    1    0.5  0    0
        1    1    1    0.5  0      time after time →

    Args:
        times: [steps + 1], that each of them passes.
        ar_step: 0 begins with all. A block waits for no more than all steps of the one before it.
        block: latent frames of a block.
        num_given: the first latent frames that are given, whose whole blocks nothing waits for.
    """
    num_steps = len(times) - 1
    blocks = (torch.arange(num_frames) // block - num_given // block).clamp(min=0)
    starts = blocks * min(ar_step, num_steps)
    rows = torch.arange(num_steps + int(starts.max()) + 1)
    return times[(rows[:, None] - starts).clamp(0, num_steps)]
