"""Clips of files: which frames of a file one has, and how they are read, with what lies beside them.

A sample is asked for by its position in the job and the number of its file, and its first frame follows from the seed
and that position: at position 7 of a file of 30 frames, a clip of 9 begins with one of the frames 0 … 21, and with the
same one in every run of that seed. The mask and the control are read from that frame on too, and the sound from the
moment that it is shown at; references are whole pictures. A file that cannot be read gives a sample that says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from opensora_accel.files import retried
from opensora_accel.training.beside import read_mask
from opensora_accel.training.buckets import Bucket
from opensora_accel.training.disk_cache import file_digest
from opensora_accel.training.flow import generator
from opensora_accel.training.sampler import Key
from opensora_accel.training.sections import DataConfig
from opensora_accel.training.sound import SoundShape
from opensora_accel.training.soundtrack import read_sound
from opensora_accel.training.video import (
    UnreadableVideo,
    Video,
    read_clip,
    read_stretched_picture,
    read_timed_clip,
    read_whole_picture,
)

# A clip of 5 seconds at a rate that differs by more ends 50 ms away from its sound, which is noticed. Time stamps are
# rounded, too.
_SAME_RATE, _SAME_MOMENT_S = 0.01, 0.01


@dataclass(frozen=True)
class Clip:
    """Which frames of a file a sample has, and the SHA-256 sum of the file that they were read from.

    The sum is None where nobody asked for it, or where the file changed while it was read. `control` says the same of
    the control that the sample follows, and `references` of its references, which are whole pictures.
    """

    file: str
    start: int
    bucket: Bucket
    digest: str | None = field(default=None, compare=False)
    control: Clip | None = field(default=None, compare=False)
    references: tuple[Clip, ...] = field(default=(), compare=False)
    is_reference: bool = False


class Digests(NamedTuple):
    """Sums of a sample's file, and of those beside it; None as in `Clip`."""

    file: str | None = None
    control: str | None = None
    references: Sequence[str | None] = ()


NO_DIGESTS = Digests()


@dataclass(frozen=True)
class Sample:
    """One clip: `frames` uint8 [T, H, W, 3], or None with the reason in `error`."""

    position: int
    video_index: int
    file: str
    caption: str
    frames: Tensor | None = None
    error: str | None = None
    digests: Digests = NO_DIGESTS
    # [channels, samples], where it was asked for and the file has sound that fits.
    sound: Tensor | None = None
    # uint8 [T, H, W], where the run has masks.
    mask: Tensor | None = None
    # uint8 [T, H, W, 3], where the file has a control.
    control: Tensor | None = None
    # uint8 [H, W, 3] of each, where the run has references.
    references: Sequence[Tensor] | None = None


@dataclass(frozen=True)
class Batch:
    """This data rank's share of a global batch: `frames` uint8 [b, T, H, W, 3] of one bucket.

    With sound, `sounds` are the samples [channels, n] of each clip, or None where it has none; where the run has masks,
    `masks` are those of the frames, uint8 [b, T, H, W]; where it has controls, `controls` are those of the clips that
    have one, uint8 [b, T, H, W, 3]; where it has references, `references` are those of each clip, uint8 [H, W, 3] each.
    """

    frames: Tensor
    captions: list[str]
    positions: list[int]
    files: list[str]
    clips: list[Clip]
    sounds: list[Tensor | None]
    masks: Tensor | None = None
    controls: Tensor | None = None
    references: Sequence[Sequence[Tensor]] | None = None

    @property
    def bucket(self) -> Bucket:
        """That of all of its clips."""
        return self.clips[0].bucket


@dataclass(frozen=True)
class Rows:
    """This data rank's rows of a step, each of samples one by one, and how many clips of each size all ranks have."""

    rows: list[list[Batch]]
    num_clips: Counter[Bucket]

    @property
    def files(self) -> list[str]:
        return [file for row in self.rows for sample in row for file in sample.files]


