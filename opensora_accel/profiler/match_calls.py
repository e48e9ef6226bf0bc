"""Calls of several ranks side by side: what the network took, who was waited for, which link was slow.

The n-th call of a group in a step is the same one on all its ranks, and cannot begin before the last of them has come:

    rank 0   computes   |--waits---====|      rank 0's call takes 14, of which it waits 10 for rank 1;
    rank 1   computes longer   |=======|      the network's share is what comes after that, on both

With P2P, where ranks exchange in a ring, the same holds for the n-th exchange.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opensora_accel.profiler.analysis import (
    AxisAnalysis,
    CongestedCall,
    CongestedLink,
    KindAnalysis,
    MessageSize,
    Spread,
)
from opensora_accel.profiler.intervals import length_of_columns
from opensora_accel.profiler.rank_summary import (
    MESSAGES,
    CallKind,
    Calls,
    RankSummary,
    StepSummary,
)

# A call is congested if its bandwidth is under this share of the median of its kind.
CONGESTED_SHARE = 0.5
# Of a message of so many bytes latency takes as long as the bytes: 5 µs at 25 GB/s.
SMALL_BYTES = 1 << 17
# Where one size of calls ends and the next begins.
SIZE_ENDS = (1 << 12, SMALL_BYTES, 1 << 22, 1 << 27)

# Seconds of many calls.
Column = NDArray[np.float64]


@dataclass
class MatchedCalls:
    """The calls of one rank in one step, each with the time at which the last rank of its group had come."""

    rank: int
    kinds: list[CallKind]
    # The place in `kinds` of each call, and its times.
    which: NDArray[np.intp]
    starts: Column
    ready: Column
    ends: Column
    exposed: Column
    # The place among the ranks of the one that came last; -1 where nobody knows.
    last: NDArray[np.intp]

    @staticmethod
    def of(rank: int, groups: Sequence[tuple[Calls, Column, NDArray[np.intp]]]) -> MatchedCalls:
        """Calls by group, each with the times at which everybody had come, and who came last."""
        kinds: list[CallKind] = []
        which = [np.zeros(0, np.intp)]
        for calls, _ready, _last in groups:
            which.append(np.asarray(calls.which).astype(np.intp) + len(kinds))
            kinds += calls.kinds
        none = np.zeros(0)
        return MatchedCalls(
            rank,
            kinds,
            np.concatenate(which),
            np.concatenate([none, *(calls.starts for calls, _ready, _last in groups)]),
            np.concatenate([none, *(ready for _calls, ready, _last in groups)]),
            np.concatenate([none, *(calls.ends for calls, _ready, _last in groups)]),
            np.concatenate([none, *(calls.exposed for calls, _ready, _last in groups)]),
            np.concatenate([np.zeros(0, np.intp), *(last for _calls, _ready, last in groups)]),
        )

    def transfer_s(self) -> Column:
        """The seconds of each call after everybody had come."""
        return np.maximum(self.ends - self.ready, 0.0)

    def exposed_transfer_s(self, chosen: NDArray[np.bool_] | None = None) -> float:
        """Seconds in which compute waited for the network itself, in all calls or the chosen ones.

        Without late ranks a call would have begun to transfer at once, and as much of it would have been hidden.
        """
        begin = self.ends - np.maximum(0.0, self.exposed - (self.ready - self.starts))
        if chosen is None:
            return length_of_columns(begin, self.ends)
        return length_of_columns(begin[chosen], self.ends[chosen])


def match_calls(
    ranks: Sequence[RankSummary],
    summaries: Sequence[Mapping[int, StepSummary]],
    counted: Sequence[int],
    unmatched: set[str],
) -> dict[tuple[int, int], MatchedCalls]:
    """By place in `ranks` and step; `unmatched` gets the names of groups whose calls cannot be laid side by side."""
    columns: dict[tuple[int, int], list[tuple[Calls, Column, NDArray[np.intp]]]] = defaultdict(list)
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
            calls = [summaries[i][number].calls.get(group) or Calls() for i in there]
            together = len(there) == len(members) and _same_calls(calls)
            # Of calls that cannot be matched nobody knows what was the network's: none of it is said to be.
            starts = np.array([each.starts for each in calls]) if together else None
            if not together and any(each.which for each in calls):
                unmatched.add(group)
            for i, each in zip(there, calls, strict=True):
                if starts is None:
                    ready, last = np.asarray(each.ends), np.full(len(each.which), -1, np.intp)
                else:
                    ready, last = starts.max(axis=0), np.array(there, np.intp)[starts.argmax(axis=0)]
                columns[i, number].append((each, ready, last))
    return {
        (i, number): MatchedCalls.of(rank.run.rank, columns[i, number])
        for i, rank in enumerate(ranks)
        for number in counted
    }


def _same_calls(columns: Sequence[Calls]) -> bool:
    """Whether the n-th call is the same one on all ranks."""
    if len({len(column.which) for column in columns}) > 1:
        return False
    numbers: dict[str, int] = {}
    kinds = []
    for column in columns:
        # A message is a send on one rank and a receive on the other.
        names = ["message" if kind.kind in MESSAGES else kind.kind for kind in column.kinds]
        # Ranks number their kinds each in an order of its own: here by one.
        table = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.intp)
        kinds.append(table[np.asarray(column.which)])
    return all(np.array_equal(kind, kinds[0]) for kind in kinds)


def axes_of(
    ranks: Sequence[RankSummary], matched: Mapping[tuple[int, int], MatchedCalls], num_steps: int
) -> list[AxisAnalysis]:
    """The axes by the bytes that they sent. Calls that run at the same time take that time once."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 8)
    for calls in matched.values():
        num_calls_of = np.bincount(calls.which, minlength=len(calls.kinds)).tolist()
        axes = [kind.axis for kind in calls.kinds]
        for axis in dict.fromkeys(axes):
            of_axis = sums[axis]
            chosen = np.array([name == axis for name in axes])[calls.which]
            for kind, times in zip(calls.kinds, num_calls_of, strict=True):
                if kind.axis == axis:
                    of_axis[0] += times
                    of_axis[1] += times * kind.sent_bytes
                    of_axis[6] += times * (_size(kind) < SMALL_BYTES)
            ends = calls.ends[chosen]
            of_axis[2] += length_of_columns(calls.starts[chosen], ends)
            of_axis[3] += length_of_columns(calls.ready[chosen], ends)
            of_axis[4] += length_of_columns(ends - calls.exposed[chosen], ends)
            of_axis[5] += calls.exposed_transfer_s(chosen)
            is_small = np.array([_size(kind) < SMALL_BYTES for kind in calls.kinds])[calls.which]
            of_axis[7] += calls.exposed_transfer_s(chosen & is_small)
    links = {axis: speed for rank in ranks for axis, speed in rank.run.link_bytes_per_s.items()}
    rows = []
    for axis in sorted(sums, key=lambda axis: -sums[axis][1]):
        num_calls, sent, seconds, transfer, exposed, exposed_transfer, small_calls, small_exposed = (
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
                small_calls=small_calls,
                small_exposed_s=small_exposed,
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
    # By step: sums over ranks.
    transfers: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    exposed: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for (_, number), of_rank in matched.items():
        num_calls_of = np.bincount(of_rank.which, minlength=len(of_rank.kinds)).tolist()
        for each, times in zip(of_rank.kinds, num_calls_of, strict=True):
            calls[each.axis, each.kind] += times
            sent[each.axis, each.kind] += times * each.sent_bytes
            steps[each.axis, each.kind].add(number)
        for name in dict.fromkeys((each.axis, each.kind) for each in of_rank.kinds):
            # The two ends of a message take the same time.
            ends = MESSAGES if name[1] in MESSAGES else (name[1],)
            is_of_name = np.array([each.axis == name[0] and each.kind in ends for each in of_rank.kinds])
            chosen = is_of_name[of_rank.which]
            transfers[name][number] += length_of_columns(of_rank.ready[chosen], of_rank.ends[chosen])  # type: ignore[assignment]
            exposed[name][number] += of_rank.exposed_transfer_s(chosen)  # type: ignore[assignment]
    all_steps = sorted({number for _, number in matched})

    def spread(seconds: Mapping[int, float]) -> Spread:
        return Spread.of([seconds.get(number, 0.0) / num_ranks for number in all_steps])

    per_step = num_ranks * num_steps
    return [
        KindAnalysis(
            *name,
            calls[name] / per_step,
            sent[name] / per_step,
            len(steps[name]),
            spread(transfers[name]),
            spread(exposed[name]),
        )
        for name in sorted(calls, key=lambda name: (-sent[name], name))
    ]


def sizes_of(
    matched: Mapping[tuple[int, int], MatchedCalls], num_ranks: int, num_steps: int, step_s: float
) -> list[MessageSize]:
    """Calls by axis, kind and size, those first that take most of the step. Both ends of a message are one."""
    sums: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0.0] * 3)
    for of_rank in matched.values():
        num_calls_of = np.bincount(of_rank.which, minlength=len(of_rank.kinds)).tolist()
        names = []
        for each, times in zip(of_rank.kinds, num_calls_of, strict=True):
            bucket = sum(_size(each) >= end for end in SIZE_ENDS)
            name = each.axis, "message" if each.kind in MESSAGES else each.kind, bucket
            names.append(name)
            sums[name][0] += 0 if each.kind == "recv" else times
            sums[name][1] += times * each.sent_bytes
        for name in dict.fromkeys(names):
            chosen = np.array([each == name for each in names])[of_rank.which]
            sums[name][2] += length_of_columns(of_rank.ready[chosen], of_rank.ends[chosen])
    ends = (0, *SIZE_ENDS, None)
    rows = []
    for (axis, kind, bucket), values in sums.items():
        calls, sent, seconds = (value / num_ranks / num_steps for value in values)
        rows.append(
            MessageSize(
                axis,
                kind,
                ends[bucket] or 0,
                ends[bucket + 1],
                calls,
                sent,
                seconds,
                sent / seconds if seconds > 0 else None,
                seconds / step_s,
            )
        )
    return sorted(rows, key=lambda row: (-row.share, row.axis, row.kind, row.from_bytes))


