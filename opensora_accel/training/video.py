"""Video files and images: which of them can be trained on, and exact clips of them.

PyAV decodes videos, Pillow images, and Pillow resizes. Every way in which a file can be bad (missing, empty, truncated,
damaged, too short) ends in one exception, `UnreadableVideo`, so that the data loader can set the file aside and go on.
"""

from __future__ import annotations

import itertools
import logging
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy
import torch
from av.video.reformatter import VideoReformatter
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from torch.nn import functional

from opensora_accel.training.buckets import Bucket, bucket_of, cropped_share
from opensora_accel.training.entries import Entry
from opensora_accel.training.sections import DataConfig
from opensora_accel.training.shards import IMAGES, open_file, place_of, size_of, status_of

logger = logging.getLogger(__name__)

# A file that loses more of its picture to its bucket is named in a warning.
_MUCH_CROPPED = 0.25
# Below this start frame decoding from the first frame costs less than reading every packet's time stamp.
_SEEK_FROM_FRAME = 48
# FFmpeg's names of the formats that are read; mov is mp4 too, matroska webm. Playlists (HLS, DASH, concat), image
# patterns and devices are not among them: they open other files and addresses, wherever these lie.
_CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,ogg,asf,mxf,gif,ivf,nut,yuv4mpegpipe"
_OPTIONS = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "file", "enable_drefs": "0"}


# A side of a reference is brought to a multiple of so many pixels before it is made to fit.
_PICTURE_UNIT = 8
# A picture, and when it is shown.
_Shown = tuple[numpy.ndarray, Fraction | None]


class UnreadableVideo(ValueError):
    """A video file that cannot give the frames asked of it; the message names the file and the reason."""


@dataclass(frozen=True)
class VideoInfo:
    """What the header of a file says; the size is that of the picture as stored, or upright where that was asked."""

    num_frames: int
    height: int
    width: int
    fps: float
    has_sound: bool = False


@dataclass(frozen=True)
class _PacketTable:
    """When each frame of a file is shown, sorted, and where decoding can start."""

    times: tuple[int, ...]  # presentation time stamps, one per frame
    keyframes: tuple[int, ...]  # those of the frames where decoding can start


def probe(path: str | os.PathLike[str], *, upright: bool = False) -> VideoInfo:
    """Frame count, size and rate of the first video stream of `path`; an image is one frame, one a second.

    Args:
        upright: height and width as the clips will have them. That costs decoding the first frame, which says whether
            a phone filmed sideways.

    Reads the header only where the container counts its frames (mp4, mov, avi); otherwise counts packets
    (mkv, webm), and decodes the file where the packets carry no time stamps.

    Raises:
        UnreadableVideo: there is no readable video stream, no frame, or the file ends before the last frame that its
            header promises.
    """
    if is_image(path):
        with _open_image(path) as image:
            size = image.size
            # The half of EXIF's eight orientations in which width and height change places.
            width, height = reversed(size) if image.getexif().get(ExifTags.Base.Orientation, 1) > 4 else size
            return VideoInfo(1, height, width, 1.0)
    with open_video(path) as (container, stream):
        num_frames = _count_in_header(path, stream) or len(_packet_table(*_identity(path)).times)
        if not num_frames:
            num_frames = sum(1 for _ in container.decode(stream))
        if not num_frames:
            raise UnreadableVideo(f"{path}: holds no video frame")
        rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        height, width = stream.codec_context.height, stream.codec_context.width
        has_sound = bool(container.streams.audio)
    if upright:
        with open_video(path) as (container, stream):
            first = next(container.decode(stream), None)
            if first is not None and first.rotation % 180 == 90:
                height, width = width, height
    return VideoInfo(num_frames, height, width, float(rate), has_sound)


def read_clip(
    path: str | os.PathLike[str], start: int, num_frames: int, *, stride: int = 1, height: int, width: int
) -> Tensor:
    """The frames of `read_timed_clip`, uint8 [T, H, W, 3]."""
    return read_timed_clip(path, start, num_frames, stride=stride, height=height, width=width)[0]


