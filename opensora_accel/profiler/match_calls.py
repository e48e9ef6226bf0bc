"""Calls of several ranks side by side: what the network took, who was waited for, which link was slow.

The n-th call of a group in a step is the same one on all its ranks, and cannot begin before the last of them has come:

    rank 0   computes   |--waits---====|      rank 0's call takes 14, of which it waits 10 for rank 1;
    rank 1   computes longer   |=======|      the network's share is what comes after that, on both

With P2P, where ranks exchange in a ring, the same holds for the n-th exchange.
"""

from __future__ import annotations

import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opensora_accel.profiler.analysis import (
    AxisAnalysis,
    CongestedCall,
    CongestedLink,
    KindAnalysis,
)
from opensora_accel.profiler.intervals import Interval, length
from opensora_accel.profiler.rank_summary import (
    MESSAGES,
    CallKind,
    Calls,
    RankSummary,
    StepSummary,
)

# A call is congested if its bandwidth is under this share of the median of its kind.
CONGESTED_SHARE = 0.5


@dataclass
class MatchedCalls:
    """The calls of one rank in one step, each with the time at which the last rank of its group had come."""

    rank: int
    kinds: list[CallKind] = field(default_factory=list)
    starts: array[float] = field(default_factory=lambda: array("d"))
    ready: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    exposed: array[float] = field(default_factory=lambda: array("d"))

    def transfers(self) -> Iterable[float]:
        """Seconds of each call after everybody had come."""
        return (max(end - ready, 0.0) for ready, end in zip(self.ready, self.ends, strict=True))

    def exposed_transfers(self) -> Iterable[Interval]:
        """When compute waited for the network itself.

        Without late ranks a call would have begun to transfer at once, and as much of it would have been hidden.
        """
        columns = (self.starts, self.ready, self.ends, self.exposed)
        return (
            (end - max(0.0, exposed - (ready - start)), end)
            for start, ready, end, exposed in zip(*columns, strict=True)
        )


def match_calls(
    ranks: Sequence[RankSummary], summaries: Sequence[Mapping[int, StepSummary]], counted: Sequence[int]
) -> dict[tuple[int, int], MatchedCalls]:
    """By place in `ranks` and step."""
    matched = {(i, number): MatchedCalls(rank.run.rank) for i, rank in enumerate(ranks) for number in counted}
    place = {rank.run.rank: i for i, rank in enumerate(ranks)}
    groups = {
        (group, tuple(rank.run.groups.get(group, (rank.run.rank,))))
        for rank, summary in zip(ranks, summaries, strict=True)
        for step in summary.values()
        for group in step.calls
    }
    for group, members in sorted(groups):
        there = [place[member] for member in members if member in place]
        for number in counted:
            columns = [summaries[i][number].calls.get(group) or Calls() for i in there]
            together = len(there) == len(members) and _same_calls(columns)
            arrivals = (
                array("d", map(max, *[column.starts for column in columns]))
                if together and len(columns) > 1
                else None
            )
            for i, column in zip(there, columns, strict=True):
                into = matched[i, number]
                into.kinds.extend(column.kinds[which] for which in column.which)
                into.starts.extend(column.starts)
                into.ready.extend(arrivals if arrivals is not None else column.starts)
                into.ends.extend(column.ends)
                into.exposed.extend(column.exposed)
    return matched


def _same_calls(columns: Sequence[Calls]) -> bool:
    """Whether the n-th call is the same one on all ranks."""
    if len({len(column.which) for column in columns}) > 1:
        return False
    kinds = [
        [
            "message" if column.kinds[which].kind in MESSAGES else column.kinds[which].kind
            for which in column.which
        ]
        for column in columns
    ]
    return all(kind == kinds[0] for kind in kinds)


