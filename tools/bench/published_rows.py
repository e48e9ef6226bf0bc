"""A published figure beside its forecast, and how far such forecasts are off: the interval that they deserve.

A step takes longer than its kernels do by themselves: clocks fall under load, and hosts are late. How much longer, and
how far steps differ in that, is what published figures tell. Both are taken from some of them and judged by others:

    sources A, B, C              median of their medians, log(published / forecast): a factor of 1.12
                                 nine of ten of their figures lie within 15 % of the forecast times 1.12
    source D                     of its 8 figures 7 lie within 15 % of the forecast times 1.12

Each source is left out in turn ("leave one source out"), so that no figure is judged by what was fitted to it, nor to
others of the same machine and program.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from opensora_accel.planner.hardware import Hardware

GIB = 2**30
# What a factor for a whole step multiplies.
COMPUTE = ("gemm", "attention", "memory")
# Nine of ten figures are to lie in their interval.
COVERAGE = 0.9
# Of compute, between which a step's seconds are taken for a straight line.
_FACTORS = (1.0, 1.25)
# The widths that are tried.
_WIDTHS = tuple(round(0.02 * number, 2) for number in range(2, 26))


@dataclass(frozen=True)
class Fit:
    """How many times longer a step takes than its kernels, and how far, as a share, it may be off."""

    factor: float
    width: float


@dataclass
class Row:
    """A figure, and what foresees it.

    `seconds(hardware)` are those of a step on a hardware; of memory, `size` is the bytes that are foreseen.
    """

    source: str
    what: str
    unit: str
    published: float
    hardware: Hardware | None = None
    seconds: Callable[[Hardware], float] | None = None
    size: float = 0.0

    @property
    def kind(self) -> str:
        return "seconds" if self.unit == "s" else "memory"

    @cached_property
    def _lines(self) -> dict[int, tuple[float, float]]:
        """Of the low end, the middle and the high end: seconds that no factor multiplies, and those that it does.

        A step is simulated for two factors. What overlaps is not exactly a straight line between them.
        """
        lines = {}
        for sign in (-1, 0, 1):
            first, second = (self._simulated(factor, sign) for factor in _FACTORS)
            slope = (second - first) / (_FACTORS[1] - _FACTORS[0])
            lines[sign] = first - slope * _FACTORS[0], slope
        return lines

    def _simulated(self, factor: float, sign: int) -> float:
        """With compute slower by a factor, and all else at an end of what is uncertain of it."""
        assert self.hardware is not None and self.seconds is not None
        others = self.hardware.uncertainties | dict.fromkeys(COMPUTE, 0.0)
        hardware = dataclasses.replace(
            self.hardware, slowness=dict.fromkeys(COMPUTE, factor), uncertainties=others
        )
        return self.seconds(hardware.bound(sign))

    def _at(self, fit: Fit, sign: int) -> float:
        factor = fit.factor * (1 + sign * fit.width)
        if self.kind == "memory":
            return self.size * factor
        fixed, slope = self._lines[sign]
        return fixed + slope * factor

    def middle(self, factor: float) -> float:
        """What is foreseen, in the figure's unit."""
        return self._at(Fit(factor, 0.0), 0)

    def interval(self, fit: Fit) -> tuple[float, float]:
        """The low and the high end."""
        return self._at(fit, -1), self._at(fit, 1)

    def holds(self, fit: Fit) -> bool:
        low, high = self.interval(fit)
        return low <= self.published <= high

    def error(self, fit: Fit) -> float:
        return self.middle(fit.factor) / self.published - 1


def fitted(rows: Sequence[Row]) -> Fit:
    """From figures of one kind. For the factor each source counts alike, however many figures it has."""
    sources: dict[str, list[Row]] = {}
    for row in rows:
        sources.setdefault(row.source, []).append(row)
    factor = 1.0
    # A factor multiplies only a part of a step, so that it is found in a few turns.
    for _ in range(50):
        medians = [
            statistics.median(math.log(row.published / row.middle(factor)) for row in of_source)
            for of_source in sources.values()
        ]
        turn = math.exp(statistics.median(medians))
        factor *= turn
        if abs(turn - 1) < 1e-4:
            break
    for width in _WIDTHS:
        fit = Fit(factor, width)
        if statistics.mean(row.holds(fit) for row in rows) >= COVERAGE:
            return fit
    return Fit(factor, _WIDTHS[-1])


def left_out(rows: Sequence[Row]) -> list[tuple[Row, Fit]]:
    """Each figure with what was fitted to the figures of all other sources."""
    fits = {
        source: fitted([row for row in rows if row.source != source])
        for source in dict.fromkeys(row.source for row in rows)
    }
    return [(row, fits[row.source]) for row in rows]


def summary(kind: str, judged: Sequence[tuple[Row, Fit]]) -> str:
    """Errors and coverage in a line."""
    errors = [abs(row.error(fit)) for row, fit in judged]
    held = sum(row.holds(fit) for row, fit in judged)
    return (
        f"{kind}: {len(judged)} figures of {len({row.source for row, _fit in judged})} sources, median error "
        f"{statistics.median(errors):.1%}, worst {max(errors):.0%}, {held} in their interval ({held / len(judged):.0%})"
    )
