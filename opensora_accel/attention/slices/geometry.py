"""One slice of an attention mask: queries in a row, keys in a row, and the diagonals between which they see each other.

Queries 2…5 and keys 1…5 may form four kinds of slice; a query is a row, a key a column, and # is a pair that is seen:

    full         causal       inverse causal   band
    # # # # #    # # . . .    # # # # #        # # . . .
    # # # # #    # # # . .    . # # # #        . # # . .
    # # # # #    # # # # .    . . # # #        . . # # .
    # # # # #    # # # # #    . . . # #        . . . # #

On a diagonal of a mask k − q is the same. Above, causal are the diagonals up to 0 (query 2 sees keys 1 and 2, query 5
all of them), inverse causal those from −1 on, and a band is both. So whatever is cut out of a slice, by rows and by
columns, is a slice between the same diagonals.

A slice is tight: its first and last row and column see something, and its diagonals are ones that it has. Then equal
slices are equal numbers.

Source: the kinds and their alignment are those of MagiAttention (arXiv:2505.13211).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

Kind = Literal["full", "causal", "inverse causal", "band"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Number = TypeVar("Number", int, Tensor)


class Slice(NamedTuple):
    """The queries q_start…q_stop − 1 see those of the keys k_start…k_stop − 1 for which lower ≤ k − q ≤ upper."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lower: int
    upper: int

    @classmethod
    def of(cls, queries: range, keys: range, kind: Kind = "full") -> Slice:
        """A slice by its kind.

        Args:
            queries, keys: of step 1, none of them empty.
            kind: "full"; "causal", where the last query sees all keys, and each before it one less; "inverse causal",
                where the first query sees all keys, and each behind it one less; "band", where the first query sees
                len(keys) − len(queries) + 1 of them, and each behind it as many, one further.

        Raises:
            ValueError: an empty range, a step that is not 1, an unknown kind, or a band that no query is in.
        """
        for name, numbers in (("queries", queries), ("keys", keys)):
            if not isinstance(numbers, range) or numbers.step != 1 or not numbers or numbers.start < 0:
                raise ValueError(
                    f"{name} must be a range of step 1 that begins at 0 or later and is not empty; got {numbers!r}"
                )
        if kind not in KINDS:
            raise ValueError(f"a slice is one of {', '.join(KINDS)}; got {kind!r}")
        least, most = keys.start - (queries.stop - 1), keys.stop - 1 - queries.start
        # The diagonals that end in the corner of the last query and key, and begin in that of the first ones.
        upper = keys.stop - queries.stop if kind in ("causal", "band") else most
        lower = keys.start - queries.start if kind in ("inverse causal", "band") else least
        made = cls(queries.start, queries.stop, keys.start, keys.stop, lower, upper).tight()
        if made is None:
            raise ValueError(
                f"a band of {len(queries)} queries needs at least as many keys; got {len(keys)}: the first query would "
                "see less than one"
            )
        return made

    @property
    def kind(self) -> Kind:
        """Which pairs of its queries and keys it has."""
        ends = self.upper < self.k_stop - 1 - self.q_start
        begins = self.lower > self.k_start - (self.q_stop - 1)
        return ("band" if begins else "causal") if ends else ("inverse causal" if begins else "full")

    @property
    def queries(self) -> range:
        """Its rows."""
        return range(self.q_start, self.q_stop)

    @property
    def keys(self) -> range:
        """Its columns."""
        return range(self.k_start, self.k_stop)

    @property
    def area(self) -> int:
        """How many pairs see each other."""
        return self.area_of(self)

    def area_of(self, other: Slice) -> int:
        """How many pairs both have."""
        common = self.intersection(other)
        return 0 if common is None else _area(*common)

    def intersection(self, other: Slice) -> Slice | None:
        """The pairs that both have; None where there are none."""
        return Slice(
            max(self.q_start, other.q_start),
            min(self.q_stop, other.q_stop),
            max(self.k_start, other.k_start),
            min(self.k_stop, other.k_stop),
            max(self.lower, other.lower),
            min(self.upper, other.upper),
        ).tight()

    def within(self, queries: range, keys: range) -> Slice | None:
        """Its pairs of these queries and keys, of step 1; None where there are none."""
        return Slice(
            max(self.q_start, queries.start),
            min(self.q_stop, queries.stop),
            max(self.k_start, keys.start),
            min(self.k_stop, keys.stop),
            self.lower,
            self.upper,
        ).tight()

    def moved(self, queries: int, keys: int) -> Slice:
        """The same slice, so many queries and keys further on."""
        shift = keys - queries
        return Slice(
            self.q_start + queries,
            self.q_stop + queries,
            self.k_start + keys,
            self.k_stop + keys,
            self.lower + shift,
            self.upper + shift,
        )

    def tight(self) -> Slice | None:
        """The same pairs without rows, columns and diagonals that have none; None where no pair is left."""
        q_start, q_stop, k_start, k_stop, lower, upper = self
        if lower > upper:
            return None
        # Row q has a pair where its diagonals reach a column: q + upper ≥ k_start and q + lower < k_stop.
        q_start, q_stop = max(q_start, k_start - upper), min(q_stop, k_stop - lower)
        k_start, k_stop = max(k_start, q_start + lower), min(k_stop, q_stop + upper)
        if q_start >= q_stop or k_start >= k_stop:
            return None
        lower, upper = max(lower, k_start - (q_stop - 1)), min(upper, k_stop - 1 - q_start)
        return Slice(q_start, q_stop, k_start, k_stop, lower, upper)


