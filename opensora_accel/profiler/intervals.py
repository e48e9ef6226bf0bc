"""Pieces of time, [start, end) in seconds: what they cover together, and what of some lies beside no other.

compute          ████████░░░░████
communication        ▒▒▒▒▒▒▒▒▒▒        exposed: the part under ░
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants as intervals that are apart, in order.

    >>> union([(2, 4), (0, 1), (3, 5)])
    [(0, 1), (2, 5)]
    """
    apart: list[Interval] = []
    first, last = inf, -inf
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if start > last:
            if last > first:
                apart.append((first, last))
            first, last = start, end
        elif end > last:
            last = end
    if last > first:
        apart.append((first, last))
    return apart


def length(intervals: Iterable[Interval]) -> float:
    """Seconds that at least one of the intervals covers."""
    return sum(end - start for start, end in union(intervals))


def length_of_columns(starts: NDArray[float64], ends: NDArray[float64]) -> float:
    """`length`, of millions of intervals: each adds what lies behind the end of all that began before it."""
    import numpy  # reports have it; a profiled run need not

    order = numpy.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    covered_until = numpy.concatenate(([-inf], numpy.maximum.accumulate(ends)[:-1]))[: len(starts)]
    return float(numpy.maximum(ends - numpy.maximum(starts, covered_until), 0.0).sum())


def exposed_seconds(compute: Iterable[Interval], communication: Iterable[Interval]) -> float:
    """Seconds in which there is communication and no compute; both are intervals (start_s, end_s) in any order.

    The length of the union of communication, less its overlap with the union of compute.

        >>> exposed_seconds(compute=[(0, 2), (3, 4)], communication=[(1, 3.5), (2, 3)])
        1.0
    """
    computes, exposed, i = union(compute), 0.0, 0
    for start, end in union(communication):
        while i < len(computes) and computes[i][1] <= start:
            i += 1
        exposed += end - start
        j = i
        while j < len(computes) and computes[j][0] < end:
            exposed -= min(end, computes[j][1]) - max(start, computes[j][0])
            j += 1
    return exposed
