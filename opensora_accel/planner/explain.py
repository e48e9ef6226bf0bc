"""Why: what fills the memory of a Plan, what its step waits for, which one change helps most, and why neighbours lose.

A neighbour differs in one choice: the degrees, how parameters are sharded, checkpoints with offload, pieces of the MLP,
shards on the host, or the levels of collectives. Of dp_shard=4 × ulysses=2 with full checkpoints, the same degrees with
selective ones are a neighbour, and dp_shard=2 × ulysses=4 with full ones is another; both changed at once is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from opensora_accel.plan import MESH_AXES, Plan
from opensora_accel.planner.candidates import GIB, Candidate, Outcome, describe
from opensora_accel.planner.search import reason_of
from opensora_accel.planner.trace import Trace

# Fields that are one choice together.
_CHOICES: tuple[tuple[str, ...], ...] = (
    ("ring", "ulysses", "tp", "data"),
    ("sharding", "num_shards"),
    ("checkpoint", "offload"),
    ("mlp_chunks",),
    ("cpu_offload",),
    ("two_level",),
    ("overlap_ulysses",),
    ("prefetch",),
    ("reduce_dtype",),
    ("gather_dtype",),
)
_MOST_NEIGHBOURS = 8


@dataclass(frozen=True)
class Neighbour:
    """A Plan that is one choice away."""

    change: str
    candidate: Candidate
    why: str


@dataclass(frozen=True)
class Explanation:
    """What is said of one Plan."""

    plan: Plan
    # "backward of block 39".
    peak: str
    bytes_by_kind: tuple[tuple[str, int], ...]
    seconds_by_kind: tuple[tuple[str, float], ...]
    # Which axes stay in a node and which leave it; "" where there is only one.
    placement: str
    # Which tokens see each other, and how even that is over a ring; "" where all see all.
    attention: str
    # What bounds the step, in a sentence.
    bound: str
    # The change that helps most, in a sentence; "" where none does.
    helps: str
    neighbours: tuple[Neighbour, ...]
    # Of the best plan: changes that are not the planner's to make, each with what it brings and why not.
    yours: tuple[str, ...] = ()
    # How far the intervals can be trusted, as the hardware's sources have it.
    intervals: str = ""

    def text(self) -> str:
        """For a terminal."""
        lines = [f"{describe(self.plan)}", f"  memory at the peak ({self.peak}):"]
        lines += [
            f"    {size / GIB:8.2f} GiB  {kind}" for kind, size in self.bytes_by_kind if size >= GIB // 100
        ]
        if self.placement:
            lines.append(f"  placement: {self.placement}")
        if self.attention:
            lines.append(f"  attention: {self.attention}")
        whole = sum(seconds for _kind, seconds in self.seconds_by_kind) or 1.0
        lines.append(f"  the step: {self.bound}")
        lines += [
            f"    {seconds:8.3f} s  {seconds / whole:4.0%}  {kind}"
            for kind, seconds in self.seconds_by_kind
            if seconds > 0.002 * whole
        ]
        if self.helps:
            lines.append(f"  what helps most: {self.helps}")
        if self.neighbours:
            lines.append("  one choice away:")
            lines += [f"    {each.change}: {each.why}" for each in self.neighbours]
        if self.yours:
            lines.append("  yours to choose:")
            lines += [f"    {each}" for each in self.yours]
        if self.intervals:
            lines.append(f"  the intervals: {self.intervals}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_dict(),
            "peak": self.peak,
            "bytes_by_kind": dict(self.bytes_by_kind),
            "seconds_by_kind": dict(self.seconds_by_kind),
            "placement": self.placement,
            "attention": self.attention,
            "bound": self.bound,
            "helps": self.helps,
            "neighbours": [{"change": each.change, "why": each.why} for each in self.neighbours],
            "yours": list(self.yours),
            "intervals": self.intervals,
        }


def explain(candidate: Candidate, outcome: Outcome) -> Explanation:
    """Explains a Plan of the outcome, or one that was asked about."""
    kinds = sorted(candidate.bytes_by_kind.items(), key=lambda item: -item[1])
    seconds = sorted(candidate.seconds_by_kind.items(), key=lambda item: -item[1])
    near = sorted(
        neighbours(candidate, outcome),
        key=lambda each: (not each.candidate.fits, each.candidate.seconds_per_sample),
    )
    return Explanation(
        candidate.plan,
        _peak(candidate),
        tuple(kinds),
        tuple(seconds),
        placement_of(
            candidate.plan, min(outcome.request.world_size, outcome.request.hardware.ranks_per_node)
        ),
        attention_of(candidate.trace),
        bound_of(candidate.seconds_by_kind),
        _helps(candidate, near),
        tuple(near[:_MOST_NEIGHBOURS]),
        tuple(
            f"{change}: {_why(outcome, candidate, other)} ({why})"
            for other, why in outcome.priced
            if (change := change_between(candidate.plan, other.plan))
        ),
        outcome.request.hardware.sources.get("uncertainties", ""),
    )


def _peak(candidate: Candidate) -> str:
    if candidate.trace is None:
        return "estimated"
    peak = candidate.trace.peak
    return (
        f"{peak.phase} of block {peak.block}"
        if peak.block is not None
        else f"{peak.phase}, outside of blocks"
    )


def placement_of(plan: Plan, ranks_per_node: int) -> str:
    """Which axes stay in a node and which leave it, with their degrees; "" where all ranks are on one node.

    The innermost axis varies first, and consecutive ranks fill a node: with ulysses=4 and ring=4 on nodes of 8, each
    node has two whole groups of ulysses, and a ring's ranks 0, 4, 8, 12 are on two nodes.
    """
    if plan.world_size <= ranks_per_node:
        return ""
    stays, leaves, span = list[str](), list[str](), 1
    for axis, degree in reversed(list(zip(MESH_AXES, plan.degrees, strict=True))):
        span *= degree
        if degree > 1:
            # Where groups do not fill a node, some of them stand on two.
            (leaves if ranks_per_node % span else stays).append(f"{axis}={degree}")
    return f"{', '.join(stays) or 'no axis'} within a node, {', '.join(leaves)} between nodes"


def attention_of(trace: Trace | None) -> str:
    """Which share of all pairs a mask shows, and how even ranks of a ring are; "" of a step without such attention."""
    if trace is None or trace.attention is None:
        return ""
    deal = trace.attention.deal
    share = deal.mask.area / deal.mask.num_queries**2
    text = f"of {deal.mask.num_queries:,} tokens each sees {share:.0%} on the average"
    if len(deal.areas) == 1:
        return text
    return (
        f"{text}; the busiest rank of the ring has {deal.imbalance:.2f} times the mean of pairs (runs in order: "
        f"{trace.attention.imbalance_in_order:.2f})"
    )


def bound_of(seconds_by_kind: Mapping[str, float]) -> str:
    """What takes most of the step, as a sentence."""
    groups = {
        "compute": 0.0,
        "communication": 0.0,
        "copies to the host and back": 0.0,
        "starting operators": 0.0,
    }
    names: dict[str, tuple[float, str]] = {}
    for kind, seconds in seconds_by_kind.items():
        group = group_of_kind(kind)
        groups[group] += seconds
        names[group] = max(names.get(group, (0.0, "")), (seconds, kind))
    whole = sum(groups.values()) or 1.0
    first = max(groups, key=lambda name: groups[name])
    largest, kind = names.get(first, (0.0, ""))
    return (
        f"bound by {first} ({groups[first] / whole:.0%}), most of it {kind} ({largest / whole:.0%}); it waits for "
        f"communication {groups['communication'] / whole:.0%} of the time"
    )


def group_of_kind(kind: str) -> str:
    """Compute, communication, copies or the host: what a kind of a step's seconds belongs to."""
    if " over " in kind or kind in ("ring", "parameters sent"):
        return "communication"
    if kind.startswith("cop"):
        return "copies to the host and back"
    return "starting operators" if kind == "host" else "compute"