def _area(
    q_start: Number, q_stop: Number, k_start: Number, k_stop: Number, lower: Number, upper: Number
) -> Number:
    """The number of pairs of a slice whose rows, columns and diagonals are not empty; it need not be tight."""
    rows, columns = q_stop - q_start, k_stop - k_start
    # Diagonals as counted from the first query and key.
    shift = q_start - k_start
    return _pairs_up_to(rows, columns, upper + shift) - _pairs_up_to(rows, columns, lower + shift - 1)


def _pairs_up_to(rows: Number, columns: Number, diagonal: Number) -> Number:
    """Of a rectangle's pairs those with k − q ≤ diagonal; of many rectangles, in tensors.

    Row q has q + diagonal + 1 of them, but not below 0 and not above `columns`.
    """
    begun = _triangle(rows + diagonal) - _triangle(diagonal)
    beyond = _triangle(rows + diagonal - columns) - _triangle(diagonal - columns)
    return begun - beyond


def _triangle(side: Number) -> Number:
    """1 + 2 + … + side, and 0 below 1."""
    side = side.clamp(min=0) if isinstance(side, Tensor) else max(side, 0)
    return side * (side + 1) // 2


def as_table(slices: Iterable[Slice]) -> Tensor:
    """[N, 6], int64: a slice a row."""
    return torch.tensor(list(slices), dtype=torch.int64).reshape(-1, 6)