class VideoFolder(Dataset[Sample]):
    """Clips by key `(position, video_index)`; the start frame follows from (seed, position).

    A bad file never raises: its Sample has no frames and says why in `error`. With `digests` a Sample has the SHA-256
    sum of the file that its frames are from, and with `sound` the sound of its frames, as it is at `frame_rate`.
    """

    def __init__(
        self,
        videos: Sequence[Video],
        config: DataConfig,
        *,
        seed: int,
        digests: bool = False,
        sound: SoundShape | None = None,
        frame_rate: float = 25.0,
    ) -> None:
        self.videos, self.config, self._seed, self._digests = videos, config, seed, digests
        self.sound, self.frame_rate = sound, frame_rate

    def __len__(self) -> int:
        return len(self.videos)

    def __getitem__(self, key: Key) -> Sample:
        position, video_index = key
        video, config = self.videos[video_index], self.config
        bucket, path = video.bucket, Path(config.root) / video.file
        frames = error = sound = mask = control = references = None
        digests = NO_DIGESTS
        try:
            before = self._digest(path)
            which: dict[str, Any] = {
                "start": self.start(video, position),
                "num_frames": bucket.num_frames,
                "stride": config.frame_stride,
                "height": bucket.height,
                "width": bucket.width,
            }
            frames, shown = retried(partial(read_timed_clip, path, **which), f"reading {video.file}")
            if config.masks:
                mask = retried(partial(read_mask, video.mask, **which), f"reading the mask of {video.file}")
            if video.control is not None:
                of_control = self._digest(video.control)
                read = partial(read_clip, video.control, **which)
                control = retried(read, f"reading the control of {video.file}")
                digests = digests._replace(control=self._unchanged(video.control, of_control))
            if video.references:
                paths = [each.path for each in video.references]
                of_references = [*map(self._digest, paths)]
                references = read_references(video, retried)
                unchanged = [*map(self._unchanged, paths, of_references)]
                digests = digests._replace(references=unchanged)
            if self.sound is not None and shown is not None and self._is_in_time(*shown, bucket.num_frames):
                hear = partial(
                    read_sound,
                    path,
                    shown[0],
                    self.sound.num_samples(bucket.num_frames / self.frame_rate),
                    rate=self.sound.rate,
                    num_channels=self.sound.num_channels,
                )
                sound = retried(hear, f"reading the sound of {video.file}")
            digests = digests._replace(file=self._unchanged(path, before))
        except UnreadableVideo as failure:
            frames, error = None, str(failure)
        of_file = video.file, video.caption, frames, error, digests, sound, mask, control, references
        return Sample(position, video_index, *of_file)

    def _digest(self, path: str | Path) -> str | None:
        return file_digest(path) if self._digests else None

    def _unchanged(self, path: str | Path, before: str | None) -> str | None:
        """The sum of a file, where it is the same after the frames are read as it was before."""
        return before if before is not None and file_digest(path) == before else None

    def has_sound(self, video: Video) -> bool:
        """Whether the video has sound that lasts as long as its frames do at the job's frame rate, by its header."""
        info = video.info
        if info is None or not info.has_sound:
            return False
        return abs(info.fps / self.config.frame_stride / self.frame_rate - 1) < _SAME_RATE

    def _is_in_time(self, first: Fraction, last: Fraction, num_frames: int) -> bool:
        """Whether a clip from one moment to another lasts as long as its frames do at the job's frame rate."""
        expected = (num_frames - 1) / self.frame_rate
        return abs(float(last - first) - expected) < _SAME_RATE * expected + _SAME_MOMENT_S

    def start(self, video: Video, position: int) -> int:
        """The first frame of the clip at this position."""
        assert video.info is not None, f"{video.file} is set aside and must not be read"
        # Every first frame from which the clip is whole, the last such one included.
        num_starts = video.info.num_frames - video.bucket.frames_needed(self.config.frame_stride) + 1
        return int(torch.randint(num_starts, (), generator=generator(self._seed, "start", position)))


def read_references(
    video: Video, attempt: Callable[[Callable[[], Tensor], str], Tensor] = lambda read, _: read()
) -> list[Tensor]:
    """uint8 [H, W, 3] of each of a video's references; `attempt` is given what reads one, and a text that says so.

    Raises:
        UnreadableVideo: one is missing or damaged.
    """
    return [
        attempt(
            partial(
                read_whole_picture if each.is_on_white else read_stretched_picture,
                *(each.path, each.height, each.width),
            ),
            f"reading a reference of {video.file}",
        )
        for each in video.references
    ]


def clip_of(video: Video, start: int, digests: Digests = NO_DIGESTS) -> Clip:
    """The clip of a video that begins with this frame, that of its control, and its references."""
    control = None
    if video.control is not None:
        control = Clip(video.control, start, video.bucket, digests.control)
    sums = digests.references or [None] * len(video.references)
    references = tuple(
        Clip(each.path, 0, Bucket(1, each.height, each.width), digest, is_reference=True)
        for each, digest in zip(video.references, sums, strict=True)
    )
    return Clip(video.file, start, video.bucket, digests.file, control, references)


def frame_rate(config: DataConfig, videos: Sequence[Video]) -> float:
    """Frames a second of clips, as a model is told."""
    if config.frame_rate:
        return config.frame_rate
    # Images have none.
    infos = [video.info for video in videos if video.info is not None and video.info.num_frames > 1]
    rates = [info.fps / config.frame_stride for info in infos if info.fps > 0]
    return rates[0] if rates else 25.0