def neighbours(candidate: Candidate, outcome: Outcome) -> Iterator[Neighbour]:
    """Candidates one choice away, each with what decides between the two."""
    for other in outcome.candidates:
        change = change_between(candidate.plan, other.plan)
        if change:
            yield Neighbour(change, other, _why(outcome, candidate, other))


def change_between(plan: Plan, other: Plan) -> str:
    """The one choice in which two Plans differ, as what to set; "" where it is none or several."""
    differing = [
        choice for choice in _CHOICES if any(getattr(plan, name) != getattr(other, name) for name in choice)
    ]
    # Other degrees bring another number of shards with them.
    if differing == list(_CHOICES[:2]) and plan.sharding == other.sharding:
        is_all = plan.num_shards == plan.mixed and other.num_shards == other.mixed
        differing = differing[:1] if is_all else differing
    if len(differing) != 1:
        return ""
    names = MESH_AXES if differing[0][0] in ("ring", "sharding") else ()
    fields = [
        *dict.fromkeys((*(name for name in differing[0] if name not in ("data", "num_shards")), *names))
    ]
    return ", ".join(
        f"{name}={getattr(other, name)}" for name in fields if getattr(plan, name) != getattr(other, name)
    )


def _why(outcome: Outcome, candidate: Candidate, other: Candidate) -> str:
    if not other.fits:
        return reason_of(outcome.request, other, candidate)
    ratio = other.seconds_per_sample / candidate.seconds_per_sample - 1
    smaller = (candidate.memory_bytes[1] - other.memory_bytes[1]) / GIB
    memory = f"{abs(smaller):.1f} GiB {'less' if smaller > 0 else 'more'}"
    unsure = "" if other.is_traced else ", by estimate"
    return f"{abs(ratio):.1%} {'slower' if ratio >= 0 else 'faster'}{unsure}, with {memory}"


def _helps(candidate: Candidate, near: list[Neighbour]) -> str:
    """The best neighbour: of a Plan that does not fit the fastest one that does, else the one that saves most time."""
    fitting = [each for each in near if each.candidate.fits]
    if not fitting:
        smallest = min(near, key=lambda each: each.candidate.memory_bytes[1], default=None)
        if candidate.fits or smallest is None:
            return ""
        needs = smallest.candidate.memory_bytes[1] / GIB
        return f"no single change makes it fit; {smallest.change} comes nearest, with up to {needs:.1f} GiB"
    best = fitting[0]
    if not candidate.fits:
        return f"{best.change} fits ({best.candidate.memory_bytes[1] / GIB:.1f} GiB at most)"
    gain = 1 - best.candidate.seconds_per_sample / candidate.seconds_per_sample
    if gain > 0.005:
        return f"{best.change} saves {gain:.1%} of the time"
    lightest = min(fitting, key=lambda each: each.candidate.memory_bytes[1])
    saved = (candidate.memory_bytes[1] - lightest.candidate.memory_bytes[1]) / GIB
    if saved < 0.1:
        return ""
    costs = lightest.candidate.seconds_per_sample / candidate.seconds_per_sample - 1
    return f"nothing makes it faster by one change; {lightest.change} frees {saved:.1f} GiB for {costs:.1%} more time"
