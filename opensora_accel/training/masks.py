"""Masks: which part of a clip is learned.

A mask is a picture, which holds for all frames of its clip, or a video of as many frames. White is learned, black is
not, and grey in part. A latent is learned as far as its pixels are: of one that is made of 4 frames of 8 × 8 pixels,
128 white pixels make it count a half.

`data.masks` is a folder in which masks lie as the files do in theirs: of clips/a.mp4 it has clips/a.png, or
clips/a.mp4. A file without a mask is learned whole.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor
from torch.nn import functional

from opensora_accel.training.codec import LatentFrames
from opensora_accel.training.sections import DataConfig
from opensora_accel.training.shards import IMAGES, VIDEOS
from opensora_accel.training.video import (
    PROBE_THREADS,
    UnreadableVideo,
    Video,
    is_image,
    nothing_usable,
    probe,
    read_clip,
)

logger = logging.getLogger(__name__)

# By how much the sides of a mask and of its clip may stand in another proportion: masks of half the size are rounded.
_SAME_SHAPE = 0.02
# The value of white.
_WHITE = 255


def with_masks(videos: Sequence[Video], config: DataConfig) -> tuple[list[Video], dict[str, str]]:
    """The videos with their masks, and the reason for each that is set aside because of its mask.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it has no mask for any of the videos, or two for one; or none is left.
    """
    if not config.masks:
        return list(videos), {}
    masks = _find(Path(config.masks))
    stems = [PurePosixPath(video.file).with_suffix("").as_posix() for video in videos]
    without = [video.file for video, stem in zip(videos, stems, strict=True) if stem not in masks]
    if len(without) == len(videos):
        raise ValueError(
            f"data.masks {config.masks} has a mask for none of the {len(videos)} files; that of {without[0]} would be "
            f"{os.path.join(config.masks, stems[0])}.png, or a video"
        )
    if without:
        logger.warning(
            "%d of %d files have no mask in %s and are learned whole, %s among them",
            *(len(without), len(videos), config.masks, without[0]),
        )

    def look(pair: tuple[Video, str]) -> Video | str:
        video, stem = pair
        if stem not in masks:
            return video
        try:
            _check(masks[stem], Path(config.root) / video.file)
        except UnreadableVideo as error:
            return str(error)
        return dataclasses.replace(video, mask=os.fspath(masks[stem]))

    with ThreadPoolExecutor(PROBE_THREADS) as pool:
        outcomes = list(pool.map(look, zip(videos, stems, strict=True)))
    set_aside = {
        video.file: outcome
        for video, outcome in zip(videos, outcomes, strict=True)
        if isinstance(outcome, str)
    }
    usable = [outcome for outcome in outcomes if isinstance(outcome, Video)]
    if not usable:
        raise ValueError(nothing_usable(config.root, set_aside))
    return usable, set_aside


def _find(folder: Path) -> dict[str, Path]:
    """The masks of a folder and those below it, by their paths in it without their endings."""
    if not folder.is_dir():
        raise FileNotFoundError(f"data.masks {folder} is no folder; give one with a mask for each file")
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in VIDEOS | set(IMAGES) or not path.is_file():
            continue
        stem = path.relative_to(folder).with_suffix("").as_posix()
        if stem in found:
            raise ValueError(f"data.masks has {found[stem]} and {path} for one file; leave one of them")
        found[stem] = path
    return found


def _check(mask: Path, clip: Path) -> None:
    """Checks by the headers that a mask is one of this clip.

    Raises:
        UnreadableVideo: its sides stand in another proportion, or it is a video of another length.
    """
    masking, masked = probe(mask, upright=True), probe(clip, upright=True)
    if abs(masking.width * masked.height / (masking.height * masked.width) - 1) > _SAME_SHAPE:
        raise UnreadableVideo(
            f"{mask}: is {masking.width} × {masking.height}, and the clip that it masks, {clip}, "
            f"{masked.width} × {masked.height}; make it of the same shape"
        )
    if not is_image(mask) and masking.num_frames != masked.num_frames:
        raise UnreadableVideo(
            f"{mask}: has {masking.num_frames} frames, and the clip that it masks, {clip}, {masked.num_frames}; make "
            "it of as many, or a picture"
        )


def read_mask(
    path: str | None, start: int, num_frames: int, *, stride: int, height: int, width: int
) -> Tensor:
    """The mask of the frames that `read_clip` reads of its clip: uint8 [T, H, W], 255 where it is white.

    Args:
        path: of the mask; None is a clip that is learned whole.

    Raises:
        UnreadableVideo: as `read_clip`.
    """
    if path is None:
        return torch.full((num_frames, height, width), _WHITE, dtype=torch.uint8)
    if is_image(path):
        start, stride, num_read = 0, 1, 1
    else:
        num_read = num_frames
    frames = read_clip(path, start, num_read, stride=stride, height=height, width=width)
    return frames.float().mean(-1).round().to(torch.uint8).expand(num_frames, -1, -1)


def latent_shares(masks: Tensor, latent_frames: LatentFrames, height: int, width: int) -> Tensor:
    """How far each latent is learned: uint8 [B, T, H, W] → 0…1, fp32 [B, t, height, width]."""
    of_frames = functional.adaptive_avg_pool2d(masks.float() / _WHITE, (height, width))
    # [temporal, t]: the frames that each latent frame is made of.
    numbers = latent_frames.numbers(masks.size(1)).to(masks.device)
    return of_frames[:, numbers].mean(1)
