"""Rows of clips of any size, without padding: which clips share a row, and which rows a data rank has.

A step has `data.batch_size` rows over all data ranks, of at most `data.packed_tokens` tokens. Clips are taken in the
order of the epoch as long as one of the rows has room, and then dealt out anew, the most expensive first, to the row
that has least to do. Six clips of 9, 4, 4, 3, 2 and 6 tokens, in two rows of at most 12:

    taken in order     9 → first row, 4 → second, 4 → second, 3 → first, 2 → second; 6 has no room: the next step's
    dealt out anew     9 2 | 4 4 3 by costs of 9·9, 4·4, 4·4, 3·3 and 2·2, where attention is all of the cost

What a clip of n tokens costs has a part that grows with n, that of the linear layers, and one that grows with n², that
of attention, which no clip of the row shares with another. Where each row fits in the order in which it was filled but
not as it was dealt out anew, it stays as it was filled.

All of it follows from the seed and the position of the step's first sample in the job, so that a run goes on with the
sample behind the last one that it has trained, and every rank knows what the others have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import Sampler

from opensora_accel.training.buckets import Bucket
from opensora_accel.training.sampler import Key, Portion, VideoStream
from shardformer import blocks_of


@dataclass(frozen=True)
class Cost:
    """What a clip of n tokens costs a model: `per_token` · n + `per_pair` · n², in operations."""

    per_token: float
    per_pair: float

    @classmethod
    def of(cls, model: nn.Module, num_heads: int, head_dim: int) -> Cost:
        """By the parameters of its blocks, each of which multiplies every token, and the width of its attention."""
        blocks = blocks_of(model)
        parameters = sum(each.numel() for block in blocks for each in block.parameters())
        return cls(2.0 * parameters, 4.0 * len(blocks) * num_heads * head_dim)

    def __call__(self, num_tokens: int) -> float:
        return self.per_token * num_tokens + self.per_pair * num_tokens**2


def fill_rows(
    sizes: Callable[[int], int], num_rows: int, capacity: int, cost: Callable[[int], float]
) -> list[list[int]]:
    """The rows of a step: which samples each has, counted from the step's first one.

    Args:
        sizes: the number of tokens of a sample, of an endless stream of them.
        capacity: tokens of a row; no sample has more.
        cost: of a sample of so many tokens.
    """
    taken: list[int] = []
    filled: list[list[int]] = [[] for _ in range(num_rows)]
    room = [capacity] * num_rows
    while True:
        size = sizes(len(taken))
        row = next((row for row in range(num_rows) if room[row] >= size), None)
        if row is None:
            break
        filled[row].append(len(taken))
        room[row] -= size
        taken.append(size)
    return _dealt(taken, num_rows, capacity, cost) or filled


def _dealt(
    sizes: Sequence[int], num_rows: int, capacity: int, cost: Callable[[int], float]
) -> list[list[int]] | None:
    """Each to the row with the least cost that has room, the most expensive first; None where one has room nowhere."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    room, costs = [capacity] * num_rows, [0.0] * num_rows
    for sample in sorted(range(len(sizes)), key=lambda sample: (-sizes[sample], sample)):
        fitting = [row for row in range(num_rows) if room[row] >= sizes[sample]]
        if not fitting:
            return None
        row = min(fitting, key=lambda row: (costs[row], row))
        rows[row].append(sample)
        room[row] -= sizes[sample]
        costs[row] += cost(sizes[sample])
    return [sorted(row) for row in rows]


def check_room(tokens: Mapping[Any, int], capacity: int) -> None:
    """Checks that a row of `capacity` tokens has room for a clip of each size.

    Raises:
        ValueError: one has more tokens.
    """
    for size, number in tokens.items():
        if number > capacity:
            raise ValueError(
                f"a clip of {size} has {number} tokens, more than a row: set data.packed_tokens to {number} or more "
                f"(it is {capacity})"
            )


def fullest_row(tokens: Mapping[str, int], capacity: int) -> list[str]:
    """Of rows of at most `capacity` tokens the one that has most, and of those as full the one with most pairs.

    Of clips of 6, 5 and 2 tokens a row of 10 has 6, 2 and 2: as many tokens as 5 and 5 or five of 2, but 44 pairs
    within a clip in the place of 50 and 20. So it has 5 and 5.

    Args:
        tokens: of a clip of each size, none more than `capacity`.

    Returns:
        The size of each of its clips, the largest first.
    """
    unit = math.gcd(*tokens.values())
    # By units: the most pairs of clips that add up to so many tokens, and the last of these clips; none for no such.
    pairs, last = [0], [""]
    for at in range(1, capacity // unit + 1):
        before = {name: at - number // unit for name, number in tokens.items()}
        reached = [name for name, place in before.items() if place >= 0 and pairs[place] >= 0]
        best = max(reached, key=lambda name: pairs[before[name]] + tokens[name] ** 2, default="")
        pairs.append(pairs[before[best]] + tokens[best] ** 2 if best else -1)
        last.append(best)
    at = max(place for place, number in enumerate(pairs) if number >= 0)
    names = []
    while at:
        names.append(last[at])
        at -= tokens[last[at]] // unit
    return sorted(names, key=lambda name: (-tokens[name], name))


class RowSampler(Sampler[list[Key]]):
    """Endless steps of keys `(position, video_index)`: this data rank's rows, one behind the other.

    Args:
        portions: the videos of each bucket.
        tokens: of a clip of each bucket, and what one costs.
        num_rows: of a step, over all data ranks.
        capacity: tokens of a row.
        substitute: as of `GlobalBatchSampler`.
    """

    def __init__(
        self,
        portions: Sequence[Portion],
        tokens: Mapping[Bucket, int],
        cost: Callable[[int], float],
        num_rows: int,
        capacity: int,
        data_rank: int,
        data_size: int,
        seed: int,
        *,
        substitute: Callable[[int], int] = lambda video_index: video_index,
    ) -> None:
        self.position = 0
        self._bucket_of = {video: portion.bucket for portion in portions for video in portion.videos}
        videos = sorted(video for portion in portions for video in portion.videos)
        self._stream = VideoStream(videos, seed, "order of rows")
        self._tokens, self._cost, self._capacity = tokens, cost, capacity
        self._num_rows, self._substitute = num_rows, substitute
        # Which of a step's rows are this data rank's.
        self.own = range(data_rank * num_rows // data_size, (data_rank + 1) * num_rows // data_size)

    def __iter__(self) -> Iterator[list[Key]]:
        while True:
            first, rows = self.position, self.rows(self.position)
            self.position = first + sum(map(len, rows))
            own = [sample for row in self.own for sample in rows[row]]
            yield [(first + sample, self._substitute(self._stream.at(first + sample))) for sample in own]

    def rows(self, position: int) -> list[list[int]]:
        """The rows of the step whose first sample is at `position`, counted from it; the same on all ranks."""
        return fill_rows(
            lambda sample: self._tokens[self.bucket(position + sample)],
            self._num_rows,
            self._capacity,
            self._cost,
        )

    def bucket(self, position: int) -> Bucket:
        """That of the sample at a position, whichever file stands in for it."""
        return self._bucket_of[self._stream.at(position)]
