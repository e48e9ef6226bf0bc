"""The collective between two placements, what it sends, and what it takes. Models, not measurements.

Bytes are those that one rank sends, for algorithms that send the least: rings, and pairwise exchange for the
all-to-all. Time is that of `opensora_accel/links.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from opensora_accel import links
from opensora_accel.links import Link, one_level_s, sent_bytes
from opensora_accel.sharding.equation import Equation
from opensora_accel.sharding.placement import Invariant, Partial, Placement, Replicate, Shard

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send", "split", "copy", "pad"]
# Kinds that send nothing. copy: I → R; pad: S → P, zeros around the share.
FREE = ("split", "copy", "pad")


@dataclass(frozen=True)
class Collective:
    """One collective on a tensor. The other mesh axes may have cut the tensor already: `size_bytes` is what they leave.

    `cut` holds the sizes of the labels that the collective gathers and scatters, in this order. Where the ranks do not
    divide them, the bytes are those of the rank that sends most. An all-gather of 5 rows on 2 ranks passes on 3 rows,
    because shares travel padded to the largest. An all-to-all pads nothing. Without `cut` every share is even.

    Raises:
        ValueError: an unknown kind, or fewer ranks than one.
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
        """The bytes that one rank sends."""
        if self.degree == 1 or self.kind in FREE:
            return 0.0
        if self.kind == "all-to-all":
            return self._exchanged_bytes
        padded_bytes: float = self.size_bytes
        if self.cut and self.kind in ("all-gather", "reduce-scatter"):
            # Shares of an uneven cut differ by one, and the first is one of the largest: the busiest rank counts.
            padded_bytes *= self.degree * shares(self.cut[0], self.degree)[0] / self.cut[0]
        return sent_bytes(self._sends, padded_bytes, self.degree)

    @property
    def _sends(self) -> links.Kind:
        return cast(links.Kind, self.kind)

    @property
    def _exchanged_bytes(self) -> float:
        """The bytes that the busiest rank of an all-to-all sends."""
        if not self.cut:
            return (self.degree - 1) / self.degree * self.size_bytes / self.degree
        gathered, scattered = self.cut
        # A rank has `own` of the gathered label and all of the scattered one, of which it keeps `kept`.
        pairs = zip(shares(gathered, self.degree), shares(scattered, self.degree), strict=True)
        return self.size_bytes / (gathered * scattered) * max(own * (scattered - kept) for own, kept in pairs)

    def time_s(self, link: Link) -> float:
        """Seconds on one link, by the formulas of `opensora_accel/links.py`."""
        if self.degree == 1 or self.kind in FREE:
            return 0.0
        size_bytes = self.sent_bytes / sent_bytes(self._sends, 1, self.degree)
        return one_level_s(self._sends, size_bytes, 1, self.degree, (link, link))


# From one placement to another. A pair that is not here has no single collective.
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
    """The collective that brings a tensor from one placement to another; None where there is nothing to do.

    In backward the gradient goes from the dual of `after` to the dual of `before`; this function gives that too.

    Args:
        size_bytes: the tensor's bytes that the other axes leave.
        sizes: the sizes of its labels that the other axes leave, for shares that are not even.

    Raises:
        ValueError: no single collective does it.
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


@dataclass(frozen=True)
class Figures:
    """What turns placements into bytes: the ranks of each axis, the labels' sizes (None: unknown), bytes an element."""

    degrees: Mapping[str, int]
    sizes: Mapping[str, int] | None
    element_bytes: int

    def redistribution(
        self,
        before: Placement,
        after: Placement,
        axis: str,
        labels: Sequence[str],
        others: Mapping[str, Placement],
    ) -> Collective | None:
        """`redistribution` over `axis` of a tensor that lies as `others` say on the other axes.

        Where sizes are not known, the collective has no bytes.
        """
        degree = self.degrees[axis]
        if self.sizes is None:
            return redistribution(before, after, axis, degree, 0)
        sizes = {label: self.sizes[label] for label in labels}
        left = local_sizes(sizes, [others], {other: self.degrees[other] for other in others})
        size_bytes = math.prod(left.values()) * self.element_bytes
        return redistribution(before, after, axis, degree, size_bytes, left)


@dataclass(frozen=True)
class Pending:
    """A reduction that is still to be done, in `direction` "forward" or "backward", and why."""

    direction: str
    why: str
    collective: Collective


def shares(size: int, degree: int) -> tuple[int, ...]:
    """Every rank's share of `size`, by the rule of `torch.tensor_split`, the largest first."""
    base, extra = divmod(size, degree)
    return tuple(base + (rank < extra) for rank in range(degree))


def local_sizes(
    sizes: Mapping[str, int], placements: Sequence[Mapping[str, Placement]], degrees: Mapping[str, int]
) -> dict[str, int]:
    """The labels' sizes on the rank that holds most: 5 rows on 2 ranks are 3.

    Every axis over which one of the tensors is sharded along a label cuts that label.

    Args:
        sizes: the labels' sizes on one device.
        placements: for each tensor, its placement by axis.
    """
    left = dict(sizes)
    for axis, degree in degrees.items():
        on_axis = [each.get(axis) for each in placements]
        for label in {placement.label for placement in on_axis if isinstance(placement, Shard)}:
            left[label] = shares(left[label], degree)[0]
    return left


def einsum_flops(equation: Equation, sizes: Mapping[str, int]) -> int:
    """Multiplications and additions of an einsum, contracted two operands at a time from the left, as torch does."""
    flops, left = 0, equation.operands[0]
    for number, right in enumerate(equation.operands[1:], start=1):
        joined = tuple(dict.fromkeys((*left, *right)))
        # A label that neither the output nor a later operand has is summed here.
        later = set(equation.output).union(*equation.operands[number + 1 :])
        kept = tuple(label for label in joined if label in later)
        contracts = len(kept) < len(joined)
        flops += (2 if contracts else 1) * math.prod(sizes[label] for label in joined)
        left = kept
    return flops