def read_timed_clip(
    path: str | os.PathLike[str], start: int, num_frames: int, *, stride: int = 1, height: int, width: int
) -> tuple[Tensor, tuple[Fraction, Fraction] | None]:
    """Frames `start, start + stride, ...` of `path`, upright, resized and centre-cropped: uint8 [T, H, W, 3].

    And when the first and the last of them are shown, in seconds of the file's time, where it says so.

    Frame numbers count the frames of a full decode. The largest centred region with the aspect ratio of
    `height x width` is resized with an antialiased bilinear filter. Far into a file, decoding starts at
    the last keyframe before `start`; if what it delivers is not what the packets' time stamps promise, the
    file is decoded from its beginning instead, so the result is the same frame for frame.

    Raises:
        UnreadableVideo: the file is missing, damaged, truncated or too short (flipped bits that still decode, or that
            no frame asked for depends on, go unnoticed).
        ValueError: a negative start, or a size below 1.
    """
    if start < 0 or min(num_frames, stride, height, width) < 1:
        raise ValueError(
            f"start must be 0 or more and num_frames, stride, height and width 1 or more; got start={start}, "
            f"num_frames={num_frames}, stride={stride}, height={height}, width={width}"
        )
    wanted = range(start, start + num_frames * stride, stride)
    if is_image(path):
        if wanted[-1]:
            raise UnreadableVideo(f"{path}: an image is one frame, and frame {wanted[-1]} was asked for")
        with _open_image(path) as image:
            picture = numpy.array(ImageOps.exif_transpose(image).convert("RGB"))
        return torch.from_numpy(_cover(picture, height, width).copy()).unsqueeze(0), None
    found = None
    if start >= _SEEK_FROM_FRAME:
        found = _decode_after_seek(path, wanted, height, width)
    if found is None:
        found = _decode_from_start(path, wanted, height, width)
    pictures, times = zip(*found, strict=True)
    first, last = times[0], times[-1]
    shown = None if first is None or last is None else (first, last)
    return torch.from_numpy(numpy.stack(pictures)), shown


