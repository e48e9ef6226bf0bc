"""Clips sampled from what was learned, beside the clips it was learned from, as mp4 and as a strip of frames."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from opensora_accel.files import replacing
from opensora_accel.training.config import FlowConfig
from opensora_accel.training.encoders import Codec, LatentShape
from opensora_accel.training.flow import generator, sample

_LEAST_HEIGHT = 240
_STRIP_MARGIN = 6
_STRIP_FONT_SIZE = 15

# (x_t, timestep, captions) -> velocity.
Predict = Callable[[Tensor, Tensor, Sequence[str]], Tensor]


def sample_clips(
    predict: Predict,
    captions: Mapping[int, str],
    shape: LatentShape,
    codec: Codec,
    config: FlowConfig,
    alpha: float,
    like: Tensor,
    seed: int,
) -> Tensor:
    """One clip per caption, uint8 [N, T, H, W, 3]; every rank has to call, and gets the same.

    Args:
        predict: gives the velocity [N, C, t, h, w] for latents of that shape, timesteps [N] and N captions.
        captions: each under the number that its noise is drawn by.
        shape: [C, t, h, w] of the latents of one clip.
        like: a tensor of the dtype and on the device that latents have.
    """
    # From the caption's number and the seed: the same noise at every step of the training, to see it learn.
    noise = torch.stack(
        [torch.randn(shape, generator=generator(seed, "sample", number)) for number in captions]
    ).to(like)
    texts = list(captions.values())

    def guided(latents: Tensor, timestep: Tensor) -> Tensor:
        """latents [N, C, t, h, w] and timestep [N] → the velocity [N, C, t, h, w]."""
        velocity = predict(latents, timestep, texts)
        # At 1 the unconditional part cancels, and half of the model's calls are saved.
        if config.guidance == 1.0:
            return velocity
        unconditional = predict(latents, timestep, [""] * len(texts))
        return unconditional + config.guidance * (velocity - unconditional)

    return codec.decode(sample(guided, noise, config.sample_steps, alpha))


def write_comparison(
    folder: Path,
    sources: Sequence[Tensor],
    sampled: Sequence[Tensor],
    captions: Sequence[str],
    fps: Sequence[float],
) -> Path:
    """Writes one mp4 per clip, the source on the left and the sample on the right, and strip.png of them all.

    Args:
        sources, sampled: a clip uint8 [T, H, W, 3] for each caption.
        fps: frames a second of each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index, (source, clip, rate) in enumerate(zip(sources, sampled, fps, strict=True), start=1):
        pair = torch.cat([source, clip], dim=2)
        # Whole pixels are repeated until the picture is large enough to look at.
        factor = max(1, _LEAST_HEIGHT // pair.size(1))
        pair = pair.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
        write_video(folder / f"clip_{index}.mp4", pair, rate)
        rows += [(f"source {index}", source), (f"sampled {index}", clip)]
    (folder / "captions.txt").write_text("".join(f"{c}\n" for c in captions), encoding="utf-8")
    strip = folder / "strip.png"
    write_strip(strip, rows)
    return strip


def write_video(path: str | os.PathLike[str], frames: Tensor, fps: float) -> None:
    """Writes `frames` (uint8 [T, H, W, 3]) to `path` as mp4: H.264 if this build of PyAV has it, else MPEG-4.

    yuv420p stores colour at half the size, so an odd height or width gets its last row or column repeated
    once. The file appears under its name only when it is complete.

    Raises:
        ValueError: another dtype or shape, no frames, or a rate that is not positive.
    """
    _check_frames(frames)
    if not fps > 0:
        raise ValueError(f"fps must be positive, got {fps}")
    array = frames.detach().cpu().numpy()
    _, height, width, _ = array.shape
    # In yuv420p one colour covers two by two pixels, so that encoders take even sizes only.
    array = numpy.pad(array, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    codec, options = "mpeg4", {"qscale": "3"}
    if "libx264" in av.codecs_available:
        codec, options = "libx264", {"crf": "16", "preset": "veryfast"}
    with replacing(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        # Containers hold a rate as a fraction of small numbers: 23.976 is 24000/1001.
        rate = Fraction(fps).limit_denominator(1001)
        stream: Any = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width, stream.pix_fmt = array.shape[1], array.shape[2], "yuv420p"
        for picture in array:
            picture = numpy.ascontiguousarray(picture)  # as PyAV reads it
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def write_strip(
    path: str | os.PathLike[str],
    rows: Sequence[tuple[str, Tensor]],
    *,
    max_frames: int = 8,
    tile_width: int = 192,
) -> None:
    """Writes a PNG with one labelled row of frames per clip, to compare clips at a glance.

    Args: rows: (label, frames uint8 [T, H, W, 3]); up to `max_frames` frames, evenly spaced with the first
    and the last, are drawn, each scaled to `tile_width` pixels. A label too long for its row ends in "...".

    Raises:
        ValueError: there is no row, or frames have another dtype or shape.
    """
    if not rows or max_frames < 1 or tile_width < 1:
        raise ValueError(
            "a strip needs at least one row, one frame and one pixel; got "
            f"{len(rows)} rows, max_frames={max_frames}, tile_width={tile_width}"
        )
    tiles = [_tiles(frames, max_frames, tile_width) for _, frames in rows]
    margin, label_height = _STRIP_MARGIN, _STRIP_FONT_SIZE + _STRIP_MARGIN
    sheet_width = max(len(row) for row in tiles) * (tile_width + margin) + margin
    sheet_height = sum(label_height + row[0].height + margin for row in tiles) + margin
    sheet = Image.new("RGB", (sheet_width, sheet_height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_STRIP_FONT_SIZE)
    top = margin
    for (label, _), row in zip(rows, tiles, strict=True):
        draw.text((margin, top), _shorten(label, draw, font, sheet_width - 2 * margin), "black", font)
        for column, tile in enumerate(row):
            sheet.paste(tile, (margin + column * (tile_width + margin), top + label_height))
        top += label_height + row[0].height + margin
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG")


def _check_frames(frames: Tensor) -> None:
    """Raises ValueError unless the frames are uint8 [T, H, W, 3] with T of at least 1."""
    if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[3] != 3 or frames.shape[0] < 1:
        raise ValueError(
            f"frames must be uint8 [T, H, W, 3], T 1 or more, got {frames.dtype} {list(frames.shape)}; "
            "scale to 0..255, move channels last and call .to(torch.uint8)"
        )


def _tiles(frames: Tensor, max_frames: int, tile_width: int) -> list[Image.Image]:
    """Evenly spaced frames of a clip, uint8 [T, H, W, 3], each `tile_width` wide."""
    _check_frames(frames)
    num_frames, height, width, _ = frames.shape
    picks = torch.linspace(0, num_frames - 1, min(num_frames, max_frames)).round().long()
    size = (tile_width, max(1, round(height * tile_width / width)))
    pictures = (Image.fromarray(frames[index].cpu().contiguous().numpy()) for index in picks)
    return [picture.resize(size, Image.Resampling.BICUBIC) for picture in pictures]


def _shorten(label: str, draw: ImageDraw.ImageDraw, font: Any, width: int) -> str:
    """The label on one line, cut to `width` pixels."""
    label = shortened = " ".join(label.split())
    while shortened and draw.textlength(shortened, font=font) > width:
        label = label[:-1]
        shortened = label.rstrip() + "..."
        if not label:
            return ""
    return shortened
