"""Slices cut into what kernels take: rectangles, and square triangles of two kinds.

Flash kernels know a rectangle and one triangle, in which row i of n sees the columns 0…i. Read from its end, a triangle
in which row i sees the columns i…n − 1 is the same (`reversed`). Rows of a band that see four columns each are cut four
at a time; of a causal slice the columns that all rows see are a rectangle:

    four rows of a band       a causal slice
    r r r r . . .             # # # t . .         #: rectangle
    . r r r t . .             # # # t t .         t: triangle
    . . r r t t .             # # # t t t         r: triangle, reversed
    . . . r t t t

No pair is in two tiles, and none that is not seen is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from opensora_accel.attention.balance import Tile
from opensora_accel.attention.slices.geometry import Slice


def tiles_of_all(slices: Iterable[Slice]) -> tuple[Tile, ...]:
    """The tiles of slices without a common pair, as few as neighbours can be joined into.

    A rank's queries that see two runs of keys which were far apart in the sequence may hold them side by side: that is
    one rectangle, and one call. Of block-causal frames on 8 ranks 15 tiles are left of 50.
    """
    tiles = [tile for each in slices for tile in tiles_of(each)]
    return *join(tile for tile in tiles if not tile.causal), *(tile for tile in tiles if tile.causal)


def join(rectangles: Iterable[Tile]) -> list[Tile]:
    """The same pairs in fewer rectangles: those in one that stand side by side, then those one below the other."""
    return _joined(_joined(rectangles, along="keys"), along="rows")


def _joined(rectangles: Iterable[Tile], *, along: Literal["rows", "keys"]) -> list[Tile]:
    """With those in one that meet along one side, and are the same along the other."""
    other = "rows" if along == "keys" else "keys"

    def place(tile: Tile) -> tuple[int, ...]:
        across, runs = getattr(tile, other), getattr(tile, along)
        return across.start, across.stop, runs.start

    joined: list[Tile] = []
    for tile in sorted(rectangles, key=place):
        last, run = joined[-1] if joined else None, getattr(tile, along)
        if last and getattr(last, other) == getattr(tile, other) and getattr(last, along).stop == run.start:
            both = slice(getattr(last, along).start, run.stop)
            joined[-1] = last._replace(keys=both) if along == "keys" else last._replace(rows=both)
        else:
            joined.append(tile)
    return joined


def tiles_of(each: Slice) -> list[Tile]:
    """The tiles of a slice, with rows and columns counted as the slice counts them."""
    kind = each.kind
    if kind == "full":
        return [_rectangle(each.queries, each.keys)]
    if kind == "causal":
        return _of_causal(each)
    if kind == "inverse causal":
        return _of_inverse(each)
    # The rows at whose beginning no bound, or one alone, cuts: there the band is a slice of another kind.
    first, last = each.k_start - each.lower, each.k_stop - 1 - each.upper
    begins = range(each.q_start, min(max(first, each.q_start), each.q_stop))
    ends = range(max(min(last, each.q_stop), begins.stop), each.q_stop)
    tiles = []
    for rows in (begins, *_steps(range(begins.stop, ends.start), each.upper - each.lower + 1), ends):
        part = each.within(rows, each.keys)
        if part is not None:
            tiles += _of_parallelogram(part) if part.kind == "band" else tiles_of(part)
    return tiles


def _of_causal(each: Slice) -> list[Tile]:
    """Row i sees `seen` columns that all rows see, and i + 1 more, until there are no more."""
    seen = each.q_start + each.upper - each.k_start
    rows = min(len(each.queries), len(each.keys) - seen)
    edge = range(each.k_start + seen, each.k_start + seen + rows)
    below = range(each.q_start + rows, each.q_stop)
    return _all(
        _rectangle(each.queries, range(each.k_start, edge.start)),
        _triangle(range(each.q_start, below.start), edge),
        _rectangle(below, range(edge.start, each.k_stop)),
    )


def _of_inverse(each: Slice) -> list[Tile]:
    """The first rows see all columns, and from then on each row one less, from the first column on."""
    above = range(each.q_start, each.k_start - each.lower)
    rows = range(above.stop, each.q_stop)
    edge = range(each.k_start, each.k_start + len(rows))
    return _all(
        _rectangle(above, edge),
        _triangle(rows, edge, is_reversed=True),
        _rectangle(each.queries, range(edge.stop, each.k_stop)),
    )


def _of_parallelogram(each: Slice) -> list[Tile]:
    """A band of no more rows than each of them sees columns, none of which is cut off at a side."""
    rows = len(each.queries)
    first = range(each.k_start, each.k_start + rows)
    last = range(each.k_stop - rows + 1, each.k_stop)
    return _all(
        _triangle(each.queries, first, is_reversed=True),
        _rectangle(each.queries, range(first.stop, last.start)),
        _triangle(range(each.q_start + 1, each.q_stop), last),
    )


def _steps(rows: range, size: int) -> list[range]:
    """Rows, so many at a time."""
    return [range(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size)]


def _rectangle(rows: range, columns: range) -> Tile:
    return Tile(slice(rows.start, rows.stop), slice(columns.start, columns.stop), causal=False)


def _triangle(rows: range, columns: range, *, is_reversed: bool = False) -> Tile:
    return Tile(slice(rows.start, rows.stop), slice(columns.start, columns.stop), True, is_reversed)


def _all(*tiles: Tile) -> list[Tile]:
    """Those that are not empty."""
    return [tile for tile in tiles if tile.num_pairs]