def cut(table: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What runs of queries see of runs of keys.

    Args:
        table: [N, 6], tight slices.
        queries, keys: [R, 2] and [K, 2], where runs start and stop.

    Returns:
        The slices [M, 6], tight, and for each the number of its run of queries and of keys.
    """
    # By queries first, which leaves few slices for the many runs of keys. Every row and column of a tight slice has
    # pairs, so that none is empty where runs meet.
    rows, of_table = _meeting(table[:, :2], queries)
    of_rows = _within(table[of_table], queries[rows], slice(0, 2))
    columns, of_cut = _meeting(of_rows[:, 2:4], keys)
    parts = _within(of_rows[of_cut], keys[columns], slice(2, 4))
    return parts, rows[of_cut], columns


def pairs_of_cells(table: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many pairs runs of queries have with runs of keys, of a table [N, 6] of tight slices.

    Args:
        queries, keys: [R, 2] and [K, 2], where runs start and stop.

    Returns:
        Of those that have any, in order: the number of the run of queries, that of the run of keys, and the pairs [M].
    """
    parts, rows, columns = cut(table, queries, keys)
    cells, of_cell = (rows * len(keys) + columns).unique(return_inverse=True)
    pairs = torch.zeros_like(cells).index_add_(0, of_cell, _area(*parts.unbind(1)))
    return cells // max(len(keys), 1), cells % max(len(keys), 1), pairs


def _meeting(ones: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs (of `others`, of `ones`) of runs [n, 2] and [m, 2], empty ones too, that have a number in common."""
    found = [
        (part[:, None, 0].maximum(ones[:, 0]) < part[:, None, 1].minimum(ones[:, 1])).nonzero()
        + torch.tensor([first, 0])
        for first, part in _portions(others, len(ones))
    ]
    numbers = torch.cat([torch.zeros(0, 2, dtype=torch.int64), *found])
    return numbers[:, 0], numbers[:, 1]


def _within(table: Tensor, runs: Tensor, side: slice) -> Tensor:
    """Slices [N, 6], each cut by a run [N, 2] of queries (side 0:2) or keys (2:4), and tight: as `Slice.tight`."""
    table = table.clone()
    table[:, side] = torch.stack(
        [table[:, side.start].maximum(runs[:, 0]), table[:, side.start + 1].minimum(runs[:, 1])], 1
    )
    q_start, q_stop, k_start, k_stop, lower, upper = table.unbind(1)
    q_start, q_stop = q_start.maximum(k_start - upper), q_stop.minimum(k_stop - lower)
    k_start, k_stop = k_start.maximum(q_start + lower), k_stop.minimum(q_stop + upper)
    lower, upper = lower.maximum(k_start - (q_stop - 1)), upper.minimum(k_stop - 1 - q_start)
    return torch.stack([q_start, q_stop, k_start, k_stop, lower, upper], 1)


def _portions(table: Tensor, width: int) -> list[tuple[int, Tensor]]:
    """Rows of a table, so many at a time that with `width` numbers each they make no large tensor; and the first's."""
    size = max(1, (1 << 20) // max(width, 1))
    return [(number * size, part) for number, part in enumerate(table.split(size))]


def first_overlap(table: Tensor) -> tuple[int, int] | None:
    """Two rows of a table [N, 6] of tight slices that have a pair in common; None where there are none."""
    q_start, q_stop, k_start, k_stop, lower, upper = table.unbind(1)
    # A slice may meet those that begin before it ends, when they are in the order of their first queries.
    order = q_start.argsort(stable=True)
    begins, numbers = q_start[order], torch.arange(len(table))
    until = torch.searchsorted(begins, q_stop[order].contiguous())
    # As many pairs of slices at a time as make no large tensor.
    most, first = 1 << 20, 0
    while first < len(table):
        counts = (until[first:] - numbers[first:] - 1).cumsum(0)
        last = first + max(1, int(torch.searchsorted(counts, most, right=True)))
        sizes = until[first:last] - numbers[first:last] - 1
        ones = order[numbers[first:last].repeat_interleave(sizes)]
        begin = (numbers[first:last] + 1).repeat_interleave(sizes)
        within = torch.arange(len(begin)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        others = order[begin + within]
        first = last
        rows = torch.maximum(q_start[ones], q_start[others]), torch.minimum(q_stop[ones], q_stop[others])
        columns = torch.maximum(k_start[ones], k_start[others]), torch.minimum(k_stop[ones], k_stop[others])
        # Every diagonal between its corners passes through a rectangle.
        lowest = torch.stack([lower[ones], lower[others], columns[0] - (rows[1] - 1)]).amax(0)
        highest = torch.stack([upper[ones], upper[others], columns[1] - 1 - rows[0]]).amin(0)
        meet = (rows[0] < rows[1]) & (columns[0] < columns[1]) & (lowest <= highest)
        if meet.any():
            at = int(meet.nonzero()[0])
            return int(ones[at]), int(others[at])
    return None


def common_area(table: Tensor, other: Tensor) -> int:
    """How many pairs two masks have in common, of slices a row: [N, 6] and [M, 6]."""
    total = 0
    for some in table.split(max(1, (1 << 20) // max(len(other), 1))):
        ones, others = some.unsqueeze(1).unbind(2), other.unsqueeze(0).unbind(2)  # each [n, 1] and [1, M]
        # The greater of where they begin, and the lesser of where they end: rows, columns, diagonals.
        starts = [torch.maximum(ones[i], others[i]) for i in (0, 2, 4)]
        stops = [torch.minimum(ones[i], others[i]) for i in (1, 3, 5)]
        meet = (starts[0] < stops[0]) & (starts[1] < stops[1]) & (starts[2] <= stops[2])
        rows, columns, diagonals = (
            (start[meet], stop[meet]) for start, stop in zip(starts, stops, strict=True)
        )
        total += int(_area(*rows, *columns, *diagonals).sum())
    return total


def areas_of_corners(table: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """[n, m]: the pairs of the rows before each of `queries` [n] and the columns before each of `keys` [m]."""
    total = torch.zeros(len(queries), len(keys), dtype=torch.int64)
    for some in table.split(max(1, (1 << 20) // max(total.numel(), 1))):
        q_start, q_stop, k_start, k_stop, lower, upper = some[:, :, None, None].unbind(1)
        # An empty rectangle has a side of 0, and no pairs up to any diagonal.
        q_stop = queries[:, None].minimum(q_stop).maximum(q_start)
        k_stop = keys.minimum(k_stop).maximum(k_start)
        total += _area(q_start, q_stop, k_start, k_stop, lower, upper).sum(0)
    return total


def area_before(table: Tensor, queries: Tensor) -> Tensor:
    """[n]: the pairs of the rows before each of `queries` [n], of a table [N, 6] of tight slices.

    A row's number of pairs, min(k_stop, q + upper + 1) − max(k_start, q + lower), is made of lines: it rises by one a
    row until the last column is reached, and falls by one a row from where the first column is left. So the slices are
    looked at once, each as four changes of value and slope, and not once for each of `queries`.
    """
    if not len(table):
        return torch.zeros_like(queries)
    q_start, q_stop, k_start, k_stop, lower, upper = table.unbind(1)
    # From these rows on the last column is seen, and the first one is not; within the slice or at its ends.
    reaches = (k_stop - 1 - upper).maximum(q_start).minimum(q_stop)
    leaves = (k_start - lower).maximum(q_start).minimum(q_stop)

    def pairs_in(row: Tensor) -> Tensor:
        return (row + upper + 1).minimum(k_stop) - (row + lower).maximum(k_start)

    one, none = torch.ones_like(q_start), torch.zeros_like(q_start)
    return _integral(
        rows=torch.cat([q_start, reaches, leaves, q_stop]),
        values=torch.cat([pairs_in(q_start), none, none, -pairs_in(q_stop)]),
        slopes=torch.cat([one, -one, -one, one]),
        queries=queries,
    )


def _integral(rows: Tensor, values: Tensor, slopes: Tensor, queries: Tensor) -> Tensor:
    """The sum over the rows before each of `queries` of a function that changes its value and slope at `rows`."""
    order = rows.argsort()
    rows, values, slopes = rows[order], values[order], slopes[order]
    # f(q) = Σ value_i + slope_i (q − row_i) over the changes up to q. Summed over the rows row_i…q − 1, a change gives
    # value_i n + slope_i n (n − 1) / 2 with n = q − row_i: a polynomial of q, whose coefficients add up.
    twice = 2 * values - slopes
    constant = (slopes * rows * rows - twice * rows).cumsum(0)
    linear = (twice - 2 * slopes * rows).cumsum(0)
    square = slopes.cumsum(0)
    at = torch.searchsorted(rows, queries) - 1
    begun, at = at >= 0, at.clamp(min=0)
    total = constant[at] + linear[at] * queries + square[at] * queries * queries
    return torch.where(begun, total // 2, 0)