def axes_of(
    ranks: Sequence[RankSummary], matched: Mapping[tuple[int, int], MatchedCalls], num_steps: int
) -> list[AxisAnalysis]:
    """The axes by the bytes that they sent. Calls that run at the same time take that time once."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 6)
    for calls in matched.values():
        intervals: dict[str, list[list[Interval]]] = defaultdict(lambda: [[], [], [], []])
        columns = (calls.kinds, calls.starts, calls.ready, calls.ends, calls.exposed)
        for kind, start, ready, end, exposed in zip(*columns, strict=True):
            of_axis, into = sums[kind.axis], intervals[kind.axis]
            of_axis[0] += 1
            of_axis[1] += kind.sent_bytes
            into[0].append((start, end))
            into[1].append((ready, end))
            if exposed > 0:
                into[2].append((end - exposed, end))
                into[3].append((end - max(0.0, exposed - (ready - start)), end))
        for axis, columns_of_axis in intervals.items():
            for i, column in enumerate(columns_of_axis, start=2):
                sums[axis][i] += length(column)
    links = {axis: speed for rank in ranks for axis, speed in rank.run.link_bytes_per_s.items()}
    rows = []
    for axis in sorted(sums, key=lambda axis: -sums[axis][1]):
        num_calls, sent, seconds, transfer, exposed, exposed_transfer = (
            value / len(ranks) / num_steps for value in sums[axis]
        )
        rows.append(
            AxisAnalysis(
                axis=axis,
                calls=num_calls,
                sent_bytes=sent,
                seconds=seconds,
                transfer_s=transfer,
                exposed_s=exposed,
                exposed_transfer_s=exposed_transfer,
                exposed_share=exposed / seconds if seconds > 0 else None,
                exposed_transfer_share=exposed_transfer / transfer if transfer > 0 else None,
                bytes_per_s=sent / seconds if seconds > 0 else None,
                transfer_bytes_per_s=sent / transfer if transfer > 0 else None,
                link_bytes_per_s=links.get(axis),
            )
        )
    return rows


def kinds_of(
    matched: Mapping[tuple[int, int], MatchedCalls], num_ranks: int, num_steps: int
) -> list[KindAnalysis]:
    """How often there is a call of each kind, and how much is sent by it, the most bytes first."""
    calls: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    steps: dict[tuple[str, str], set[int]] = defaultdict(set)
    for (_, number), of_rank in matched.items():
        for each, times in Counter(of_rank.kinds).items():
            calls[each.axis, each.kind] += times
            sent[each.axis, each.kind] += times * each.sent_bytes
            steps[each.axis, each.kind].add(number)
    per_step = num_ranks * num_steps
    return [
        KindAnalysis(*name, calls[name] / per_step, sent[name] / per_step, len(steps[name]))
        for name in sorted(calls, key=lambda name: (-sent[name], name))
    ]


def congested_calls(matched: Mapping[tuple[int, int], MatchedCalls]) -> list[CongestedCall]:
    """Those that lost most time first. Of a collective, only the rank that had it longest; of a message, its receiver.

    A sender is done when its message lies in the host's buffers, however slow the link is.
    """
    times: dict[tuple[str, str, int, int], array[float]] = defaultdict(lambda: array("d"))
    for calls in matched.values():
        for kind, transfer in zip(calls.kinds, calls.transfers(), strict=True):
            times[kind[:4]].append(transfer)
    tells_senders = any(received for _, _, _, received in times)
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    worst: dict[Any, CongestedCall] = {}
    for (_, number), calls in matched.items():
        for kind, ready, seconds in zip(calls.kinds, calls.ready, calls.transfers(), strict=True):
            median_s = medians[kind[:4]]
            is_received = kind.kind in MESSAGES and tells_senders
            num_bytes = kind.received_bytes if is_received else kind.sent_bytes
            sender, receiver = (kind.peer, calls.rank) if is_received else (calls.rank, kind.peer)
            if sender is None or not num_bytes or median_s <= 0 or seconds * CONGESTED_SHARE <= median_s:
                continue
            call = CongestedCall(
                step=number,
                rank=sender,
                axis=kind.axis,
                kind=kind.kind,
                peer=receiver,
                sent_bytes=num_bytes,
                seconds=seconds,
                median_s=median_s,
                bytes_per_s=num_bytes / seconds,
                median_bytes_per_s=num_bytes / median_s,
            )
            # The ranks of a collective agree on when the last one came, to the last bit.
            name = (number, kind.axis, kind.kind, ready, calls.rank if kind.kind in MESSAGES else None)
            if name not in worst or worst[name].seconds < seconds:
                worst[name] = call
    return sorted(worst.values(), key=lambda call: (call.median_s - call.seconds, call.step, call.rank))


def congested_links(congested: Sequence[CongestedCall], num_steps: int) -> list[CongestedLink]:
    links: dict[tuple[str, int, int | None], list[CongestedCall]] = defaultdict(list)
    for call in congested:
        # A collective's peers are its group.
        links[call.axis, call.rank, call.peer if call.kind in MESSAGES else None].append(call)
    rows = [
        CongestedLink(
            axis=axis,
            rank=rank,
            peer=peer,
            calls=len(calls),
            steps=len({call.step for call in calls}),
            lost_s=sum(call.seconds - call.median_s for call in calls) / num_steps,
            bytes_per_s=sum(call.sent_bytes for call in calls) / sum(call.seconds for call in calls),
            median_bytes_per_s=sum(call.sent_bytes for call in calls) / sum(call.median_s for call in calls),
        )
        for (axis, rank, peer), calls in links.items()
    ]
    return sorted(rows, key=lambda link: -link.lost_s)


def sent_by(
    ranks: Sequence[RankSummary], summaries: Sequence[Mapping[int, StepSummary]], counted: Sequence[int]
) -> list[tuple[int, int, float]]:
    rows = []
    for rank, summary in zip(ranks, summaries, strict=True):
        total: Counter[int] = Counter()
        for number in counted:
            total.update(summary[number].sent_to)
        rows += [(rank.run.rank, to, size / len(counted)) for to, size in sorted(total.items()) if size]
    return rows
