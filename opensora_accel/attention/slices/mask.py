"""Which keys each query of a sequence sees, as a list of slices: what attention costs is then their area.

Two clips of 3 and 2 tokens in one row, and three frames of two tokens that see themselves and those before:

    AttentionSlices.packed([3, 2])      AttentionSlices.block_causal(3, 2)
    # # # . .                           # # . . . .
    # # # . .                           # # . . . .
    # # # . .                           # # # # . .
    . . . # #                           # # # # . .
    . . . # #                           # # # # # #
                                        # # # # # #

The first has two slices and 13 pairs where a dense mask has 25 elements, the second three slices and 24 pairs. No pair
is in two slices. A mask is the same for all heads and all samples of a batch, and never changes: it may be a key of a
cache.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opensora_accel.attention.slices.block_mask import rows_of_block_mask
from opensora_accel.attention.slices.dense import slices_of_dense, slices_of_rows
from opensora_accel.attention.slices.geometry import (
    Slice,
    area_before,
    as_table,
    common_area,
    first_overlap,
)
from opensora_accel.attention.slices.picture import draw, save

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, eq=False, repr=False)
class AttentionSlices:
    """The pairs of queries and keys that see each other; the others have no part in attention.

    Args:
        num_queries, num_keys: of the whole sequence, not of a rank.
        slices: in any order; they are kept sorted and tight.

    Raises:
        ValueError: a slice outside of the sequence, or two that have a pair in common.
    """

    num_queries: int
    num_keys: int
    slices: tuple[Slice, ...]

    def __post_init__(self) -> None:
        kept = []
        for each in self.slices:
            tight = Slice(*each).tight()
            if tight is None:
                raise ValueError(f"{each} has no pair that is seen; leave it out")
            kept.append(tight)
            if tight.q_start < 0 or tight.k_start < 0:
                raise ValueError(f"queries and keys are counted from 0; got {tight}")
            if tight.q_stop > self.num_queries or tight.k_stop > self.num_keys:
                raise ValueError(
                    f"{_described(tight)} ends outside of {self.num_queries} queries and {self.num_keys} keys"
                )
        object.__setattr__(self, "slices", tuple(sorted(kept)))
        meeting = first_overlap(self.table)
        if meeting is not None:
            one, other = (_described(self.slices[number]) for number in meeting)
            raise ValueError(
                f"{one} and {other} have pairs in common, which would count twice; cut one of them at the other"
            )

    @classmethod
    def full(cls, num_queries: int, num_keys: int | None = None) -> AttentionSlices:
        """Every query sees every key; by default there are as many keys as queries."""
        num_keys = num_queries if num_keys is None else num_keys
        slices = [Slice.of(range(num_queries), range(num_keys))] if num_queries and num_keys else []
        return cls(num_queries, num_keys, tuple(slices))

    @classmethod
    def causal(cls, num_tokens: int) -> AttentionSlices:
        """Query i sees keys 0…i."""
        tokens = range(num_tokens)
        return cls(num_tokens, num_tokens, (Slice.of(tokens, tokens, "causal"),) if num_tokens else ())

    @classmethod
    def packed(
        cls, lengths: Sequence[int | AttentionSlices], kv_lengths: Sequence[int] | None = None
    ) -> AttentionSlices:
        """Samples that stand one behind the other and do not see each other.

        Args:
            lengths: every sample's number of queries, which see all of its keys; or who sees whom in it.
            kv_lengths: every sample's number of keys, by default as many; its caption's, for cross-attention.

        Raises:
            ValueError: a negative length, other numbers of samples, or a sample's mask of another number of keys.
        """
        masks = [each if isinstance(each, AttentionSlices) else None for each in lengths]
        sizes = [each.num_queries if isinstance(each, AttentionSlices) else each for each in lengths]
        if kv_lengths is None:
            kv_lengths = [
                size if mask is None else mask.num_keys for size, mask in zip(sizes, masks, strict=True)
            ]
        if len(sizes) != len(kv_lengths):
            raise ValueError(
                f"as many samples have queries as keys; got {len(sizes)} lengths and {len(kv_lengths)} kv_lengths"
            )
        _check_counts(lengths=sizes, kv_lengths=kv_lengths)
        slices: list[Slice] = []
        for mask, queries, keys in zip(masks, in_a_row(sizes), in_a_row(kv_lengths), strict=True):
            if mask is not None:
                if mask.num_keys != len(keys):
                    raise ValueError(f"a sample has {len(keys)} keys, and its mask is {mask!r}")
                slices += [each.moved(queries.start, keys.start) for each in mask.slices]
            elif queries and keys:
                slices.append(Slice.of(queries, keys))
        return cls(sum(sizes), sum(kv_lengths), tuple(slices))

    @classmethod
    def block_causal(
        cls,
        frames: int,
        tokens_per_frame: int,
        *,
        block_frames: int | Sequence[int] = 1,
        sink_frames: int = 0,
        window_frames: int | None = None,
    ) -> AttentionSlices:
        """Frames see their own block of frames and those before it, as causal video models attend.

        Args:
            block_frames: in a block, or of each block, where they differ. The last one has what is left.
            window_frames: the last so many frames are seen, those of the own block included; by default all.
            sink_frames: the first so many are seen whatever the window.

        Raises:
            ValueError: a number below 0, blocks that do not add up, or a window that does not hold the largest block.

        Source: CausVid (arXiv:2412.07772); sinks and windows as in LongLive (arXiv:2509.22622).
        """
        blocks = _blocks(frames, tokens_per_frame, block_frames, sink_frames, window_frames)
        slices = []
        for block in blocks:
            for seen in _seen_frames(block.stop, sink_frames, window_frames):
                slices.append(Slice.of(_tokens(block, tokens_per_frame), _tokens(seen, tokens_per_frame)))
        return cls(frames * tokens_per_frame, frames * tokens_per_frame, tuple(slices))

    @classmethod
    def teacher_forcing(
        cls,
        frames: int,
        tokens_per_frame: int,
        *,
        block_frames: int | Sequence[int] = 1,
        sink_frames: int = 0,
        window_frames: int | None = None,
    ) -> AttentionSlices:
        """A clean clip and behind it the same clip with noise: 2 · frames frames in one sequence.

        Clean blocks see themselves and the clean ones before. A noisy block sees itself and the clean blocks before
        it, so that each learns from a past without noise. Of three blocks a b c with noise A B C:

            / a b c A B C
            a # . . . . .
            b # # . . . .
            c # # # . . .
            A . . . # . .
            B # . . . # .
            C # # . . . #

        Args: as of `block_causal`; the window of a noisy block counts its own frames.

        Raises:
            ValueError: as `block_causal`.

        Source: the masks of CausVid's and Self-Forcing's teacher forcing (arXiv:2506.08009).
        """
        clean = cls.block_causal(
            frames,
            tokens_per_frame,
            block_frames=block_frames,
            sink_frames=sink_frames,
            window_frames=window_frames,
        )
        total = frames * tokens_per_frame
        slices = list(clean.slices)
        for block in _blocks(frames, tokens_per_frame, block_frames, sink_frames, window_frames):
            own = _tokens(block, tokens_per_frame)
            noisy = range(total + own.start, total + own.stop)
            slices.append(Slice.of(noisy, noisy))
            for seen in _seen_frames(block.stop, sink_frames, window_frames):
                before = range(seen.start, min(seen.stop, block.start))
                if before:
                    slices.append(Slice.of(noisy, _tokens(before, tokens_per_frame)))
        return cls(2 * total, 2 * total, tuple(slices))

    @classmethod
    def sliding(
        cls,
        frames: int,
        height: int,
        width: int,
        window: tuple[int, int, int],
        *,
        tile: tuple[int, int, int],
    ) -> AttentionSlices:
        """A window in three dimensions: a tile of tokens sees the tiles around it.

        Tokens stand tile by tile (`tile_order` gives the order), because a window has few slices only then. At an edge
        the window is moved inwards, so that each tile sees as much as any other.

        Args:
            frames, height, width: how many tokens the clip has along each; the last tile may have fewer.
            window: how many tokens are seen along each, in whole tiles; an odd number of these, to be centred.
            tile: how many tokens a tile has along each.

        Raises:
            ValueError: a number below 1, or a window that is no odd number of tiles.

        Source: sliding tile attention (arXiv:2502.04507).
        """
        sizes = (frames, height, width)
        _check_counts(1, sizes=sizes, window=window, tile=tile)
        ranges = []
        for size, seen, side in zip(sizes, window, tile, strict=True):
            if seen % side or seen // side % 2 == 0:
                raise ValueError(
                    f"a window is an odd number of tiles along each of the three; got {window} of tiles of {tile}"
                )
            number, reach = -(-size // side), seen // side
            firsts = (min(max(at - reach // 2, 0), max(number - reach, 0)) for at in range(number))
            ranges.append([range(first, min(first + reach, number)) for first in firsts])
        places = list(itertools.product(*(range(len(each)) for each in ranges)))
        lengths = [
            _product(min(side, size - at * side) for at, side, size in zip(place, tile, sizes, strict=True))
            for place in places
        ]
        tokens = dict(zip(places, in_a_row(lengths), strict=True))
        slices = []
        for place in places:
            seen_tiles = itertools.product(*(of_dim[at] for of_dim, at in zip(ranges, place, strict=True)))
            runs = joined(tokens[each] for each in seen_tiles)
            slices += [Slice.of(tokens[place], run) for run in runs]
        total = frames * height * width
        return cls(total, total, tuple(_stacked(slices)))

    @classmethod
    def from_dense(cls, mask: Tensor, *, max_slices: int = 4096) -> AttentionSlices:
        """The slices of a dense mask [S_q, S_kv], bool, true where a key may be seen; exactly.

        Raises:
            ValueError: another shape or dtype, or more than `max_slices` would be needed; the error says how many.
        """
        slices = slices_of_dense(mask, max_slices)
        return cls(mask.size(0), mask.size(1), tuple(slices))

    @classmethod
    def from_block_mask(
        cls, block_mask: BlockMask, num_queries: int, num_keys: int | None = None, *, max_slices: int = 4096
    ) -> AttentionSlices:
        """The slices of what `torch.nn.attention.flex_attention.create_block_mask` made; exactly.

        Only blocks that are seen in part are asked of its `mask_mod`, a row of blocks at a time.

        Args:
            num_queries, num_keys: how many of its tokens there are; those behind are padding, to whole blocks.

        Raises:
            ValueError: it is of another number of tokens, even in whole blocks, it differs by sample or by head,
                tokens see the padding behind them, or more than `max_slices` would be needed.
        """
        num_keys = num_queries if num_keys is None else num_keys
        slices = slices_of_rows(rows_of_block_mask(block_mask, num_queries, num_keys), num_keys, max_slices)
        return cls(num_queries, num_keys, tuple(slices))

    @cached_property
    def table(self) -> Tensor:
        """[N, 6], int64: the slices, one a row."""
        return as_table(self.slices)

    @cached_property
    def digest(self) -> str:
        """The same for the same slices, on all ranks."""
        facts = (self.num_queries, self.num_keys, self.slices)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    @cached_property
    def area(self) -> int:
        """How many pairs see each other."""
        return int(self.area_before(torch.tensor([self.num_queries]))[0])

    def area_before(self, queries: Tensor) -> Tensor:
        """[n]: how many pairs the queries before each of `queries` [n] have."""
        return area_before(self.table, queries)

    def of_queries(self, queries: range) -> AttentionSlices:
        """What these queries see of all keys, as a mask of their own."""
        cut = (each.within(queries, range(self.num_keys)) for each in self.slices)
        slices = tuple(each.moved(-queries.start, 0) for each in cut if each is not None)
        return AttentionSlices(len(queries), self.num_keys, slices)

    def dense(self) -> Tensor:
        """[S_q, S_kv], bool, true where a key may be seen."""
        mask = torch.zeros(self.num_queries, self.num_keys, dtype=torch.bool)
        for each in self.slices:
            rows, columns = torch.arange(each.q_start, each.q_stop), torch.arange(each.k_start, each.k_stop)
            diagonals = columns - rows[:, None]
            mask[each.q_start : each.q_stop, each.k_start : each.k_stop] |= (diagonals >= each.lower) & (
                diagonals <= each.upper
            )
        return mask

    def __or__(self, other: AttentionSlices) -> AttentionSlices:
        """The pairs of both, which may have none in common.

        Raises:
            ValueError: they are of other numbers of queries and keys, or have a pair in common.
        """
        if not isinstance(other, AttentionSlices):
            return NotImplemented
        if (self.num_queries, self.num_keys) != (other.num_queries, other.num_keys):
            raise ValueError(f"masks of one sequence can be joined; got {self!r} and {other!r}")
        return AttentionSlices(self.num_queries, self.num_keys, self.slices + other.slices)

    def __eq__(self, other: object) -> bool:
        """Whether the same pairs see each other, however they are cut into slices."""
        if not isinstance(other, AttentionSlices):
            return NotImplemented
        if (self.num_queries, self.num_keys, self.area) != (other.num_queries, other.num_keys, other.area):
            return False
        return self.slices == other.slices or common_area(self.table, other.table) == self.area

    def __hash__(self) -> int:
        return hash((self.num_queries, self.num_keys, self.area))

    def __repr__(self) -> str:
        share = self.area / max(self.num_queries * self.num_keys, 1)
        return (
            f"AttentionSlices({self.num_queries} queries × {self.num_keys} keys, {len(self.slices)} slices, "
            f"{share:.1%} of the pairs)"
        )

    def show(self, width: int = 64) -> None:
        """Prints a picture of `width` characters: queries downwards, keys to the right, darker where more is seen."""
        print(self)
        print(draw(self.table, self.num_queries, self.num_keys, width))

    def save_picture(self, path: str, width: int = 512) -> None:
        """Writes the picture to a PNG of `width` pixels.

        Raises:
            ModuleNotFoundError: Pillow is not installed.
        """
        save(path, self.table, self.num_queries, self.num_keys, width)


def tile_order(frames: int, height: int, width: int, tile: tuple[int, int, int]) -> Tensor:
    """[frames · height · width]: the tokens of a clip tile by tile, by their places in the usual order.

    `x.index_select(1, order)` brings tokens [B, S, …] into it, and `x.index_select(1, order.argsort())` back.
    """
    order = torch.arange(frames * height * width).view(frames, height, width)
    return torch.cat(
        [
            part.flatten()
            for slab in order.split(tile[0], 0)
            for bar in slab.split(tile[1], 1)
            for part in bar.split(tile[2], 2)
        ]
    )


def _described(each: Slice) -> str:
    return (
        f"the {each.kind} slice of queries {each.q_start}…{each.q_stop - 1} and keys {each.k_start}…"
        f"{each.k_stop - 1}"
    )


def _check_counts(least: int = 0, **counts: Sequence[int]) -> None:
    for name, numbers in counts.items():
        if any(number < least for number in numbers):
            raise ValueError(f"{name} must be at least {least} each; got {list(numbers)}")


def _product(numbers: Iterable[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def in_a_row(lengths: Sequence[int]) -> list[range]:
    """Runs of these lengths, one behind the other."""
    stops = list(itertools.accumulate(lengths))
    return [range(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


def _tokens(frames: range, tokens_per_frame: int) -> range:
    return range(frames.start * tokens_per_frame, frames.stop * tokens_per_frame)


def _blocks(
    frames: int,
    tokens_per_frame: int,
    block_frames: int | Sequence[int],
    sink_frames: int,
    window_frames: int | None,
) -> list[range]:
    """The blocks of a causal mask, in frames.

    Raises:
        ValueError: as `AttentionSlices.block_causal`.
    """
    _check_counts(1, frames=[frames], tokens_per_frame=[tokens_per_frame])
    _check_counts(0, sink_frames=[sink_frames])
    if isinstance(block_frames, int):
        _check_counts(1, block_frames=[block_frames])
        whole, left = divmod(frames, block_frames)
        block_frames = [block_frames] * whole + [left] * (left > 0)
    _check_counts(1, block_frames=block_frames)
    if sum(block_frames) != frames:
        raise ValueError(f"blocks of {list(block_frames)} frames are {sum(block_frames)}, and not {frames}")
    if window_frames is not None and window_frames < max(block_frames):
        raise ValueError(
            f"window_frames ({window_frames}) counts those of the own block, which are up to {max(block_frames)}"
        )
    return in_a_row(block_frames)


def _seen_frames(stop: int, sink_frames: int, window_frames: int | None) -> list[range]:
    """The frames that a block sees which ends before frame `stop`: the window and, apart from it, the sink."""
    first = 0 if window_frames is None else max(0, stop - window_frames)
    return joined(each for each in (range(min(sink_frames, stop)), range(first, stop)) if each)


def joined(runs: Iterable[range]) -> list[range]:
    """Runs in order, with those in one that meet or overlap."""
    joined: list[range] = []
    for run in runs:
        if joined and run.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, run.stop))
        else:
            joined.append(run)
    return joined


def _stacked(slices: Sequence[Slice]) -> list[Slice]:
    """Full slices in order of queries, with those in one that have the same keys and stand one below the other."""
    stacked: list[Slice] = []
    ending: dict[tuple[int, range], int] = {}
    for each in slices:
        above = ending.pop((each.q_start, each.keys), None)
        if above is None:
            above = len(stacked)
            stacked.append(each)
        else:
            stacked[above] = Slice.of(range(stacked[above].q_start, each.q_stop), each.keys)
        ending[each.q_stop, each.keys] = above
    return stacked
