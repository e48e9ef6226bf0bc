"""Samples that are longer than the clips that are learned, made in parts, each of which goes on with the one before it.

Of clips of 25 frames, which are 7 latent frames, a sample of 45 frames, 12 latent ones, with 9 frames of overlap, 3
latent ones:

    part 0     0 1 2 3 4 5 6
    part 1             4 5 6 7 8 9 10         4, 5 and 6 are given
    part 2                     8 9 10 11      8, 9 and 10 are given; the last part is as short as is left

What is given stands in the place of noise, at time 0 or up to which `flow.addnoise_condition` shows it, as frames of a
source do (`conditions.py`). So no call of the model has more tokens than in training.

Source: diffusers, SkyReelsV2DiffusionForcingPipeline (overlap_history, base_num_frames)
(https://github.com/huggingface/diffusers/blob/main/src/diffusers/pipelines/skyreels_v2).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from opensora_accel.training.buckets import Bucket
from opensora_accel.training.codec import LatentFrames
from opensora_accel.training.conditions import Condition
from opensora_accel.training.sections import FlowConfig


def part_lengths(total: int, base: int, overlap: int) -> list[int]:
    """Latent frames of each part of a sample of `total` latent frames, with those that it has of the part before it.

    Args:
        base: of a clip that is learned, and of the first part.
        overlap: of a part, the first ones that the part before it ends with.
    """
    assert 0 < overlap < base or total <= base, "each part makes something"
    lengths, done = [min(base, total)], min(base, total)
    while done < total:
        lengths.append(min(base, overlap + total - done))
        done += lengths[-1] - overlap
    return lengths


def lengths_of(flow: FlowConfig, bucket: Bucket, latent_frames: LatentFrames) -> list[int]:
    """Latent frames of each part of a sample of clips of this size; an image is one alone."""
    base = latent_frames.num_latents(bucket.num_frames)
    if not flow.sample_frames or bucket.num_frames == 1:
        return [base]
    overlap = latent_frames.num_latents(flow.overlap_history)
    return part_lengths(latent_frames.num_latents(flow.sample_frames), base, overlap)


def goes_on(made: Tensor, like: Tensor, overlap: int) -> Condition:
    """What a part gets of the latents [B, C, t, h, w] before it: their last ones, in the place of its first.

    Args:
        like: noise of the part, [B, C, t', h, w].
    """
    latents = torch.zeros_like(like)
    latents[:, :, :overlap] = made[:, :, made.size(2) - overlap :]
    given = (torch.arange(like.size(2), device=like.device) < overlap).expand(len(like), -1)
    return Condition(latents, given=given)


def check_long_samples(
    flow: FlowConfig, buckets: Iterable[Bucket], latent_frames: LatentFrames, block: int
) -> None:
    """Checks that samples are longer than clips of each size but images, and their parts are of whole causal blocks.

    Args:
        block: latent frames of a causal block; 1 is none.

    Raises:
        ValueError: they are not.
    """
    if not flow.sample_frames:
        return
    names = ("flow.sample_frames", flow.sample_frames), ("flow.overlap_history", flow.overlap_history)
    of_sample, of_overlap = (latent_frames.num_latents(count, name) for name, count in names)
    for bucket in buckets:
        if bucket.num_frames == 1:
            continue
        if flow.overlap_history >= bucket.num_frames:
            raise ValueError(
                f"flow.overlap_history ({flow.overlap_history}) leaves nothing to make of a part of "
                f"{bucket.num_frames} frames, as long as a clip that is learned; set it lower, as 17"
            )
        if flow.sample_frames <= bucket.num_frames:
            raise ValueError(
                f"flow.sample_frames ({flow.sample_frames}) is for samples that are longer than a clip, which has "
                f"{bucket.num_frames} frames; set it higher, or leave it and flow.overlap_history out"
            )
        base = latent_frames.num_latents(bucket.num_frames)
        lengths = part_lengths(of_sample, base, of_overlap)
        if of_overlap % block or lengths[-1] % block:
            raise ValueError(
                f"samples of {flow.sample_frames} frames with an overlap of {flow.overlap_history} have parts of "
                f"{', '.join(map(str, lengths))} latent frames, of which {of_overlap} are given, and the model's "
                f"causal blocks have {block}; set both so that they, and what is left, are whole blocks"
            )
