"""Which videos the batches of a job have, in an order that follows from the seed.

A draw depends on (seed, position) alone, where the position counts the samples of the whole job: `data.py` has an
example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from opensora_accel.training.buckets import Bucket
from opensora_accel.training.flow import generator

Key = tuple[int, int]  # (position in the job's stream of samples, index of the video)


@dataclass(frozen=True)
class Portion:
    """The videos of one bucket, by index, and how many of them all data ranks together take in a batch.

    One that comes more often in an epoch is there so many times.
    """

    bucket: Bucket
    videos: Sequence[int]
    batch_size: int


class VideoStream:
    """Videos without end: every epoch is a permutation of them that follows from the seed.

    Args:
        videos: by index; one that comes more often in an epoch is there so many times.
        purpose: of the draw; each stream has its own.
    """

    def __init__(self, videos: Sequence[int], seed: int, purpose: str) -> None:
        self._videos, self._seed, self._purpose = videos, seed, purpose
        # The epoch that is being read, and its order.
        self._epoch, self._order = -1, torch.empty(0)

    def at(self, place: int) -> int:
        """The index of the video at a place: of 8 videos, place 10 is the third one of epoch 1."""
        epoch, at = divmod(place, len(self._videos))
        # Who reads may run across the end of an epoch, and seldom back.
        if epoch != self._epoch:
            rng = generator(self._seed, self._purpose, epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._videos), generator=rng)
        return self._videos[int(self._order[at])]


class GlobalBatchSampler(Sampler[list[Key]]):
    """Endless batches of keys `(position, video_index)`: this data rank's share of each global batch.

    Every epoch of a portion is a seeded permutation of its videos; batches run across the ends of epochs. A draw
    depends on (seed, position) alone. `substitute`, where given, maps the index of a video that is set aside to the
    one that stands in for it. `position` counts the samples of the whole job, and may be set before iterating.

    Raises:
        ValueError: a batch does not divide among the data ranks.
    """

    def __init__(
        self,
        portions: Sequence[Portion],
        data_rank: int,
        data_size: int,
        seed: int,
        *,
        substitute: Callable[[int], int] | None = None,
    ) -> None:
        assert portions and all(portion.videos for portion in portions) and 0 <= data_rank < data_size
        for portion in portions:
            check_divides(portion.batch_size, data_size, "--data.batch_size")
        self.position = 0
        self._portions, self._seed = portions, seed
        self._data_rank, self._data_size = data_rank, data_size
        self._substitute = substitute or (lambda video_index: video_index)
        of_one = len(portions) == 1
        self._streams = {
            each.bucket: VideoStream(each.videos, seed, "order" if of_one else f"order of {each.bucket}")
            for each in portions
        }

    def __iter__(self) -> Iterator[list[Key]]:
        for first, portion, place in self._batches():
            size = portion.batch_size
            self.position = first + size
            # Contiguous, so that the samples of all ranks together are those of one rank, in order.
            share = range(
                self._data_rank * size // self._data_size, (self._data_rank + 1) * size // self._data_size
            )
            stream = self._streams[portion.bucket]
            yield [(first + n, self._substitute(stream.at(place + n))) for n in share]

    def _batches(self) -> Iterator[tuple[int, Portion, int]]:
        """From `position` on each batch's first position, portion, and first place in the portion's own stream."""
        portions, position = self._portions, self.position
        if len(portions) == 1:
            while True:
                yield position, portions[0], position
                position += portions[0].batch_size
        # An epoch sees each video about once; those of a small portion rather more often than never.
        counts = [max(1, round(len(portion.videos) / portion.batch_size)) for portion in portions]
        kinds = torch.repeat_interleave(torch.arange(len(portions)), torch.tensor(counts))
        num_samples = sum(count * portion.batch_size for count, portion in zip(counts, portions, strict=True))
        epoch = position // num_samples
        while True:
            first, places = epoch * num_samples, [epoch * count for count in counts]
            rng = generator(self._seed, "buckets", epoch)
            for kind in kinds[torch.randperm(len(kinds), generator=rng)].tolist():
                size = portions[kind].batch_size
                # Where no batch begins the position is that of a job with other batches: the rest of one is skipped.
                if first >= position:
                    yield first, portions[kind], places[kind] * size
                first, places[kind] = first + size, places[kind] + 1
            epoch += 1


def check_divides(batch_size: int, data_size: int, option: str) -> None:
    """Raises ValueError where a batch does not divide among the data ranks."""
    if batch_size % data_size:
        below = batch_size // data_size * data_size
        sizes = f"{below} or {below + data_size}" if below > 0 else f"{data_size}"
        degrees = ", ".join(str(n) for n in range(1, min(batch_size, 1024) + 1) if batch_size % n == 0)
        raise ValueError(
            f"the global batch_size ({batch_size}) must be divisible by the number of data ranks "
            f"({data_size}); use {option} {sizes}, or a data degree of {degrees or 1}"
        )
