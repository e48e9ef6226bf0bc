"""Shapes of one clip: its latents, how many tokens it is, and all that a model is called with for it.

No file is looked at, and what is made has no values that matter: so a model is tried on a clip of each size before its
weights are read, and the planner traces it. Of 9 frames in 64 × 96 pixels, with Wan's VAE and patches of 1 × 2 × 2:

    latents     [16, 3, 8, 12], as 4 frames make a latent one behind the first, and 8 × 8 pixels a position
    tokens      3 · 4 · 6 = 72
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opensora_accel.training.buckets import Bucket
from opensora_accel.training.captions import TextShape
from opensora_accel.training.classes import arguments_of
from opensora_accel.training.codec import Codec, LatentShape, build_codec, check_multiple, latent_shape
from opensora_accel.training.conditions import KINDS, Condition, Given
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.configured import (
    all_arguments,
    causal_block_size,
    conditioning_of,
    picture_shape_of,
    recipe_of,
    texts_of,
)
from opensora_accel.training.recipes import Inputs, patches_of
from opensora_accel.training.sound import sound_shape
from opensora_accel.training.text_encoders import picture_tokens


def check_sizes(bucket: Bucket, codec: Codec, model: Any) -> LatentShape:
    """The latent shape [C, t, h, w] of a clip of this size.

    Raises:
        ValueError: a clip does not fit the codec or the model's patches.
    """
    shape = latent_shape(codec, bucket.num_frames, bucket.height, bucket.width)
    arguments = arguments_of(model)
    patch_time, patch_height, patch_width = patches_of(arguments)
    for name, unit in (("height", patch_height), ("width", patch_width)):
        reason = f"codec ({codec.spatial}) × model patch ({unit})"
        check_multiple(f"data.{name}", getattr(bucket, name), codec.spatial * unit, reason)
    if shape[1] % patch_time:
        check_multiple("the number of latent frames", shape[1], patch_time, "the model's patch in time")
    block = causal_block_size(arguments)
    if shape[1] % block:
        check_multiple("the number of latent frames", shape[1], block, "the model's causal blocks")
    return shape


def with_references(shape: LatentShape, config: TrainConfig) -> LatentShape:
    """The latent shape [C, t, h, w] of what a model makes of a clip: before it a latent frame of each reference, where
    it has them there."""
    channels, num_frames, height, width = shape
    return channels, num_frames + recipe_of(config.model).latent_frames_before(config.data), height, width


def tokens_per_sample(shape: LatentShape, model: Any) -> int:
    """The number of tokens that the model makes of latents [C, t, h, w] of this shape."""
    patch_time, patch_height, patch_width = patches_of(arguments_of(model))
    return (shape[1] // patch_time) * (shape[2] // patch_height) * (shape[3] // patch_width)


def reference_unit(config: TrainConfig) -> int:
    """Pixels of which the sides of references in their own shapes are multiples; 1 of a run without."""
    if not config.data.reference_side:
        return 1
    codec = build_codec(config.codec, torch.device("meta"), torch.float32)
    return codec.spatial * patches_of(all_arguments(config.model))[2]


def square_references(config: TrainConfig) -> list[tuple[int, int]]:
    """Height and width of references in their own shapes, as if these were squares: no file is looked at."""
    if not config.data.reference_side:
        return []
    unit = reference_unit(config)
    side = max(unit, round(config.data.reference_side / unit) * unit)
    return [(side, side)] * config.data.num_references


def inputs_of_one(
    config: TrainConfig,
    codec: Codec,
    shape: LatentShape,
    texts: Sequence[TextShape],
    arguments: Mapping[str, Any],
) -> Inputs:
    """What a model is called with for one clip, of latents [C, t, h, w] of this shape, and the longest caption."""
    references = square_references(config)
    height, width = (size * codec.spatial for size in shape[2:])
    seen = picture_tokens_of(config, height, width, references)
    texts = with_pictures(texts, seen)
    return Inputs(
        latents=torch.empty(1, *shape),
        timestep=torch.empty(1, shape[1]) if config.flow.is_forced else torch.empty(1),
        texts=[torch.empty(1, *each) for each in texts],
        text_masks=[torch.ones(1, each.length, dtype=torch.bool) for each in texts],
        condition=condition_of_one(config, codec, shape, references),
        spatial=codec.spatial,
        latent_frames=codec.latent_frames,
        config=arguments,
        sound=sound_of_one(config, codec.latent_frames.num_frames(shape[1])),
    )


def with_pictures(texts: Sequence[TextShape], num_states: int) -> list[TextShape]:
    """Shapes of captions' states, the first encoder's with so many of frames that it sees."""
    first, *others = texts
    return [TextShape(first.length + num_states, first.width), *others]


def picture_tokens_of(
    config: TrainConfig, height: int, width: int, references: Sequence[tuple[int, int]] = ()
) -> int:
    """The most states that frames which are given have among those of a caption, of a clip of this size.

    Args:
        references: height and width of each, of a run that has them in their own shapes, in place of such frames.
    """
    taken = texts_of(config)[0]
    if not taken.picture:
        return 0
    if references:
        return sum(picture_tokens(config.text, taken, *size) for size in references)
    return len(_most_ends(config).numbers) * picture_tokens(config.text, taken, height, width)


def sound_of_one(config: TrainConfig, num_frames: int) -> Tensor | None:
    """Latents [1, C, L, M] of the sound of one clip of so many frames; None of a model that makes none.

    No file is looked at for it: without `data.frame_rate` there are 25 frames a second.
    """
    taken = recipe_of(config.model).sound
    if taken is None:
        return None
    seconds = num_frames / (config.data.frame_rate or 25.0)
    return torch.empty(1, *sound_shape(config.codec, taken).latents(seconds))


def condition_of_one(
    config: TrainConfig, codec: Codec, shape: LatentShape, references: Sequence[tuple[int, int]] = ()
) -> Condition | None:
    """Of the shapes of what the model gets of one clip, of latents [C, t, h, w] of this shape, with its first frame.

    Args:
        references: height and width of each, of a run that has them in their own shapes.
    """
    conditioning = conditioning_of(config, codec)
    if conditioning is None:
        return None
    # Not zeros, which some models take for no picture.
    pictures = torch.ones(1, *picture_shape_of(config)) if config.image.is_used else None
    if conditioning.place == "branch":
        return Condition(torch.zeros(1, conditioning.branch_channels(codec), *shape[1:]), is_apart=True)
    if conditioning.place == "channels":
        channels = conditioning.num_channels(codec.channels, codec.latent_frames.temporal)
        latents = torch.zeros(1, channels, *shape[1:])
        return Condition(latents, pictures=pictures, is_apart=conditioning.apart)
    if conditioning.place == "rows":
        channels, _, *sides = shape
        if references:
            rows = [
                torch.zeros(1, channels, 1, *(each // codec.spatial for each in size)) for size in references
            ]
            return Condition(torch.zeros(1, 0, 1, 1, 1), references=[rows])
        return Condition(torch.zeros(1, channels, 2, *sides), ends=[_most_ends(config)])
    given, marks = (torch.arange(shape[1]) < 1)[None], None
    if conditioning.has_channels:
        channels = conditioning.num_channels(codec.channels, codec.latent_frames.temporal)
        marks = torch.zeros(1, channels, *shape[1:])
    return Condition(torch.zeros(1, *shape), given, pictures, marks)


def _most_ends(config: TrainConfig) -> Given:
    """Of the kinds that the run draws, the one that gives the most ends of a clip."""
    used = [KINDS[kind] for kind, weight in config.conditions.weights.items() if weight]
    return max(used, key=lambda given: len(given.numbers))
