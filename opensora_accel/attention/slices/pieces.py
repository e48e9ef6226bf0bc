"""What queries see of one block of keys, for kernels that take all of it in one call.

A slice may bend: of the queries below, the first two see one key more each, the last two all of them. Libraries know
shapes that do not, with corners where they expect them. So slices are cut where they bend, by rows alone:

    # # . .
    # # # .     piece 1: causal, its last query sees all of its keys
    # # # .     piece 2: full
    # # # .

Pieces are fewer than tiles (`tiles.py`), because a trapezoid, or a band, is one. They are counted from the first query
and the first key that any of them has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from opensora_accel.attention.balance import Tile
from opensora_accel.attention.slices.geometry import Kind, Slice
from opensora_accel.attention.slices.tiles import join, tiles_of_all

Made = TypeVar("Made")


class PieceFacts(NamedTuple):
    """What of pieces decides which kernels can take them."""

    num_tiles: int
    num_pairs: int
    kinds: frozenset[Kind]
    # No two have a query or a key in common, and in the order of their queries they stand in that of their keys.
    in_order: bool
    # Of a query, in how many pieces it is at most.
    most_runs: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """What a rank's queries see of a block of keys.

    Args:
        seen: slices without a common pair, counted from the first query and key of all.
    """

    seen: tuple[Slice, ...]

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The pairs for kernels that take a rectangle or a triangle, counted as `seen` is."""
        return tiles_of_all(self.seen)

    @cached_property
    def rows(self) -> slice:
        """The queries from the first to the last that sees something."""
        return _hull(each.queries for each in self.seen)

    @cached_property
    def keys(self) -> slice:
        """The keys from the first to the last that is seen."""
        return _hull(each.keys for each in self.seen)

    @cached_property
    def pieces(self) -> tuple[Slice, ...]:
        """The pairs in order of their queries, counted from the first of `rows` and of `keys`."""
        parts = [part for each in self.seen for part in _cut_at_bends(each)]
        full = join(
            Tile(_slice(part.queries), _slice(part.keys), False) for part in parts if part.kind == "full"
        )
        parts = [part for part in parts if part.kind != "full"]
        parts += [Slice.of(_range(tile.rows), _range(tile.keys)) for tile in full]
        return tuple(sorted(part.moved(-self.rows.start, -self.keys.start) for part in parts))

    @property
    def num_rows(self) -> int:
        """How many queries `rows` are."""
        return int(self.rows.stop - self.rows.start)

    @property
    def num_keys(self) -> int:
        """How many keys `keys` are."""
        return int(self.keys.stop - self.keys.start)

    @cached_property
    def facts(self) -> PieceFacts:
        """What chooses the kernel."""
        return PieceFacts(
            num_tiles=len(self.tiles),
            num_pairs=sum(tile.num_pairs for tile in self.tiles),
            kinds=frozenset(piece.kind for piece in self.pieces),
            in_order=all(
                one.q_stop <= other.q_start and one.k_stop <= other.k_start
                for one, other in pairwise(self.pieces)
            ),
            most_runs=len(self.layers),
        )

    @cached_property
    def layers(self) -> tuple[tuple[Slice, ...], ...]:
        """The pieces dealt out so that in none of them two have a query in common, in as few as there can be."""
        layers: list[list[Slice]] = []
        for piece in self.pieces:
            free = next((layer for layer in layers if layer[-1].q_stop <= piece.q_start), None)
            if free is None:
                layers.append([piece])
            else:
                free.append(piece)
        return tuple(map(tuple, layers))

    @cached_property
    def unseeing(self) -> tuple[range, ...]:
        """The runs of queries, of `rows`, that are in no piece."""
        runs, stop = [], 0
        for piece in self.pieces:
            if piece.q_start > stop:
                runs.append(range(stop, piece.q_start))
            stop = max(stop, piece.q_stop)
        return tuple(runs)

    def kept(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What a kernel makes of the pieces for a device: every layer and step asks for the same."""
        if key not in self._kept:
            self._kept[key] = make()
        made: Made = self._kept[key]
        return made

    @cached_property
    def _kept(self) -> dict[Hashable, Any]:
        return {}


def _cut_at_bends(each: Slice) -> list[Slice]:
    """A tight slice as those whose bounds begin and end in corners, from the first query to the last."""
    # The first query that sees the last key, and the last one that sees the first key.
    reaches, leaves = each.k_stop - 1 - each.upper, each.k_start - each.lower
    # Where it is the first, or the last of all, no bound cuts anything off.
    first, last = each.q_start, each.q_stop - 1
    bends = [at for at, bend in ((reaches + 1, reaches), (leaves, leaves)) if first < bend < last]
    cuts = sorted({first, *bends, each.q_stop})
    parts = (each.within(range(*ends), each.keys) for ends in pairwise(cuts))
    return [part for part in parts if part is not None]


def _hull(runs: Iterable[range]) -> slice:
    ends = [(run.start, run.stop) for run in runs] or [(0, 0)]
    return slice(min(start for start, _ in ends), max(stop for _, stop in ends))


def _slice(run: range) -> slice:
    return slice(run.start, run.stop)


def _range(run: slice) -> range:
    return range(run.start, run.stop)
