"""What a collective sends and takes, and how much compute stands beside it. Models, not measurements.

Bytes are those that one rank sends, for algorithms that send the least: rings, and pairwise exchange for the
all-to-all. Time is latency times steps plus bytes over bandwidth (the alpha-beta model of Thakur et al.,
doi:10.1177/1094342005051521).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from opensora_accel.sharding.equation import Equation
from opensora_accel.sharding.placement import Invariant, Partial, Placement, Replicate, Shard

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send", "split", "copy", "pad"]
FREE = ("split", "copy", "pad")
"""Kinds that send nothing. copy: I → R; pad: S → P, zeros around the share."""

LEAST_RATIO = 3.0
"""Compute over communication below which a step is likely to wait: nothing overlaps all of the time."""


@dataclass(frozen=True)
class Link:
    """Of one rank to the others of an axis."""

    bandwidth_bytes_per_s: float
    latency_s: float = 5e-6

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(f"a link needs a bandwidth above 0 and a latency of at least 0; got {self}")


@dataclass(frozen=True)
class Collective:
    """One collective on a tensor that is `size_bytes` as a whole (of what the other axes leave of it)."""

    kind: Kind
    axis: str
    degree: int
    size_bytes: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"a collective is one of {', '.join(get_args(Kind))}; got {self.kind!r}")
        if self.degree < 1:
            raise ValueError(f"{self.axis} must have at least 1 rank; got {self.degree}")

    @property
    def sent_bytes(self) -> float:
        """By one rank."""
        away = (self.degree - 1) / self.degree
        return {
            "all-reduce": 2 * away * self.size_bytes,
            "all-gather": away * self.size_bytes,
            "reduce-scatter": away * self.size_bytes,
            "all-to-all": away * self.size_bytes / self.degree,
            **dict.fromkeys(FREE, 0.0),
            "send": self.size_bytes if self.degree > 1 else 0.0,
        }[self.kind]

    @property
    def num_steps(self) -> int:
        if self.degree == 1 or self.kind in FREE:
            return 0
        return {"all-reduce": 2 * (self.degree - 1), "send": 1}.get(self.kind, self.degree - 1)

    def time_s(self, link: Link) -> float:
        return self.num_steps * link.latency_s + self.sent_bytes / link.bandwidth_bytes_per_s


_KINDS: dict[tuple[type, type], Kind] = {
    (Partial, Replicate): "all-reduce",
    (Partial, Invariant): "all-reduce",
    (Partial, Shard): "reduce-scatter",
    (Shard, Replicate): "all-gather",
    (Shard, Invariant): "all-gather",
    (Shard, Shard): "all-to-all",
    (Shard, Partial): "pad",
    (Replicate, Shard): "split",
    (Invariant, Shard): "split",
    (Invariant, Replicate): "copy",
}


def redistribution(
    before: Placement, after: Placement, axis: str, degree: int, size_bytes: int
) -> Collective | None:
    """What brings a tensor from one placement to another; None where nothing is to be done.

    In backward its gradient goes from the dual of `after` to the dual of `before`, by this function too. Raises
    ValueError for what no single collective does.
    """
    if before == after:
        return None
    kind = _KINDS.get((type(before), type(after)))
    if kind is None:
        reason = (
            "its gradient would come in terms, and has to be whole"
            if isinstance(after, Invariant)
            else "terms are what an einsum leaves, not what one communicates"
        )
        raise ValueError(f"{before} → {after} over {axis}: {reason}")
    return Collective(kind, axis, degree, size_bytes)


def num_elements(labels: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[label] for label in labels)


def bytes_left(size_bytes: int, placements: Mapping[str, Placement], degrees: Mapping[str, int]) -> int:
    """Of a tensor of `size_bytes`, what a rank holds where these axes cut it, rounded up."""
    for axis, placement in placements.items():
        size_bytes = -(-size_bytes // degrees[axis]) if isinstance(placement, Shard) else size_bytes
    return size_bytes


def num_shares(operands: Sequence[Mapping[str, Placement]], degrees: Mapping[str, int]) -> int:
    """Into how many parts an einsum's work is cut: by every axis over which an operand is sharded."""
    cut = [axis for axis in degrees if any(isinstance(each.get(axis), Shard) for each in operands)]
    return math.prod(degrees[axis] for axis in cut)


def einsum_flops(equation: Equation, sizes: Mapping[str, int]) -> int:
    """Multiplications and additions, contracted two operands at a time from the left, as torch does without a path."""
    flops, left = 0, equation.operands[0]
    for number, right in enumerate(equation.operands[1:], start=1):
        joined = tuple(dict.fromkeys((*left, *right)))
        later = set(equation.output).union(*equation.operands[number + 1 :])
        kept = tuple(label for label in joined if label in later)
        contracts = len(kept) < len(joined)
        flops += (2 if contracts else 1) * num_elements(joined, sizes)
        left = kept
    return flops


@dataclass(frozen=True)
class Balance:
    """Compute beside communication, on one rank."""

    compute_s: float
    communication_s: float

    @property
    def ratio(self) -> float:
        return self.compute_s / self.communication_s if self.communication_s else math.inf

    @property
    def is_bound(self) -> bool:
        """Whether communication is too much to count on hiding it."""
        return self.ratio < LEAST_RATIO

    def __str__(self) -> str:
        warning = f" · warning: under {LEAST_RATIO:g}:1, it will be waited for" if self.is_bound else ""
        return (
            f"compute {1e3 * self.compute_s:.3g} ms, communication {1e3 * self.communication_s:.3g} ms "
            f"(modelled, forward and backward): {self.ratio:.3g}:1{warning}"
        )