def congested_calls(matched: Mapping[tuple[int, int], MatchedCalls]) -> list[CongestedCall]:
    """Those that lost most time first. Of a collective, only the rank that had it longest; of a message, its receiver.

    A sender is done when its message lies in the host's buffers, however slow the link is.
    """
    # Numbers for kinds of calls, whoever sends them to whom.
    numbers: dict[tuple[Any, ...], int] = {}
    for calls in matched.values():
        for kind in calls.kinds:
            numbers.setdefault(kind[:4], len(numbers))
    if not numbers:
        return []
    which = {
        key: np.array([numbers[kind[:4]] for kind in calls.kinds], np.intp)[calls.which]
        for key, calls in matched.items()
    }
    transfers = {key: calls.transfer_s() for key, calls in matched.items()}
    medians = _medians(np.concatenate([*which.values()]), np.concatenate([*transfers.values()]), len(numbers))
    tells_senders = any(received for _, _, _, received in numbers)
    worst: dict[Any, CongestedCall] = {}
    for (place, step), calls in matched.items():
        median_of, seconds_of = medians[which[place, step]], transfers[place, step]
        is_slow = (median_of > 0) & (seconds_of * CONGESTED_SHARE > median_of)
        for at in np.flatnonzero(is_slow).tolist():
            kind, ready = calls.kinds[calls.which[at]], float(calls.ready[at])
            seconds, median_s = float(seconds_of[at]), float(median_of[at])
            is_received = kind.kind in MESSAGES and tells_senders
            num_bytes = kind.received_bytes if is_received else kind.sent_bytes
            sender, receiver = (kind.peer, calls.rank) if is_received else (calls.rank, kind.peer)
            # Of a small message latency is the most, and that varies by itself.
            if sender is None or num_bytes < SMALL_BYTES:
                continue
            call = CongestedCall(
                step=step,
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
            name = (step, kind.axis, kind.kind, ready, calls.rank if kind.kind in MESSAGES else None)
            if name not in worst or worst[name].seconds < seconds:
                worst[name] = call
    return sorted(worst.values(), key=lambda call: (call.median_s - call.seconds, call.step, call.rank))


def _size(kind: CallKind) -> int:
    return max(kind.sent_bytes, kind.received_bytes)


def _medians(kinds: NDArray[np.intp], seconds: Column, num_kinds: int) -> Column:
    """The median of each kind's calls; every kind has one."""
    order = np.argsort(kinds, kind="stable")
    ends = np.cumsum(np.bincount(kinds, minlength=num_kinds))
    return np.array([np.median(of_kind) for of_kind in np.split(seconds[order], ends[:-1])])


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
