"""Video files in and out: exact clips for training, samples and frame strips to look at.

PyAV decodes and encodes, Pillow resizes and draws. Every way in which a file can be bad (missing, empty,
truncated, damaged, too short) ends in one exception, `UnreadableVideo`, so that the data loader can set the
file aside and go on.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import av
import numpy
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from opensora_accel.training.output import replacing

# Below this start frame decoding from the first frame costs less than reading every packet's time stamp.
_SEEK_FROM_FRAME = 48
_CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,ogg,asf,mxf,gif,ivf,nut,yuv4mpegpipe"
"""FFmpeg's names of the formats that are read; mov is mp4 too, matroska webm. Playlists (HLS, DASH, concat), image
patterns and devices are not among them: they open other files and addresses, wherever these lie."""
_OPTIONS = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "file", "enable_drefs": "0"}
_STRIP_MARGIN = 6
_STRIP_FONT_SIZE = 15


class UnreadableVideo(ValueError):
    """A video file that cannot give the frames asked of it; the message names the file and the reason."""


@dataclass(frozen=True)
class VideoInfo:
    """What the header of a video file says; the size is that of the picture as stored, before rotation."""

    num_frames: int
    height: int
    width: int
    fps: float


@dataclass(frozen=True)
class _PacketTable:
    """When each frame of a file is shown, sorted, and where decoding can start."""

    times: tuple[int, ...]  # presentation time stamps, one per frame
    keyframes: tuple[int, ...]  # those of the frames where decoding can start


def probe(path: str | os.PathLike[str]) -> VideoInfo:
    """Frame count, size and rate of the first video stream of `path`.

    Reads the header only where the container counts its frames (mp4, mov, avi); otherwise counts packets
    (mkv, webm), and decodes the file where the packets carry no time stamps.

    Raises: UnreadableVideo if there is no readable video stream, no frame, or the file ends before the
    last frame that its header promises.
    """
    with _open(path) as (container, stream):
        num_frames = _count_in_header(path, stream) or len(_packet_table(*_identity(path)).times)
        if not num_frames:
            num_frames = sum(1 for _ in container.decode(stream))
        if not num_frames:
            raise UnreadableVideo(f"{path}: holds no video frame")
        rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        return VideoInfo(num_frames, stream.codec_context.height, stream.codec_context.width, float(rate))


def read_clip(
    path: str | os.PathLike[str], start: int, num_frames: int, *, stride: int = 1, height: int, width: int
) -> Tensor:
    """Frames `start, start + stride, ...` of `path`, upright, resized and centre-cropped: uint8 [T, H, W, 3].

    Frame numbers count the frames of a full decode. The largest centred region with the aspect ratio of
    `height x width` is resized with an antialiased bilinear filter. Far into a file, decoding starts at
    the last keyframe before `start`; if what it delivers is not what the packets' time stamps promise, the
    file is decoded from its beginning instead, so the result is the same frame for frame.

    Raises: UnreadableVideo for a missing, damaged, truncated or too short file (flipped bits that still
    decode, or that no frame asked for depends on, go unnoticed); ValueError for a negative start or a size
    below 1.
    """
    if start < 0 or min(num_frames, stride, height, width) < 1:
        raise ValueError(
            f"start must be 0 or more and num_frames, stride, height and width 1 or more; got start={start}, "
            f"num_frames={num_frames}, stride={stride}, height={height}, width={width}"
        )
    wanted = range(start, start + num_frames * stride, stride)
    pictures = None
    if start >= _SEEK_FROM_FRAME:
        pictures = _decode_after_seek(path, wanted, height, width)
    if pictures is None:
        pictures = _decode_from_start(path, wanted, height, width)
    return torch.from_numpy(numpy.stack(pictures))


def write_video(path: str | os.PathLike[str], frames: Tensor, fps: float) -> None:
    """Writes `frames` (uint8 [T, H, W, 3]) to `path` as mp4: H.264 if this build of PyAV has it, else MPEG-4.

    yuv420p stores colour at half the size, so an odd height or width gets its last row or column repeated
    once. The file appears under its name only when it is complete.

    Raises: ValueError for another dtype or shape, no frames, or a rate that is not positive.
    """
    _check_frames(frames)
    if not fps > 0:
        raise ValueError(f"fps must be positive, got {fps}")
    array = frames.detach().cpu().numpy()
    _, height, width, _ = array.shape
    array = numpy.pad(array, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    codec, options = "mpeg4", {"qscale": "3"}
    if "libx264" in av.codecs_available:
        codec, options = "libx264", {"crf": "16", "preset": "veryfast"}
    with replacing(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream: Any = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width, stream.pix_fmt = array.shape[1], array.shape[2], "yuv420p"
        for picture in array:
            picture = numpy.ascontiguousarray(picture)
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

    Raises: ValueError if there is no row, or for frames of another dtype or shape.
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


@contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream; every decoding error inside becomes UnreadableVideo."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for without end
            raise UnreadableVideo(f"{path}: is no regular file")
        with _container(path) as container:
            if not container.streams.video:
                raise UnreadableVideo(f"{path}: holds no video stream")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise UnreadableVideo(f"{path}: this build of PyAV has no decoder for its codec")
            # One thread: the parallelism is that of the loader's workers. Not err_detect "explode": it found
            # no more than `_intact` in 400 damaged files, and cannot start at an open group of pictures.
            stream.codec_context.thread_count = 1
            yield container, stream
    except UnreadableVideo:
        raise
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise UnreadableVideo(f"{path}: cannot be decoded ({type(error).__name__}: {error})") from error


def _container(path: str | os.PathLike[str]) -> Any:
    try:
        # Absolute: what stands before a colon would be taken for a protocol.
        return av.open(os.path.abspath(path), options=_OPTIONS)
    except av.error.ArgumentError as error:
        raise UnreadableVideo(
            f"{path}: is no video container that is read here ({_CONTAINERS}; mov is mp4 too)"
        ) from error


def _count_in_header(path: str | os.PathLike[str], stream: Any) -> int:
    """The number of frames that the header promises, 0 if it gives none."""
    entries = list(stream.index_entries)
    if not stream.frames or len(entries) != stream.frames:
        return stream.frames
    size_bytes = os.path.getsize(path)
    end_bytes = max(entry.pos + entry.size for entry in entries)
    if end_bytes > size_bytes:
        raise UnreadableVideo(
            f"{path}: truncated: its header promises {stream.frames} frames in {end_bytes} bytes, "
            f"the file has {size_bytes}"
        )
    # Frames that an edit list cuts away are counted by the header but never shown.
    return sum(not entry.is_discard for entry in entries)


def _identity(path: str | os.PathLike[str]) -> tuple[str, int, int]:
    """Path, size and time of change: what a cached table of packets is valid for."""
    status = os.stat(path)
    return os.fspath(path), status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _packet_table(path: str, size_bytes: int, changed_ns: int) -> _PacketTable:
    """Time stamps of all packets, read without decoding; empty if some are missing or repeated."""
    times, keyframes = [], []
    with _open(path) as (container, stream):
        for packet in container.demux(stream):
            if packet.size == 0 or packet.is_discard:
                continue
            if packet.pts is None:
                return _PacketTable((), ())
            times.append(packet.pts)
            if packet.is_keyframe:
                keyframes.append(packet.pts)
    if len(set(times)) != len(times):
        return _PacketTable((), ())
    return _PacketTable(tuple(sorted(times)), tuple(sorted(keyframes)))


def _decode_after_seek(
    path: str | os.PathLike[str], wanted: range, height: int, width: int
) -> list[numpy.ndarray] | None:
    """The wanted pictures, decoded from a keyframe; None where only a full decode can tell which they are."""
    try:
        table = _packet_table(*_identity(path))
        if not table.keyframes or table.keyframes[0] != table.times[0] or wanted[-1] >= len(table.times):
            return None
        keyframe = max(time for time in table.keyframes if time <= table.times[wanted[0]])
        picked = []
        with _open(path) as (container, stream):
            container.seek(keyframe, stream=stream, backward=True)
            frames = map(_intact, container.decode(stream))
            for position in range(table.times.index(keyframe), wanted[-1] + 1):
                frame = next(frames, None)
                if frame is None or frame.pts != table.times[position]:
                    # Not the keyframe, or one packet more or fewer than frames: time stamps do not number the
                    # frames of this file. That is noticed from the keyframe to the clip, not earlier.
                    return None
                if position in wanted:
                    picked.append(_fit(frame, height, width))
        return picked
    except (OSError, UnreadableVideo):
        return None  # the full decode says what is wrong, or that nothing is


def _decode_from_start(
    path: str | os.PathLike[str], wanted: range, height: int, width: int
) -> list[numpy.ndarray]:
    """The wanted pictures, by counting from the first one."""
    picked, num_decoded = [], 0
    with _open(path) as (container, stream):
        for frame in map(_intact, itertools.islice(container.decode(stream), wanted[-1] + 1)):
            if num_decoded in wanted:
                picked.append(_fit(frame, height, width))
            num_decoded += 1
    if len(picked) < len(wanted):
        raise UnreadableVideo(
            f"{path}: too short: {len(wanted)} frames from {wanted.start} in steps of {wanted.step} need "
            f"{wanted[-1] + 1} frames, it has {num_decoded}"
        )
    return picked


def _intact(frame: Any) -> Any:
    """The frame itself, unless the decoder had to invent parts of it, for others may build on them."""
    if frame.is_corrupt:
        raise ValueError(f"the frame shown at time stamp {frame.pts} is damaged")
    return frame


def _fit(frame: Any, height: int, width: int) -> numpy.ndarray:
    """A decoded frame as uint8 [height, width, 3]: upright, covering, cropped at the centre."""
    picture = frame.to_ndarray(format="rgb24")
    if frame.rotation % 90 == 0 and frame.rotation:  # phones film sideways and say so
        picture = numpy.ascontiguousarray(numpy.rot90(picture, k=int(frame.rotation) // 90))
    source_height, source_width, _ = picture.shape
    if (source_height, source_width) == (height, width):
        return picture
    shrink = min(source_height / height, source_width / width)  # source pixels per target pixel
    box_height, box_width = height * shrink, width * shrink
    left, top = (source_width - box_width) / 2, (source_height - box_height) / 2
    box = (left, top, min(left + box_width, source_width), min(top + box_height, source_height))
    resized = Image.fromarray(picture).resize((width, height), Image.Resampling.BILINEAR, box=box)
    return numpy.asarray(resized)


def _check_frames(frames: Tensor) -> None:
    if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[3] != 3 or frames.shape[0] < 1:
        raise ValueError(
            f"frames must be uint8 [T, H, W, 3], T 1 or more, got {frames.dtype} {list(frames.shape)}; "
            "scale to 0..255, move channels last and call .to(torch.uint8)"
        )


def _tiles(frames: Tensor, max_frames: int, tile_width: int) -> list[Image.Image]:
    """Evenly spaced frames of a clip, each `tile_width` wide."""
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