def read_whole_picture(path: str | os.PathLike[str], height: int, width: int) -> Tensor:
    """A picture, upright, as large as fits, in the middle of white: uint8 [height, width, 3].

    Sizes and filters are those of WanVACEPipeline. What can be seen through is white.

    Raises:
        UnreadableVideo: the file is missing or damaged.
    """
    picture = _upright_on_white(path)
    unit = _PICTURE_UNIT
    picture = picture.resize(
        (max(unit, picture.width // unit * unit), max(unit, picture.height // unit * unit)),
        Image.Resampling.LANCZOS,
    )
    scale = min(height / picture.height, width / picture.width)
    size = max(1, int(picture.height * scale)), max(1, int(picture.width * scale))
    pixels = torch.from_numpy(numpy.array(picture)).float().permute(2, 0, 1)
    fitted = functional.interpolate(pixels[None], size, mode="bilinear", align_corners=False)[0]
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    canvas = torch.full((height, width, 3), 255, dtype=torch.uint8)
    canvas[top : top + size[0], left : left + size[1]] = fitted.round().to(torch.uint8).permute(1, 2, 0)
    return canvas


def read_stretched_picture(path: str | os.PathLike[str], height: int, width: int) -> Tensor:
    """A picture, upright, stretched to this size: uint8 [height, width, 3].

    The filter is that of MiniMax H3's pipeline. What can be seen through is white.

    Raises:
        UnreadableVideo: the file is missing or damaged.
    """
    picture = _upright_on_white(path)
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(numpy.array(picture))


def _upright_on_white(path: str | os.PathLike[str]) -> Image.Image:
    """Of red, green and blue."""
    with _open_image(path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright).convert("RGB")


def is_image(path: str | os.PathLike[str]) -> bool:
    # A file that ends so is one frame; by Pillow, because FFmpeg has no end of image formats.
    return Path(path).suffix.lower() in IMAGES


@contextmanager
def _open_image(path: str | os.PathLike[str]) -> Iterator[Image.Image]:
    """The image, not yet decoded; every error of decoding inside becomes UnreadableVideo."""
    try:
        with open_file(path) as file, Image.open(file, formats=sorted(set(IMAGES.values()))) as image:
            # Pillow itself only warns of pictures that would fill the memory, up to twice that size. Its warning is not
            # made an error here: filters of warnings are not a thread's own, and headers are read by several.
            num_pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
            if most is not None and num_pixels > most:
                raise Image.DecompressionBombError(f"{num_pixels:,} pixels, and {most:,} are the most")
            yield image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UnreadableVideo(f"{path}: cannot be decoded ({type(error).__name__}: {error})") from error


@contextmanager
def open_video(path: str | os.PathLike[str]) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream; every decoding error inside becomes UnreadableVideo."""
    try:
        if not stat.S_ISREG(status_of(path).st_mode):  # a pipe would be waited for without end
            raise UnreadableVideo(f"{path}: is no regular file")
        with ExitStack() as undo:
            try:
                # Absolute: what stands before a colon would be taken for a protocol.
                whole = place_of(path) is None
                opened = os.path.abspath(path) if whole else undo.enter_context(open_file(path))
                container = undo.enter_context(av.open(opened, options=_OPTIONS))
            except av.error.ArgumentError as error:
                raise UnreadableVideo(
                    f"{path}: is no video container that is read here ({_CONTAINERS}; mov is mp4 too)"
                ) from error
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


def _count_in_header(path: str | os.PathLike[str], stream: Any) -> int:
    """The number of frames that the header promises, 0 if it gives none."""
    entries = list(stream.index_entries)
    if not stream.frames or len(entries) != stream.frames:
        return stream.frames
    size_bytes = size_of(path)
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
    status = status_of(path)
    return os.fspath(path), status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _packet_table(path: str, size_bytes: int, changed_ns: int) -> _PacketTable:
    """Time stamps of all packets, read without decoding; empty if some are missing or repeated."""
    times, keyframes = [], []
    with open_video(path) as (container, stream):
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
) -> list[_Shown] | None:
    """The wanted pictures, decoded from a keyframe; None where only a full decode can find them."""
    try:
        table = _packet_table(*_identity(path))
        if not table.keyframes or table.keyframes[0] != table.times[0] or wanted[-1] >= len(table.times):
            return None
        keyframe = max(time for time in table.keyframes if time <= table.times[wanted[0]])
        picked = []
        with open_video(path) as (container, stream):
            container.seek(keyframe, stream=stream, backward=True)
            frames = map(_intact, container.decode(stream))
            for position in range(table.times.index(keyframe), wanted[-1] + 1):
                frame = next(frames, None)
                if frame is None or frame.pts != table.times[position]:
                    # Not the keyframe, or one packet more or fewer than frames: time stamps do not number the
                    # frames of this file. That is noticed from the keyframe to the clip, not earlier.
                    return None
                if position in wanted:
                    picked.append((_fit(frame, height, width), _time_of(frame)))
        return picked
    except (OSError, UnreadableVideo):
        return None  # the full decode says what is wrong, or that nothing is


def _decode_from_start(path: str | os.PathLike[str], wanted: range, height: int, width: int) -> list[_Shown]:
    """The wanted pictures, by counting from the first one."""
    picked, num_decoded = [], 0
    with open_video(path) as (container, stream):
        for frame in map(_intact, itertools.islice(container.decode(stream), wanted[-1] + 1)):
            if num_decoded in wanted:
                picked.append((_fit(frame, height, width), _time_of(frame)))
            num_decoded += 1
    if len(picked) < len(wanted):
        raise UnreadableVideo(
            f"{path}: too short: {len(wanted)} frames from {wanted.start} in steps of {wanted.step} need "
            f"{wanted[-1] + 1} frames, it has {num_decoded}"
        )
    return picked


def _time_of(frame: Any) -> Fraction | None:
    """When a frame is shown, in seconds."""
    return None if frame.pts is None else Fraction(frame.pts * frame.time_base)


def _intact(frame: Any) -> Any:
    """The frame itself, unless the decoder had to invent parts of it, for others may build on them."""
    if frame.is_corrupt:
        raise ValueError(f"the frame shown at time stamp {frame.pts} is damaged")
    return frame


def _fit(frame: Any, height: int, width: int) -> numpy.ndarray:
    """A decoded frame as uint8 [height, width, 3], upright."""
    # By a converter of its own, without threads: PyAV 19 keeps one for all frames, and a worker that is forked would
    # wait for threads that it has not got.
    picture: numpy.ndarray = VideoReformatter().reformat(frame, format="rgb24", threads=1).to_ndarray()
    if frame.rotation % 90 == 0 and frame.rotation:  # phones film sideways and say so
        picture = numpy.ascontiguousarray(numpy.rot90(picture, k=int(frame.rotation) // 90))
    return _cover(picture, height, width)


def _cover(picture: numpy.ndarray, height: int, width: int) -> numpy.ndarray:
    """uint8 [h, w, 3] → [height, width, 3]: scaled to cover that, and cropped at the centre."""
    source_height, source_width, _ = picture.shape
    if (source_height, source_width) == (height, width):
        return picture
    shrink = min(source_height / height, source_width / width)  # source pixels per target pixel
    box_height, box_width = height * shrink, width * shrink
    left, top = (source_width - box_width) / 2, (source_height - box_height) / 2
    box = (left, top, min(left + box_width, source_width), min(top + box_height, source_height))
    resized = Image.fromarray(picture).resize((width, height), Image.Resampling.BILINEAR, box=box)
    return numpy.asarray(resized)


# The videos of a folder

_PROGRESS_FROM_FILES = 200
PROBE_THREADS = 8  # opening files waits on storage more than on the processor


class Reference(NamedTuple):
    """A picture of what a video shows, and the size that a model takes it at."""

    # The whole path.
    path: str
    height: int
    width: int
    # Fitted into that size, on white; else stretched to it, by less than a unit of the model.
    is_on_white: bool = True


@dataclass(frozen=True)
class Video:
    """An entry whose file has been looked at."""

    file: str
    caption: str
    # None if the file could not be used.
    info: VideoInfo | None
    bucket: Bucket
    # The path of the mask that says what of it is learned; None is all.
    mask: str | None = None
    # The whole path of the control that it follows.
    control: str | None = None
    # In the order in which they are numbered.
    references: tuple[Reference, ...] = ()


def index_videos(
    entries: Sequence[Entry], folder: str | os.PathLike[str], config: DataConfig
) -> tuple[list[Video], dict[str, str]]:
    """The usable videos, in order, and the reason for each file that is set aside.

    A file is set aside if its header cannot be read or it is shorter than every clip.

    Raises:
        ValueError: no video is left; the message has the first five reasons.
    """

    shortest = min(config.sizes, key=lambda bucket: bucket.num_frames)

    def look(entry: Entry) -> Video | str:
        try:
            # What is upright decides between buckets, and where there is one nothing.
            info = probe(Path(folder) / entry.file, upright=bool(config.buckets))
        except UnreadableVideo as error:
            return str(error)
        bucket = bucket_of(info.num_frames, info.height, info.width, config.sizes, config.frame_stride)
        if bucket is None:
            return (
                f"{entry.file}: too short: has {info.num_frames} frames, a clip of {shortest.num_frames} "
                f"frames in steps of {config.frame_stride} needs {shortest.frames_needed(config.frame_stride)}"
            )
        return Video(entry.file, entry.caption, info, bucket)

    usable: list[Video] = []
    quarantined: dict[str, str] = {}
    with ThreadPoolExecutor(PROBE_THREADS) as pool:
        outcomes: Iterable[Video | str] = pool.map(look, entries)
        # A person would otherwise wait in front of nothing; a log has no use for a bar.
        if len(entries) > _PROGRESS_FROM_FILES and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import track

            bar = Console(stderr=True)
            outcomes = track(outcomes, "reading video headers", total=len(entries), console=bar)
        for entry, outcome in zip(entries, outcomes, strict=True):
            if isinstance(outcome, Video):
                usable.append(outcome)
            else:
                quarantined[entry.file] = outcome
    if not usable:
        raise ValueError(nothing_usable(folder, quarantined))
    if config.buckets:
        _warn_of_cropped(usable)
    return usable, quarantined


def _warn_of_cropped(videos: Sequence[Video]) -> None:
    """Warns of buckets that cut off much of some files: who names aspect ratios does so to keep the pictures whole."""
    worst: dict[Bucket, tuple[float, str]] = {}
    counts = Counter[Bucket]()
    for video in videos:
        assert video.info is not None
        cropped = cropped_share(video.bucket, video.info.height, video.info.width)
        if cropped > _MUCH_CROPPED:
            counts[video.bucket] += 1
            worst[video.bucket] = max(worst.get(video.bucket, (0.0, "")), (cropped, video.file))
    for bucket, (cropped, file) in worst.items():
        logger.warning(
            "%d of %d files lose more than %.0f %% of their picture in the bucket %s, %s the most, %.0f %%; add a "
            "bucket of their aspect ratio, and of no more frames than they have, or leave these files out",
            *(counts[bucket], len(videos), 100 * _MUCH_CROPPED, bucket, file, 100 * cropped),
        )


def nothing_usable(folder: str | os.PathLike[str], quarantined: Mapping[str, str]) -> str:
    reasons = "\n  ".join(list(quarantined.values())[:5])
    return (
        f"none of the {len(quarantined)} videos in {os.fspath(folder)} can be used; the first reasons:\n"
        f"  {reasons}\n"
        "Repair or replace the files, or lower --data.num_frames (or add --data.buckets of fewer frames) or "
        "--data.frame_stride if they are too short"
    )
