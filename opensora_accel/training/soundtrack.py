"""The sound of a file from the moment on at which one of its frames is shown.

A file may have its sound in parts of 20 to 30 ms, each with a time stamp. Containers round these: Matroska's are whole
milliseconds, 44 of which are not 1,940 samples. So a part begins where the one before ended, unless the stamps say that
something is missing.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from fractions import Fraction
from typing import Any

import av
import torch
from torch import Tensor

from opensora_accel.training.video import UnreadableVideo, is_image, open_video

# What was decoded just before is heard in what follows: so long before it decoding begins.
_LEAD_S = Fraction(1, 2)
# Stamps that differ by more say that there is nothing, or too much, between two parts.
_GAP_S = Fraction(1, 50)
# How much of a channel goes to the left one and to the right one: as LTX-2's trainer has it (process_videos.py), by
# FFmpeg's order of channels.
_FRONT, _OTHER = 1.0, 0.707
_TO_STEREO = {
    1: ((1.0,), (1.0,)),
    2: ((1.0, 0.0), (0.0, 1.0)),
    # Left, right, centre, low frequencies, left and right behind.
    6: ((_FRONT, 0, _OTHER, 0, _OTHER, 0), (0, _FRONT, _OTHER, 0, 0, _OTHER)),
    # And at both sides.
    8: ((_FRONT, 0, _OTHER, 0, _OTHER, 0, _OTHER, 0), (0, _FRONT, _OTHER, 0, 0, _OTHER, 0, _OTHER)),
}


def read_sound(
    path: str | os.PathLike[str], first_s: Fraction, num_samples: int, *, rate: int, num_channels: int
) -> Tensor | None:
    """The sound from `first_s` seconds of the file's time on: [num_channels, num_samples] in −1…1; None without sound.

    It is resampled to `rate` a second, and mixed to 1 or 2 channels. Where it begins later, or ends early, there is
    silence.

    Raises:
        UnreadableVideo: the file is missing or damaged, or its sound is.
    """
    if is_image(path):
        return None
    if first_s > _LEAD_S:
        # Not every container can be entered in its middle.
        with suppress(UnreadableVideo):
            return _decode(path, first_s, num_samples, rate, num_channels, seeks=True)
    return _decode(path, first_s, num_samples, rate, num_channels, seeks=False)


def _decode(
    path: str | os.PathLike[str],
    first_s: Fraction,
    num_samples: int,
    rate: int,
    num_channels: int,
    *,
    seeks: bool,
) -> Tensor | None:
    with open_video(path) as (container, _):
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        if seeks:
            container.seek(int((first_s - _LEAD_S) / stream.time_base), stream=stream, backward=True)
        sound = torch.zeros(num_channels, num_samples)
        # All channels in one plane: of 6 in planes of their own PyAV 18 reads what is not there.
        resampler = av.AudioResampler(format="flt", rate=rate)
        end: int | None = None
        for frame in itertools.chain(container.decode(stream), [None]):
            parts: list[Any] = resampler.resample(frame) if frame is not None or end is not None else []
            for part in parts:
                at = end
                if part.pts is not None and part.time_base is not None:
                    stamp = round((part.pts * part.time_base - first_s) * rate)
                    at = stamp if end is None or abs(stamp - end) > _GAP_S * rate else end
                if at is None:
                    raise UnreadableVideo(f"{path}: its sound does not say when it is heard")
                end = at + part.samples
                inside = slice(max(0, -at), max(0, min(part.samples, num_samples - at)))
                samples = torch.from_numpy(part.to_ndarray()).view(part.samples, -1).T[:, inside]
                if samples.size(1):
                    begin = at + inside.start
                    sound[:, begin : begin + samples.size(1)] = _mixed(samples, num_channels)
                if end >= num_samples:
                    return sound
    return sound


def _mixed(samples: Tensor, num_channels: int) -> Tensor:
    """samples: [channels, n] of a file → [num_channels, n], as loud as they were, and never louder than 1."""
    given = samples.size(0)
    if given == num_channels:
        return samples
    if given not in _TO_STEREO:
        # Of an order that nobody knows.
        return samples.mean(0, keepdim=True).expand(num_channels, -1)
    weights = torch.tensor(_TO_STEREO[given])
    stereo = weights / weights.sum(1, keepdim=True) @ samples
    return stereo if num_channels == 2 else stereo.mean(0, keepdim=True)
