"""What lies beside clips: masks, which say what of a clip is learned, controls, which a model follows, and references.

Masks and controls lie in a folder of their own as the files do in theirs: of clips/a.mp4 `data.masks` has masks/a.png,
or masks/a.mp4, and `data.controls` controls/a.mp4. A file without a mask is learned whole, and one without a control
from text alone.

A mask is a picture, which holds for all frames of its clip, or a video of as many frames. White is learned, black is
not, and grey in part. A latent is learned as far as its pixels are: of one that is made of 4 frames of 8 × 8 pixels,
128 white pixels make it count a half.

A control is a clip of poses, depths or edges, frame by frame: a video of as many frames, and of a picture a picture. It
is read as its clip is, from the same frame on, at the same size.

References are pictures of what a clip shows: of clips/a.mp4 `data.references` has references/a.png, or with
`data.num_references` 2 references/a.0.png and a.1.png. A model takes them in the size of the clip, on white, or each in
its own shape: with a `data.reference_side` of 2048 a picture of 3,000 × 2,000 pixels at 3,072 × 2,048, as sides are
multiples of 32.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opensora_accel.training.codec import LatentFrames
from opensora_accel.training.sections import DataConfig
from opensora_accel.training.shards import IMAGES, VIDEOS
from opensora_accel.training.video import (
    PROBE_THREADS,
    Reference,
    UnreadableVideo,
    Video,
    is_image,
    nothing_usable,
    probe,
    read_clip,
)

logger = logging.getLogger(__name__)

# By how much the sides of two may stand in another proportion: those of half the size are rounded.
_SAME_SHAPE = 0.02
# How much longer than the shorter side the longer one of a reference in its own shape may be.
# Source: diffusers, MiniMaxH3Ref2VASetupStep.
_LONGEST = 4
# The value of white.
_WHITE = 255


@dataclass(frozen=True)
class _Kind:
    """Masks, controls or references, as an option's folder has them."""

    # The option, without data., and the field of a video.
    option: str
    name: str
    # How a file without one is learned.
    without: str
    # The ending that one would have.
    ending: str
    # Whether a picture holds for all frames of a video.
    holds: bool


_MASKS = _Kind("masks", "mask", "learned whole", ".png, or a video", holds=True)
_CONTROLS = _Kind("controls", "control", "learned from text alone", "", holds=False)
_REFERENCES = _Kind("references", "reference", "refused", ".png", holds=False)


def with_masks(videos: Sequence[Video], config: DataConfig) -> tuple[list[Video], dict[str, str]]:
    """The videos with their masks, and the reason for each that is set aside because of its mask.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it has no mask for any of the videos, or two for one; or none is left.
    """
    return _with(_MASKS, videos, config)


def with_controls(videos: Sequence[Video], config: DataConfig) -> tuple[list[Video], dict[str, str]]:
    """The same with their controls."""
    return _with(_CONTROLS, videos, config)


def with_references(
    videos: Sequence[Video], config: DataConfig, unit: int = 1
) -> tuple[list[Video], dict[str, str]]:
    """The videos with their references, and the reason for each that is set aside because one cannot be used.

    Args:
        unit: pixels of which sides are multiples, of references in their own shapes.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: a video has fewer references than `data.num_references`, or more; or none is left.
    """
    if not config.references:
        return list(videos), {}
    found = _find(_REFERENCES, Path(config.references), set(IMAGES))
    own = _references_of(videos, found, config)
    set_aside, usable = dict[str, str](), list[Video]()
    for video in videos:
        try:
            references = tuple(_reference(path, video, config, unit) for path in own[video.file])
        except UnreadableVideo as error:
            set_aside[video.file] = str(error)
        else:
            usable.append(dataclasses.replace(video, references=references))
    if not usable:
        raise ValueError(nothing_usable(config.root, set_aside))
    return usable, set_aside


def _reference(path: Path, video: Video, config: DataConfig, unit: int) -> Reference:
    """One of a video, by its header.

    Raises:
        UnreadableVideo: it is damaged, or too long in its own shape.
    """
    whole = os.path.abspath(path)
    if config.reference_side:
        return Reference(whole, *_own_size(path, config.reference_side, unit), is_on_white=False)
    probe(path)
    return Reference(whole, video.bucket.height, video.bucket.width)


def _own_size(path: Path, side: int, unit: int) -> tuple[int, int]:
    """Height and width of a picture whose shorter side becomes `side`, each a multiple of `unit`.

    Raises:
        UnreadableVideo: it is damaged, or too long.
    """
    info = probe(path, upright=True)
    shorter, longer = sorted((info.height, info.width))
    if longer > _LONGEST * shorter:
        raise UnreadableVideo(
            f"{path}: is {info.width} × {info.height}, and a reference is at most {_LONGEST} times as long as it is "
            "wide; crop it"
        )
    scale = side / shorter
    height, width = (max(unit, round(each * scale / unit) * unit) for each in (info.height, info.width))
    return height, width


