"""Frames that are given, and of which a model learns to make the rest: a picture begins a clip, a clip goes on.

Which frames are given is drawn for each clip, by the weights of `ConditionsConfig`. The model learns of them in further
channels of its input, as Wan's image-to-video models are. An example with a VAE of 16 channels that makes one latent
frame of 4 frames, after the first; a clip of 9 frames, of which the first is given (`i2v_head`):

    frames        0    1 2 3 4    5 6 7 8
    given         1    0 0 0 0    0 0 0 0
    mask       1 1 1 1 | 0 0 0 0 | 0 0 0 0      4 numbers a latent frame; the first frame is there four times
    clip          0    · · · ·    · · · ·       what is not given is grey; encoded as any clip is

    input      16 channels of the noisy clip, 4 of the mask, 16 of the clip with what is given: 36
    loss                  latent frames 1 and 2: one whose frames are all given has nothing to learn

Names and numbers of frames: Open-Sora 2.0 (github.com/hpcaitech/Open-Sora, opensora/utils/train.py). Channels: Wan 2.1
(arXiv:2503.20314). Where nothing is given (`t2v`), mask and clip are zero, as in Open-Sora.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opensora_accel.training.buckets import Bucket
from opensora_accel.training.flow import generator
from opensora_accel.training.sections import ConditionsConfig


class Condition(NamedTuple):
    """What the model gets of clips whose frames are given."""

    # [B, C', t, h, w], behind the channels of the noisy clips.
    channels: Tensor
    # [B, N, width], states of the first frames, where the model takes them.
    pictures: Tensor | None = None


class Given(NamedTuple):
    """How many frames of a clip are given, at its beginning and at its end."""

    head: int
    tail: int

    def frames(self, num_frames: int) -> Tensor:
        """bool [num_frames]: which ones."""
        numbers = torch.arange(num_frames)
        return (numbers < self.head) | (numbers >= num_frames - self.tail)


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


def num_channels(codec_channels: int, temporal: int) -> int:
    """Channels of mask and clip, which stand behind those of the noisy clip."""
    return temporal + codec_channels


def mask_of(given: Tensor, temporal: int) -> Tensor:
    """given: bool [B, T], T 1 more than a multiple of `temporal` → [B, temporal, t], those of each latent frame."""
    first = given[:, :1].expand(-1, temporal)
    return torch.cat([first, given[:, 1:]], dim=1).unflatten(1, (-1, temporal)).transpose(1, 2)


def weights_of(config: ConditionsConfig, num_frames: int, temporal: int) -> dict[str, float]:
    """The weight of each kind that leaves something to learn of a clip of this length; where none does, of `t2v`."""
    # An image has no frame to spare.
    return _fitting(config, num_frames, temporal) or {"t2v": 1.0}


def _fitting(config: ConditionsConfig, num_frames: int, temporal: int) -> dict[str, float]:
    weights = {}
    for kind, weight in dataclasses.asdict(config).items():
        mask = mask_of(KINDS[kind].frames(num_frames).unsqueeze(0), temporal)
        if weight and not mask.all(1).all():
            weights[kind] = weight
    return weights


def check_conditions(config: ConditionsConfig, buckets: Sequence[Bucket], temporal: int) -> None:
    """Checks that every kind is for some clip, and that every clip, but an image, has a kind.

    Args:
        buckets: the sizes of clips, each 1 frame and a multiple of `temporal`.

    Raises:
        ValueError: what was asked for would not be trained.
    """
    fitting = {bucket: _fitting(config, bucket.num_frames, temporal) for bucket in buckets}
    sizes = ", ".join(map(str, buckets))
    for kind, weight in dataclasses.asdict(config).items():
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


def draw_conditions(
    config: ConditionsConfig, num_frames: int, temporal: int, seed: int, positions: Sequence[int]
) -> list[str]:
    """What is given of each sample: a kind that follows from the seed and the sample's position in the job."""
    weights = weights_of(config, num_frames, temporal)
    of_kind = torch.tensor(list(weights.values()), dtype=torch.float64)
    kinds = list(weights)
    return [
        kinds[int(torch.multinomial(of_kind, 1, generator=generator(seed, "condition", position)))]
        for position in positions
    ]


def encode_condition(
    encode: Callable[[list[int]], Tensor],
    given: Sequence[Given],
    num_frames: int,
    temporal: int,
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """What the model gets of them, and which latent frames it learns.

    Args:
        encode: gives the latents [n, C, t, h, w] of n of the samples, by their numbers, with what is given of them.
        given: of each of B samples.
        like: the latents [B, C, t, h, w] of whole clips.

    Returns:
        [B, temporal + C, t, h, w], and bool [B, t].
    """
    frames = torch.stack([each.frames(num_frames) for each in given])
    mask = mask_of(frames, temporal)
    latents = torch.zeros_like(like)
    conditioned = [number for number, each in enumerate(given) if each != KINDS["t2v"]]
    if conditioned:
        latents[conditioned] = encode(conditioned).to(latents)
    # [B, temporal, t, 1, 1], the same at every position of a latent frame.
    of_positions = mask.to(latents)[..., None, None].expand(-1, -1, -1, *like.shape[-2:])
    return torch.cat([of_positions, latents], dim=1), ~mask.all(1).to(like.device)
