"""Frames that are given, and of which a model learns to make the rest: a picture begins a clip, a clip goes on.

Which frames are given is drawn for each clip, by the weights of `ConditionsConfig`. How a model takes them is its
family's `Conditioning`. An example with a VAE of 16 channels that makes one latent frame of 4 frames, after the first;
of a clip of 9 frames the first is given (`i2v_head`). Wan 2.1 takes it in further channels of its input:

    frames        0    1 2 3 4    5 6 7 8
    given         1    0 0 0 0    0 0 0 0
    mask       1 1 1 1 | 0 0 0 0 | 0 0 0 0      4 numbers a latent frame; the first frame is there four times
    clip          0    · · · ·    · · · ·       what is not given is grey; encoded as any clip is

    input      16 channels of the noisy clip, 4 of the mask, 16 of the clip with what is given: 36
    loss       all latent frames, as its sampler makes the given ones too, or 1 and 2 (`conditions.learn_given`)

EasyAnimate has black in the place of grey, and noise on the pixels that are given. Its mask is one channel, of each
latent frame whether the two frames in its middle are given, times the VAE's factor:

    mask         1    |    0    |    0          of frames 0, 2 and 3, 6 and 7

Its weights that follow a control have no mask. Behind the noisy clip stands the control, whole, and behind that the
first frame, encoded by itself; where it is not given, a reference may stand there:

    control      c    c c c c    c c c c        zero without a control
    picture      0    |    ·    |    ·          zero without a picture

LTX-Video and Wan 2.2 5B take it in the place of what is noisy, and every token has a time of its own:

    input      16 channels: latent frame 0 of the picture, 1 and 2 noisy
    times      0 | t | t
    loss       latent frames 1 and 2: its sampler puts the given one back

MiniMax H3 takes the first frame, the last, or both, each encoded alone, in rows of its own before those of the clip.
Its encoder of captions reads them too:

    rows       caption | first frame | last frame | sound | clip, all noisy
    times              |    0.001 (of 1, noise), whatever that of the clip; its own where that is below it
    loss       all latent frames, as its sampler makes them all

Its other weights take references so, pictures of what a clip shows, each in a shape of its own and at a moment of its
own before the clip:

    rows       caption | reference 1 | reference 2 | sound | clip, all noisy

Kandinsky 5 takes it there too, at one time t, and is told where by a channel behind 16 of zeros. Cosmos-Predict has
that channel alone, and times of latent frames, next to 0 where it is given.

HunyuanVideo's models from a first frame begin every clip with it: in further channels, or in the place of the first
latent frame, to which the model itself gives time 0.

VACE takes it in a branch of its own, whose states are added to those of its blocks. There a clip is in two: what is
kept of it, and what is to be made, where a control (pose, depth, edges) stands if there is one:

    frames        0    1 2 3 4    5 6 7 8
    kept          0    · · · ·    · · · ·      16 channels; what is not given is grey
    to be made    ·    c c c c    c c c c      16 channels; grey all over without a control
    mask          0    1 1 1 1    1 1 1 1      of each latent frame that of one of its frames: here of 1, 4 and 7

    branch        16 + 16 channels, and the mask of each of 8 × 8 pixels: 96

Its references, pictures of what a clip shows, are latent frames of their own before the clip: encoded alone, kept, and
with nothing to be made. They are noisy where the clip is, and what a sample makes in their place is left out. So two of
them, in the pipeline's order, which puts the second first:

    latents       reference 2 | reference 1 | 0 | 1 2 3 4 | 5 6 7 8
    kept          reference 2 | reference 1 | as above
    to be made, mask        0 |           0 | as above

Names and numbers of frames: Open-Sora 2.0 (github.com/hpcaitech/Open-Sora, opensora/utils/train.py). Channels: Wan 2.1
(arXiv:2503.20314). VACE: arXiv:2503.07598. Where nothing is given (`t2v`), mask and clip are zero, as in Open-Sora.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora_accel.training.buckets import Bucket
from opensora_accel.training.codec import Codec, LatentFrames
from opensora_accel.training.flow import TIMESTEPS, generator
from opensora_accel.training.sections import ConditionsConfig

# The noise of pixels that are given, of 2 from black to white: of samples, and of what is learned the mean and the
# deviation of its logarithm. Source: diffusers, EasyAnimateInpaintPipeline, noise_aug_strength and
# add_noise_to_reference_video.
_LEVEL_OF_SAMPLES, _LOG_LEVEL = 0.0563, (-3.0, 0.5)


class Condition(NamedTuple):
    """What the model gets of clips whose frames are given."""

    # [B, C', t, h, w], behind the channels of the noisy clips; where `given` is, their latents [B, C, t, h, w]; where
    # `ends` is, those of the first and of the last frame, [B, C, 2, h, w]; where `references` are, of no channels.
    latents: Tensor
    # Bool [B, t]: the latent frames that stand in the place of noisy ones; none where they stand behind.
    given: Tensor | None = None
    # [B, N, width], states of the first frames, where the model takes them.
    pictures: Tensor | None = None
    # [B, C', t, h, w], what is behind, where `given` is, of a model that has channels all the same.
    marks: Tensor | None = None
    # The timestep of what `given` is, in 0…1000.
    timestep: float = 0.0
    # Whether latents go into an argument of their own, and not behind those of noisy clips.
    is_apart: bool = False
    # Which ends of each clip are given, where they stand in rows of their own; latents of the others are not looked at.
    ends: list[Given] | None = None
    # uint8 [B, 2, H, W, 3], the first and the last frame, where the encoder of captions sees those that are given; of a
    # model that begins every clip with its first frame that alone, [B, 1, H, W, 3].
    frames: Tensor | None = None
    # Of each clip the latents [1, C, 1, h, w] of references that stand in rows of their own, each of its own size.
    references: list[Sequence[Tensor]] | None = None
    # uint8 [H, W, 3] of each of those, as the encoder of captions sees them.
    pictures_of_references: list[Sequence[Tensor]] | None = None

    def put(self, noisy: Tensor) -> Tensor:
        """noisy: [B, C, t, h, w] → with what is given, [B, C + C', t, h, w] or [B, C, t, h, w]."""
        if self.is_apart or self.ends is not None or self.references is not None:
            return noisy
        behind = self.latents if self.given is None else self.marks
        placed = self.in_place(noisy)
        return placed if behind is None else torch.cat([placed, behind], dim=1)

    def in_place(self, noisy: Tensor) -> Tensor:
        """[B, C, t, h, w] → the same, with the latents that stand in the place of noisy ones."""
        if self.given is None:
            return noisy
        return torch.where(self.given[:, None, :, None, None], self.latents, noisy)

    def with_noise(self, noise: Tensor, timestep: float) -> Condition:
        """The same, whose latents that stand in the place of noisy ones are at this timestep themselves."""
        t = timestep / TIMESTEPS
        return self._replace(latents=(1 - t) * self.latents + t * noise, timestep=timestep)

    def in_rows(self) -> Sequence[Tensor]:
        """[1, C, 1, h, w] of each frame and reference of one clip that stands in rows of its own."""
        if self.references is not None:
            (references,) = self.references
            return references
        if self.ends is None:
            return ()
        (given,) = self.ends
        return [self.latents[:, :, number, None] for number in given.numbers]

    def shown(self) -> Sequence[Sequence[Tensor]] | None:
        """uint8 [H, W, 3] of what the encoder of captions sees of each clip; None where it sees nothing."""
        if self.pictures_of_references is not None:
            return self.pictures_of_references
        if self.frames is None:
            return None
        if self.ends is None:
            return [[*frames] for frames in self.frames]
        return [[*frames[given.numbers]] for frames, given in zip(self.frames, self.ends, strict=True)]

    @property
    def num_given(self) -> int:
        """How many of the first latent frames stand in the place of noisy ones, in all clips."""
        return 0 if self.given is None else int(self.given.all(0).long().cumprod(0).sum())

    def rows(self, rows: slice) -> Condition:
        """Those of some of the clips."""
        of_rows: Any = {
            name: each[rows] for name, each in self._asdict().items() if isinstance(each, (Tensor, list))
        }
        return self._replace(**of_rows)


class Given(NamedTuple):
    """How many frames of a clip are given, at its beginning and at its end."""

    head: int
    tail: int
    # All but these.
    are_others: bool = False

    def frames(self, num_frames: int) -> Tensor:
        """bool [num_frames]: which ones."""
        numbers = torch.arange(num_frames)
        ends = (numbers < self.head) | (numbers >= num_frames - self.tail)
        return ~ends if self.are_others else ends

    @property
    def others(self) -> Given:
        """Those that are not given."""
        return self._replace(are_others=not self.are_others)

    @property
    def numbers(self) -> list[int]:
        """Of the ends of a clip, 0 and 1, those that are given."""
        return [number for number, count in enumerate((self.head, self.tail)) if count]


KINDS = {
    "t2v": Given(0, 0),
    "i2v_head": Given(1, 0),
    "i2v_tail": Given(0, 1),
    "i2v_loop": Given(1, 1),
    "v2v_head": Given(33, 0),
    "v2v_tail": Given(0, 33),
    "v2v_head_easy": Given(65, 0),
    "v2v_tail_easy": Given(0, 65),
}


@dataclass(frozen=True)
class Conditioning:
    """How the models of a family take frames that are given."""

    # In channels behind those of what is noisy; in the place of its latents, at time 0; in a branch of its own, which
    # takes controls too; or in rows of their own, which the first and the last frame may have.
    place: Literal["channels", "latents", "branch", "rows"]
    # In channels: a number for each frame of a latent frame, before what is given; one, behind it; one, before it, of
    # how many of its two middle frames are given, times the VAE's factor; or none.
    mask: Literal["frames", "latent frames", "middle frames"] | None = None
    # What is given is encoded as a clip whose other frames are so; or by itself, and zero follows.
    others: Literal["grey", "black"] | None = None
    # The model's argument by which pixels that are given are in noise, before they are encoded; none has none.
    noise_if: str = ""
    # The channels are there in a run that gives no frames too, and are zero.
    always: bool = False
    # They are the mask's alone, of a model that takes latents in their place.
    mask_alone: bool = False
    # The timestep at which what is given is held, 0…1000, in noise of its own.
    timestep: float = 0.0
    # What the VAE gives of a frame is drawn by this seed and rounded to fp16, as a pipeline does; None is its mode.
    drawn: int | None = None
    # The first frame of every clip is given, and nothing else ever.
    always_first: bool = False
    # Those channels are an argument of their own, as what a branch takes is: the model itself joins them to the noisy
    # clip.
    apart: bool = False
    # In rows: weights of their own take references so, held at the same timestep, where no frames are given.
    takes_references: bool = False
    # Those channels are of a control, and behind it of a first frame that is given, or of a reference.
    of_control: bool = False
    # Frames at the end of a clip may be given too. Each end is encoded by itself, and its latent frames are all marked:
    # of one last frame the last one.
    at_both_ends: bool = False

    @property
    def has_channels(self) -> bool:
        """Whether the model has channels behind those of the noisy clip; of latents in their place, they say where."""
        return self.place == "channels" or self.mask is not None

    @property
    def follows_controls(self) -> bool:
        """Whether it takes controls, as pose and depth, and references, as a picture of a person."""
        return self.place == "branch" or self.of_control

    def num_channels(self, codec_channels: int, temporal: int) -> int:
        """Channels of what is given and its mask, behind those of the noisy clip."""
        if not self.has_channels:
            return 0
        of_mask = {"frames": temporal, "latent frames": 1, "middle frames": 1, None: 0}[self.mask]
        before = codec_channels if self.of_control else of_mask
        return of_mask if self.mask_alone else before + codec_channels

    def input_channels(self, codec: Codec) -> int:
        """All channels that a model takes, with those of the noisy clip."""
        return codec.channels + self.num_channels(codec.channels, codec.latent_frames.temporal)

    def branch_channels(self, codec: Codec) -> int:
        """Channels of the branch that takes what is given: of what is kept, of what is to be made, and of the mask."""
        return 2 * codec.channels + codec.spatial**2

    def is_needed(self, kinds: Sequence[str]) -> bool:
        """Whether a model is told anything of clips of which what these kinds say is given."""
        return self.has_channels or self.place == "branch" or any(kind != "t2v" for kind in kinds)

    def of_nothing(self, like: Tensor, temporal: int) -> Condition | None:
        """What the model gets of clips of latents like [B, C, t, h, w], of which nothing is given."""
        if not self.has_channels:
            return None
        channels = self.num_channels(like.size(1), temporal)
        return Condition(like.new_zeros(len(like), channels, *like.shape[2:]), is_apart=self.apart)

    def encode(
        self, codec: Codec, frames: Tensor, given: Sequence[Given], noise: Tensor | None = None
    ) -> Tensor:
        """frames: uint8 [B, T, H, W, 3], of each of which is given what `given` says → latents [B, C, t, h, w].

        In rows of their own they are those of both ends, [B, C, 2, h, w].

        Args:
            noise: [B, T, 3, H, W], which the pixels are in, of a model that has it so.
        """
        if self.others is not None:
            shown = torch.stack([each.frames(frames.size(1)) for each in given])
            return codec.encode(frames, shown, black=self.others == "black", noise=noise)
        if self.place == "rows":
            ends = [codec.encode(frames[:, number, None], drawn=self.drawn) for number in (0, -1)]
            return torch.cat(ends, dim=2)
        num_latents = codec.latent_frames.num_latents(frames.size(1))
        scale = codec.given_scale if self.place == "channels" else 1.0
        found = []
        for clip, each in zip(frames, given, strict=True):
            parts = [(clip[: each.head], "head"), (clip[len(clip) - each.tail :], "tail")]
            ends = []
            for part, end in parts:
                if len(part):
                    latents = scale * codec.encode(part[None])
                    rest = num_latents - latents.size(2)
                    ends.append(F.pad(latents, (0, 0, 0, 0, *((0, rest) if end == "head" else (rest, 0)))))
            found.append(torch.stack(ends).sum(0))
        return torch.cat(found)

    def marked(self, given: Sequence[Given], num_frames: int, latent_frames: LatentFrames) -> Tensor:
        """Bool [B, t]: the latent frames of B clips that hold what is given, and nothing else."""
        if not self.at_both_ends:
            frames = torch.stack([each.frames(num_frames) for each in given])
            return mask_of(frames, latent_frames).all(1)
        numbers = torch.arange(latent_frames.num_latents(num_frames))
        ends = [
            [latent_frames.num_latents(count) if count else 0 for count in (each.head, each.tail)]
            for each in given
        ]
        return torch.stack([(numbers < head) | (numbers >= len(numbers) - tail) for head, tail in ends])


def mask_of(given: Tensor, latent_frames: LatentFrames) -> Tensor:
    """given: bool [B, T] → [B, temporal, t], those of each latent frame."""
    return given[:, latent_frames.numbers(given.size(1))]


def middle_mask(given: Tensor, num_latents: int) -> Tensor:
    """given: bool [B, T] → fp32 [B, num_latents]: of the first latent frame whether its frame is given, and of another
    how many of its two middle ones are: 0, ½ or 1.

    Of 9 frames and 3 latent frames these are 0, 2 and 3, and 6 and 7, so that of a last frame alone nothing is marked:
    so EasyAnimateInpaintPipeline has it.
    """
    first, others = given[:, None, :1].float(), given[:, None, 1:].float()
    if num_latents == 1:
        return first.squeeze(1)
    others = F.interpolate(others, size=num_latents - 1, mode="linear", align_corners=False)
    return torch.cat([first, others], dim=2).squeeze(1)


def pixel_noise(
    like: Tensor, given: Sequence[Given], seed: int, positions: Sequence[int], *, in_sample: bool
) -> Tensor:
    """Noise of the pixels that are given, fp32 [B, T, 3, H, W], zero elsewhere; drawn on the host.

    A sample has as much as EasyAnimateInpaintPipeline gives it, and a clip that is learned as much as is drawn for it:
    so its authors train (github.com/aigc-apps/EasyAnimate, scripts/train.py).

    Args:
        like: uint8 [B, T, H, W, 3].
    """
    batch, length, height, width, _ = like.shape
    noise = torch.zeros(batch, length, 3, height, width)
    for row, each, position in zip(noise, given, positions, strict=True):
        shown, rng = each.frames(length), generator(seed, "noise of given pixels", position)
        level = math.exp(_LOG_LEVEL[0] + _LOG_LEVEL[1] * torch.randn((), generator=rng).item())
        drawn = torch.randn(int(shown.sum()), 3, height, width, generator=rng)
        row[shown] = (_LEVEL_OF_SAMPLES if in_sample else level) * drawn
    return noise.to(like.device)


def branch_mask(given: Tensor, num_latents: int) -> Tensor:
    """given: bool [B, T] → fp32 [B, num_latents]: 0 where the frame that stands for a latent frame is given, else 1.

    Of 9 frames and 3 latent frames these are 1, 4 and 7, so that of a first frame alone nothing is marked: so
    WanVACEPipeline has it.
    """
    to_be_made = (~given).float().unsqueeze(1)
    return F.interpolate(to_be_made, size=num_latents, mode="nearest-exact").squeeze(1)


def weights_of(config: ConditionsConfig, num_frames: int, latent_frames: LatentFrames) -> dict[str, float]:
    """The weight of each kind that leaves something to learn of a clip of this length; where none does, of `t2v`."""
    # An image has no frame to spare.
    return _fitting(config, num_frames, latent_frames) or {"t2v": 1.0}


def _fitting(config: ConditionsConfig, num_frames: int, latent_frames: LatentFrames) -> dict[str, float]:
    weights = {}
    for kind, weight in config.weights.items():
        if weight:
            mask = mask_of(KINDS[kind].frames(num_frames).unsqueeze(0), latent_frames)
            if not mask.all(1).all():
                weights[kind] = weight
    return weights


def check_conditions(
    config: ConditionsConfig,
    buckets: Sequence[Bucket],
    latent_frames: LatentFrames,
    conditioning: Conditioning | None = None,
) -> None:
    """Checks that every kind is for some clip, and that every clip, but an image, has a kind.

    Args:
        buckets: the sizes of clips, each of whole latent frames.
        conditioning: how the model takes what is given; None takes any kind.

    Raises:
        ValueError: what was asked for would not be trained.
    """
    fitting = {bucket: _fitting(config, bucket.num_frames, latent_frames) for bucket in buckets}
    sizes = ", ".join(map(str, buckets))
    for kind, weight in config.weights.items():
        if weight and conditioning is not None:
            _check_kind(kind, conditioning)
        if weight and not any(kind in weights for weights in fitting.values()):
            given = KINDS[kind].head + KINDS[kind].tail
            raise ValueError(
                f"conditions.{kind} gives {given} frames of a clip, which leaves nothing to learn of one of {sizes}; "
                "set it to 0, or let clips have more frames (--data.num_frames, --data.buckets)"
            )
    for bucket, weights in fitting.items():
        if bucket.num_frames > 1 and not weights:
            raise ValueError(
                f"no kind of conditions leaves anything to learn of a clip of {bucket}, and conditions.t2v is 0; give "
                "t2v a weight, or leave that size out of --data.buckets"
            )


def _check_kind(kind: str, conditioning: Conditioning) -> None:
    """Raises ValueError where a model takes no such frames of a clip."""
    if conditioning.of_control and kind not in ("t2v", "i2v_head"):
        raise ValueError(
            f"conditions.{kind} gives other frames than the first, and this model takes that one alone, behind a "
            "control; set it to 0, and conditions.i2v_head above 0"
        )
    in_rows = conditioning.place == "rows"
    if in_rows and max(KINDS[kind]) > 1:
        raise ValueError(
            f"conditions.{kind} gives {max(KINDS[kind])} frames, and this model takes the first, the last or both; "
            "set it to 0, and conditions.i2v_head, i2v_tail or i2v_loop above 0"
        )
    if KINDS[kind].tail and not (conditioning.others or in_rows or conditioning.at_both_ends):
        raise ValueError(
            f"conditions.{kind} gives frames at the end of a clip, and this model takes them at its beginning; set "
            "it to 0, and conditions.i2v_head or v2v_head above 0"
        )


def draw_conditions(
    config: ConditionsConfig,
    num_frames: int,
    latent_frames: LatentFrames,
    seed: int,
    positions: Sequence[int],
) -> list[str]:
    """What is given of each sample: a kind that follows from the seed and the sample's position in the job."""
    weights = weights_of(config, num_frames, latent_frames)
    of_kind = torch.tensor(list(weights.values()), dtype=torch.float64)
    kinds = list(weights)
    return [
        kinds[int(torch.multinomial(of_kind, 1, generator=generator(seed, "condition", position)))]
        for position in positions
    ]


def branch_condition(
    kept: Tensor,
    to_be_made: Tensor,
    given: Sequence[Given],
    num_frames: int,
    latent_frames: LatentFrames,
    spatial: int,
    references: Tensor | None = None,
) -> tuple[Condition, Tensor]:
    """What a model with a branch gets of clips, and bool [B, t], the latent frames whose frames are all given.

    Args:
        kept: latents [B, C, t, h, w] of what is given of each clip, in grey.
        to_be_made: those of its control, or of grey alone, where nothing is given.
        given: of each of B samples.
        spatial: pixels along each side of a latent position.
        references: their latents [B, C, N, h, w], which stand before the clip; nothing of them is to be made.
    """
    frames = torch.stack([each.frames(num_frames) for each in given])
    mask = branch_mask(frames, kept.size(2)).to(kept)[:, None, :, None, None]
    mask = mask.expand(-1, spatial**2, -1, *kept.shape[-2:])
    if references is not None:
        before = [references, torch.zeros_like(references), torch.zeros_like(mask[:, :, :1])]
        before[2] = before[2].expand(-1, -1, references.size(2), -1, -1)
        kept, to_be_made, mask = (
            torch.cat([first.to(each), each], dim=2)
            for first, each in zip(before, (kept, to_be_made, mask), strict=True)
        )
    whole = mask_of(frames, latent_frames).all(1).to(kept.device)
    return Condition(torch.cat([kept, to_be_made, mask], dim=1), is_apart=True), whole


def encode_condition(
    conditioning: Conditioning,
    encode: Callable[[list[int]], Tensor],
    given: Sequence[Given],
    num_frames: int,
    latent_frames: LatentFrames,
    like: Tensor,
    factor: float = 1.0,
) -> tuple[Condition, Tensor]:
    """What the model gets of clips, pictures left out, and bool [B, t], the latent frames whose frames are all given.

    Args:
        encode: gives the latents [n, C, t, h, w] of n of the samples, by their numbers, with what is given of them.
        given: of each of B samples.
        like: the latents [B, C, t, h, w] of whole clips.
        factor: the VAE's.
    """
    frames = torch.stack([each.frames(num_frames) for each in given])
    mask = mask_of(frames, latent_frames).to(like.device)
    latents = torch.zeros_like(like)
    if conditioning.place == "rows":
        latents = like.new_zeros(*like.shape[:2], 2, *like.shape[3:])
    conditioned = [number for number, each in enumerate(given) if each != KINDS["t2v"]]
    if conditioned:
        latents[conditioned] = encode(conditioned).to(latents)
    whole = conditioning.marked(given, num_frames, latent_frames).to(like.device)

    def everywhere(mask: Tensor) -> Tensor:
        """[B, n, t] → [B, n, t, h, w], the same at every position of a latent frame."""
        return mask.to(latents)[..., None, None].expand(-1, -1, -1, *like.shape[-2:])

    if conditioning.place == "rows":
        return Condition(latents, ends=[*given]), whole
    if conditioning.place == "latents":
        marks = None
        if conditioning.has_channels:
            marks = everywhere(whole[:, None])
            if not conditioning.mask_alone:
                marks = torch.cat([torch.zeros_like(latents), marks], dim=1)
        return Condition(latents, given=whole, marks=marks), whole
    if conditioning.mask == "frames":
        latents = torch.cat([everywhere(mask), latents], dim=1)
    elif conditioning.mask == "latent frames":
        latents = torch.cat([latents, everywhere(whole[:, None])], dim=1)
    elif conditioning.mask == "middle frames":
        middle = middle_mask(frames, like.size(2)).to(latents) * factor
        latents = torch.cat([everywhere(middle[:, None]), latents], dim=1)
    return Condition(latents, is_apart=conditioning.apart), whole
