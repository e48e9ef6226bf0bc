"""Whose runs of one microbatch are not those of the others.

Three ranks have run a microbatch of rank 2, which flipped a bit while the step ran, and never again:

    rank 2, in the step    a'          rank 2, again    a, a          rank 1    a, a          rank 0    a

Alike are a' alone, of one rank, and five times a, of three ranks: rank 2 is named. A card that is always wrong gives a'
three times, of one rank, against a of two. Of two ranks alone, each with runs of its own, both are in doubt.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# So many times the noise of kernels is no fault of a card.
_NOISE = 8.0


class Numbers(NamedTuple):
    """What is known of one tensor of a run."""

    # Of all its bits.
    digest: int
    # Sums of parts of it, by which it is said how far two runs are apart.
    sums: tuple[float, ...]

    def distance(self, other: Numbers) -> float:
        """The 2-norm of what the sums differ by; infinite where one of them is no number."""
        total = sum((one - two) ** 2 for one, two in zip(self.sums, other.sums, strict=True))
        return math.sqrt(total) if math.isfinite(total) else math.inf

    @property
    def size(self) -> float:
        """The 2-norm of the sums; infinite where one of them is no number."""
        return self.distance(Numbers(0, (0.0,) * len(self.sums)))


Run = Mapping[str, Numbers]
"""Numbers by what they are of, in the order in which they came: "blocks.0, forward", "the gradient of norm.weight"."""


@dataclass(frozen=True)
class Verdict:
    """Of runs of one microbatch that are not all alike."""

    # Whose runs are not those of most ranks.
    suspects: frozenset[int]
    # How early in a run that shows first, in what, and by which part of its size.
    place: int
    what: str
    share: float
    # Whether what ran in the step differs, and nothing that ran after it.
    is_of_step: bool


def noise_of(runs: Sequence[tuple[int, Run]]) -> dict[str, float]:
    """What two runs of one microbatch differ by on one rank, by name: on the rank where that is least.

    Nothing where some rank's two runs are the same to the bit, as then all have to be.

    Args:
        runs: with the rank of each; its last two are compared.
    """
    by_rank: dict[int, list[Run]] = {}
    for rank, run in runs:
        by_rank.setdefault(rank, []).append(run)
    found = [_distances(*each[-2:]) for each in by_rank.values() if len(each) > 1]
    if not all(found):
        return {}
    return {name: min(each.get(name, 0.0) for each in found) for name in {n for each in found for n in each}}


def _distances(one: Run, other: Run) -> dict[str, float]:
    """How far two runs are apart in what is not the same to the bit, in their order."""
    distances = {}
    for name in dict.fromkeys([*one, *other]):
        if name not in one or name not in other:
            distances[name] = math.inf
        elif one[name].digest != other[name].digest:
            distances[name] = one[name].distance(other[name])
    return distances


def differing(one: Run, other: Run, noise: Mapping[str, float]) -> list[str]:
    """What two runs differ in by more than noise, in their order.

    Args:
        noise: as `noise_of` gives it; {} for kernels that repeat themselves to the bit.
    """
    distances = _distances(one, other)
    if not noise:
        return [*distances]
    # A tensor may by chance have had no noise when it was measured: it may have what is usual.
    shares = [noise[name] / each.size for name, each in one.items() if name in noise and each.size]
    usual = statistics.median(shares) if shares else 0.0

    def bound(name: str) -> float:
        return _NOISE * (noise.get(name, 0.0) + usual * (one[name].size if name in one else 0.0))

    return [name for name, distance in distances.items() if math.isinf(distance) or distance > bound(name)]


def judge(runs: Sequence[tuple[int, Run]], noise: Mapping[str, float]) -> Verdict | None:
    """None where all runs of a microbatch are alike.

    Args:
        runs: with the rank of each; the first one is that of the step.
    """
    groups: list[list[tuple[int, Run]]] = []
    for rank, run in runs:
        alike = next((each for each in groups if not differing(each[0][1], run, noise)), None)
        if alike is None:
            groups.append([(rank, run)])
        else:
            alike.append((rank, run))
    if len(groups) == 1:
        return None

    def votes(group: list[tuple[int, Run]]) -> int:
        return len({rank for rank, _ in group})

    groups.sort(key=lambda group: (votes(group), len(group)), reverse=True)
    most, *others = groups
    suspects = {rank for group in others for rank, _ in group}
    if votes(others[0]) == votes(most):
        suspects |= {rank for rank, _ in most}
    right, wrong = most[0][1], others[0][0][1]
    what = differing(right, wrong, noise)[0]
    share = math.inf
    if what in right and what in wrong and right[what].size:
        share = right[what].distance(wrong[what]) / right[what].size
    is_of_step = len(others) == 1 and [run for _, run in others[0]] == [runs[0][1]]
    return Verdict(frozenset(suspects), [*right, what].index(what), what, share, is_of_step)