def largest_reference(config: DataConfig, unit: int) -> tuple[int, int]:
    """Height and width of the largest picture in `data.references`, in its own shape; headers are read.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: no picture in it can be used.
    """

    def look(path: Path) -> tuple[int, int] | str:
        try:
            return _own_size(path, config.reference_side, unit)
        except UnreadableVideo as error:
            return str(error)

    paths = list(_find(_REFERENCES, Path(config.references), set(IMAGES)).values())
    with ThreadPoolExecutor(PROBE_THREADS) as pool:
        found = list(pool.map(look, paths))
    sizes = [each for each in found if not isinstance(each, str)]
    if not sizes:
        why = f": {found[0]}" if found else ""
        raise ValueError(
            f"data.references {config.references} has no picture that can be used{why}; give one with a reference for "
            "each file"
        )
    return max(sizes, key=lambda size: size[0] * size[1])


def _references_of(
    videos: Sequence[Video], found: Mapping[str, Path], config: DataConfig
) -> dict[str, list[Path]]:
    """Those of each file, in order; `found` are all, by their paths in their folder without endings.

    Raises:
        ValueError: a video has fewer than `data.num_references`, or more.
    """
    stems = {video.file: PurePosixPath(video.file).with_suffix("").as_posix() for video in videos}
    count, others = config.num_references, set(stems.values())
    own, wrong = dict[str, list[Path]](), list[str]()
    for file, stem in stems.items():
        numbered = [f"{stem}.{number}" for number in range(count + 1)]
        # a.0 may be a file of its own.
        names = [each for each in (stem, *numbered) if each in found and (each == stem or each not in others)]
        own[file] = [found[name] for name in names]
        if names != numbered[:count] and not (count == 1 and names == [stem]):
            wrong.append(file)
    if wrong:
        stem = stems[wrong[0]]
        expected = f"{stem}.png" if count == 1 else f"{stem}.0.png to {stem}.{count - 1}.png"
        has = ", ".join(path.name for path in own[wrong[0]]) or "none"
        raise ValueError(
            f"{len(wrong)} of {len(videos)} files do not have {count} in data.references {config.references}, as "
            f"data.num_references says; of {wrong[0]} there is {has}, and would be {expected}: add what is missing, "
            "set data.num_references to what every file has, or leave these files out"
        )
    return own


def _with(kind: _Kind, videos: Sequence[Video], config: DataConfig) -> tuple[list[Video], dict[str, str]]:
    folder = getattr(config, kind.option)
    if not folder:
        return list(videos), {}
    found = _find(kind, Path(folder), VIDEOS | set(IMAGES))
    stems = [PurePosixPath(video.file).with_suffix("").as_posix() for video in videos]
    without = [video.file for video, stem in zip(videos, stems, strict=True) if stem not in found]
    if len(without) == len(videos):
        ending = kind.ending or PurePosixPath(without[0]).suffix
        raise ValueError(
            f"data.{kind.option} {folder} has a {kind.name} for none of the {len(videos)} files; that of {without[0]} "
            f"would be {os.path.join(folder, stems[0])}{ending}"
        )
    if without:
        logger.warning(
            "%d of %d files have no %s in %s and are %s, %s among them",
            *(len(without), len(videos), kind.name, folder, kind.without, without[0]),
        )

    def look(pair: tuple[Video, str]) -> Video | str:
        video, stem = pair
        if stem not in found:
            return video
        try:
            _check(kind, found[stem], Path(config.root) / video.file)
        except UnreadableVideo as error:
            return str(error)
        beside: dict[str, Any] = {kind.name: os.path.abspath(found[stem])}
        return dataclasses.replace(video, **beside)

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


def _find(kind: _Kind, folder: Path, endings: Collection[str]) -> dict[str, Path]:
    """The files of a kind in a folder and those below it, by their paths in it without their endings."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"data.{kind.option} {folder} is no folder; give one with a {kind.name} for each file"
        )
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in endings or not path.is_file():
            continue
        stem = path.relative_to(folder).with_suffix("").as_posix()
        if stem in found:
            raise ValueError(
                f"data.{kind.option} has {found[stem]} and {path} for one file; leave one of them"
            )
        found[stem] = path
    return found


def _check(kind: _Kind, beside: Path, clip: Path) -> None:
    """Checks by the headers that a mask or a control is one of this clip.

    Raises:
        UnreadableVideo: its sides stand in another proportion, or it is a video of another length.
    """
    its, clips = probe(beside, upright=True), probe(clip, upright=True)
    of_clip = f"the clip of this {kind.name}, {clip},"
    if abs(its.width * clips.height / (its.height * clips.width) - 1) > _SAME_SHAPE:
        raise UnreadableVideo(
            f"{beside}: is {its.width} × {its.height}, and {of_clip} {clips.width} × {clips.height}; make it of the "
            "same shape"
        )
    if not (kind.holds and is_image(beside)) and its.num_frames != clips.num_frames:
        raise UnreadableVideo(
            f"{beside}: has {its.num_frames} frames, and {of_clip} {clips.num_frames}; make it of as many"
            + (", or a picture" if kind.holds else "")
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
