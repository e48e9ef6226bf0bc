"""Clips of several sizes: which bucket a file belongs to, and how many clips of it make a batch.

A batch is of one bucket, on all data ranks. So they have the same work in every step, nothing is padded, and the job
stays the same on any number of ranks. Files go by their headers: a video to clips, and only where it is shorter than
each of them to a single picture; among those to the aspect ratio that crops it least, there to the longest clip that it
holds, there to the largest picture that it fills; an image to clips of one frame. With

    1x480x480   1x480x832   33x480x832   81x480x832

a video of 16:9 and 50 frames goes to 33x480x832, a portrait of one frame to 1x480x480. With 33x480x480 in the place of
33x480x832 the video goes there, and loses 44 % of its picture: motion counts more.

`batch_size` is that of the bucket with the most tokens per clip. For each clip of that, others get as many as have no
more tokens together, because memory grows with tokens: if a clip of 81 frames has 32,760 tokens and one of 33 frames
14,040, there are two of the latter for one of the former. `33x480x832:24` says how many in place of that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opensora_accel.plan import Plan

# What a bucket may have of its own; the rest of the plan is how the model is spread over the ranks.
_PLAN_SETTINGS = ("checkpoint", "offload", "mlp_chunks")
_PATTERN = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,5})(?::([1-9]\d{0,6}))?")


@dataclass(frozen=True)
class Bucket:
    """A size of clips, and how many of them all data ranks together have in a batch, where that is given."""

    num_frames: int
    height: int
    width: int
    batch_size: int | None = None

    def __str__(self) -> str:
        return f"{self.num_frames}x{self.height}x{self.width}"

    def frames_needed(self, stride: int) -> int:
        """Length of the shortest video that holds a clip, in frames."""
        return (self.num_frames - 1) * stride + 1


def parse_buckets(texts: Sequence[str]) -> tuple[Bucket, ...]:
    """Buckets as they stand in a configuration.

    Raises:
        ValueError: a text is no size, or two are of one size.
    """
    buckets = []
    for text in texts:
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"data.buckets are FRAMESxHEIGHTxWIDTH, or that and :CLIPS in a batch, for example 33x480x832 or "
                f"33x480x832:24; got {text!r}"
            )
        num_frames, height, width = (int(size) for size in match.groups()[:3])
        buckets.append(Bucket(num_frames, height, width, int(match[4]) if match[4] else None))
    sizes = list(map(str, buckets))
    for size in sizes:
        if sizes.count(size) > 1:
            raise ValueError(f"data.buckets has {size} more than once; leave one of them out")
    return tuple(buckets)


def parse_plans(table: Mapping[str, Any], plan: Plan, buckets: Sequence[Bucket]) -> dict[Bucket, Plan]:
    """The plans of the buckets that have settings of their own, as they stand in a configuration.

    Args:
        plan: that of the run.
        buckets: those of the run; none, where its clips are of one size.

    Raises:
        ValueError: a name is no bucket, a setting is none that a bucket may have, or it does not work.
    """
    by_size = {str(bucket): bucket for bucket in buckets}
    plans = {}
    for size, settings in table.items():
        if size not in by_size:
            raise ValueError(
                f"bucket_plans has {size!r}, which is none of data.buckets ({', '.join(by_size) or 'there are none'}); "
                "name one of them as FRAMESxHEIGHTxWIDTH, or leave it out"
            )
        if not isinstance(settings, Mapping) or not settings or not set(settings) <= set(_PLAN_SETTINGS):
            raise ValueError(
                f"bucket_plans.{size} is a table of one or more of {', '.join(_PLAN_SETTINGS)}, which the batches of a "
                f"bucket may have of their own; got {settings!r}: put the others into plan, for the whole run"
            )
        try:
            plans[by_size[size]] = plan.replace(**settings)
        except ValueError as error:
            raise ValueError(f"bucket_plans.{size}: {error}") from error
    return plans


def bucket_of(
    num_frames: int, height: int, width: int, buckets: Sequence[Bucket], stride: int
) -> Bucket | None:
    """The bucket of a file with this many frames of this size; None where it is shorter than every clip."""
    fitting = [bucket for bucket in buckets if num_frames >= bucket.frames_needed(stride)]
    # A video is a single picture only where there is no clip for it.
    moving = [bucket for bucket in fitting if bucket.num_frames > 1]

    def rank(bucket: Bucket) -> tuple[float, int, bool, int, int]:
        # As a ratio of ratios: 2:1 is as far from 1:1 as 1:2 is. Rounded, because 480x832 and 720x1280 are meant to be
        # one aspect ratio.
        cropped = round(abs(math.log(bucket.height / bucket.width * width / height)), 1)
        enlarges = bucket.height > height or bucket.width > width
        area = bucket.height * bucket.width
        # The last one decides between lying and standing, for a square.
        return cropped, -bucket.num_frames, enlarges, area if enlarges else -area, bucket.height

    return min(moving or fitting, key=rank, default=None)


def cropped_share(bucket: Bucket, height: int, width: int) -> float:
    """How much of a picture of this size is cut off in a bucket: 0.42 of one of 480 × 832 in 480 × 480."""
    ratio = bucket.height / bucket.width * width / height
    return 1 - min(ratio, 1 / ratio)


def batch_sizes(
    tokens: Mapping[Bucket, int], batch_size: int, buckets: Sequence[Bucket]
) -> dict[Bucket, int]:
    """Clips in a batch of each bucket, over all data ranks; multiples of `batch_size`, where none is given.

    Args:
        tokens: of one clip of each bucket.
    """
    most = max(tokens[bucket] for bucket in buckets)
    return {bucket: bucket.batch_size or batch_size * (most // tokens[bucket]) for bucket in buckets}
