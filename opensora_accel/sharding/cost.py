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
        if not (0 < self.bandwidth_bytes_per_s < math.inf and 0 <= self.latency_s < math.inf):
            raise ValueError(
                f"a link needs a finite bandwidth above 0 and a latency of at least 0; got {self}"
            )


@dataclass(frozen=True)
class Collective:
    """One collective on a tensor that is `size_bytes` as a whole (of what the other axes leave of it).

    `cut`: the sizes of the labels that it gathers and scatters, in this order. Where the ranks do not divide them,
    bytes are those of the rank with most to send: of 5 rows on 2 ranks an all-gather passes on 3, as shares travel
    padded to the largest; an all-to-all pads nothing. Without it every share is even.
    """

    kind: Kind
    axis: str
    degree: int
    size_bytes: int
    cut: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"a collective is one of {', '.join(get_args(Kind))}; got {self.kind!r}")
        if self.degree < 1:
            raise ValueError(f"{self.axis} must have at least 1 rank; got {self.degree}")

    @property
    def sent_bytes(self) -> float:
        """By one rank."""
        if self.degree == 1 or self.kind in FREE:
            return 0.0
        if self.kind == "send":
            return self.size_bytes
        if self.kind == "all-reduce":
            return 2 * (self.degree - 1) / self.degree * self.size_bytes
        if self.kind == "all-to-all":
            return self._exchanged_bytes
        return (self.degree - 1) * self._share_bytes

    @property
    def _share_bytes(self) -> float:
        """The largest share of what is gathered or scattered."""
        if not self.cut:
            return self.size_bytes / self.degree
        return self.size_bytes / self.cut[0] * shares(self.cut[0], self.degree)[0]

    @property
    def _exchanged_bytes(self) -> float:
        """Of an all-to-all by its busiest rank: its share of one label, but for its share of the other."""
        if not self.cut:
            return (self.degree - 1) / self.degree * self.size_bytes / self.degree
        gathered, scattered = self.cut
        pairs = zip(shares(gathered, self.degree), shares(scattered, self.degree), strict=True)
        return self.size_bytes / (gathered * scattered) * max(own * (scattered - kept) for own, kept in pairs)

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
    before: Placement,
    after: Placement,
    axis: str,
    degree: int,
    size_bytes: int,
    sizes: Mapping[str, int] | None = None,
) -> Collective | None:
    """What brings a tensor from one placement to another; None where nothing is to be done.

    `sizes`: of the tensor's labels, of what the other axes leave of them, for shares that are not even.

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
    labels = [placement.label for placement in (before, after) if isinstance(placement, Shard)]
    cut = tuple(sizes[label] for label in labels) if sizes is not None else ()
    return Collective(kind, axis, degree, size_bytes, cut)


def shares(size: int, degree: int) -> tuple[int, ...]:
    """Every rank's, by the rule of `torch.tensor_split`, the largest first."""
    base, extra = divmod(size, degree)
    return tuple(base + (rank < extra) for rank in range(degree))


def num_elements(labels: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[label] for label in labels)


def local_sizes(
    sizes: Mapping[str, int], placements: Sequence[Mapping[str, Placement]], degrees: Mapping[str, int]
) -> dict[str, int]:
    """The labels' sizes on the rank with most, where tensors that are placed so lie on the axes.

    A label is cut by every axis over which one of the tensors is sharded along it: 5 rows on 2 ranks are 3.
    """
    left = dict(sizes)
    for axis, degree in degrees.items():
        on_axis = [each.get(axis) for each in placements]
        for label in {placement.label for placement in on_axis if isinstance(placement, Shard)}:
            left[label] = shares(left[label], degree)[0]
    return left


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
