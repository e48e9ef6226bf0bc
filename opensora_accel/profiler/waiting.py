"""What devices waited for, which ranks made others wait, and the path over ranks that bounds the step.

The path is followed back from the end of the rank that ends last. Where that rank had waited for a call, the time is
the network's back to when the last rank had come to the call, and before that the last rank's own:

    rank 0   forward|--waits---====|optimizer|      path: optimizer of rank 0, the network, forward of rank 1;
    rank 1   forward, longer   |===|optimizer|      without rank 0's forward, the step would take as long
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from opensora_accel.profiler.analysis import CriticalPart, IdleTime, LateRank, RankAnalysis
from opensora_accel.profiler.match_calls import MatchedCalls
from opensora_accel.profiler.rank_summary import RankSummary, StepSummary

IDLE_CAUSES = ("data", "host", "network", "late ranks", "copies", "save", "other")
# Waiting for what is there already takes some microseconds: a call bounds its rank from so much on, or from this share
# of the call on.
_MIN_WAIT_S, _MIN_WAIT_SHARE = 1e-4, 0.1
# A rank that is waited for less than this share of the step is not late.
_MIN_LATE_SHARE = 1e-3

Matched = Mapping[tuple[int, int], MatchedCalls]
Summaries = Sequence[Mapping[int, StepSummary]]


def idle_of(
    analyses: Sequence[RankAnalysis], summaries: Summaries, counted: Sequence[int], step_s: float
) -> list[IdleTime]:
    """Each cause in the order of `IDLE_CAUSES`. What is left of the step, the devices compute in."""
    rows = []
    for cause in IDLE_CAUSES:
        means = []
        for rank, summary in zip(analyses, summaries, strict=True):
            if cause in ("network", "late ranks"):
                means.append((rank.network_s if cause == "network" else rank.waited_s, rank.rank))
            elif known := [each for n in counted if (each := summary[n].idle_s[cause]) is not None]:
                means.append((statistics.fmean(known), rank.rank))
        if not means:
            rows.append(IdleTime(cause, None, None, None, None))
            continue
        mean_s = statistics.fmean(seconds for seconds, _rank in means)
        most_s, number = max(means, key=lambda each: each[0])
        rows.append(IdleTime(cause, mean_s, mean_s / step_s, most_s, number))
    return rows


def late_ranks_of(
    ranks: Sequence[RankSummary], counted: Sequence[int], matched: Matched, step_s: float
) -> list[LateRank]:
    """Whom others waited for, by axis, the most first."""
    # By the late rank's place and the axis: by the place of who waited.
    waits: dict[tuple[int, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (place, _number), calls in matched.items():
        waited = np.clip(calls.ready - calls.starts, 0.0, calls.exposed)
        waits_here = (calls.last >= 0) & (calls.last != place) & (waited > 0)
        axes = list(dict.fromkeys(kind.axis for kind in calls.kinds))
        axis_of = np.array([axes.index(kind.axis) for kind in calls.kinds], np.intp)[calls.which]
        for at, axis in enumerate(axes):
            chosen = waits_here & (axis_of == at)
            sums = np.bincount(calls.last[chosen], waited[chosen])
            for late in np.flatnonzero(sums).tolist():
                waits[late, axis][place] += float(sums[late]) / len(counted)
    rows = []
    for (late, axis), by_place in waits.items():
        by_place = {place: each for place, each in by_place.items() if each >= _MIN_LATE_SHARE * step_s}
        if by_place:
            most = max(by_place, key=by_place.__getitem__)
            mean_s = statistics.fmean(by_place.values())
            numbers = ranks[late].run.rank, ranks[most].run.rank
            rows.append(LateRank(numbers[0], axis, len(by_place), mean_s, numbers[1], by_place[most]))
    return sorted(rows, key=lambda row: (-row.mean_s * row.waiting_ranks, row.rank, row.axis))


def critical_path_of(
    ranks: Sequence[RankSummary], summaries: Summaries, counted: Sequence[int], matched: Matched
) -> list[CriticalPart]:
    """The parts of the mean step's path, the longest first."""
    # By part: by rank.
    seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for number in counted:
        steps = [summary[number] for summary in summaries]
        for piece in _path(steps, [matched[i, number] for i in range(len(ranks))]):
            seconds[piece.what][ranks[piece.place].run.rank] += piece.seconds / len(counted)
    whole = sum(sum(by_rank.values()) for by_rank in seconds.values())
    rows = []
    for what, by_rank in seconds.items():
        most, total = max(by_rank, key=by_rank.__getitem__), sum(by_rank.values())
        rows.append(CriticalPart(what, total, total / whole, most, by_rank[most]))
    return sorted(rows, key=lambda row: -row.seconds)


class _Piece(NamedTuple):
    what: str
    # Place among the ranks.
    place: int
    seconds: float


def _path(steps: Sequence[StepSummary], matched: Sequence[MatchedCalls]) -> Iterator[_Piece]:
    """From the step's end back to where the rank that bounds it began."""
    place = max(range(len(steps)), key=lambda i: steps[i].end_s)
    now = steps[place].end_s
    waits: dict[int, Iterator[int]] = {}
    while now > steps[place].start_s:
        calls = matched[place]
        if place not in waits:
            waits[place] = iter(_waited_for(calls))
        # A rank that the path comes back to goes on where it was left.
        at = next((each for each in waits[place] if calls.ends[each] <= now), None)
        if at is None:
            yield from _own(steps[place], place, steps[place].start_s, now)
            return
        end, late = float(calls.ends[at]), int(calls.last[at])
        yield from _own(steps[place], place, end, now)
        axis = calls.kinds[calls.which[at]].axis or "no axis"
        if late < 0:
            now = max(steps[place].start_s, end - float(calls.exposed[at]))
            yield _Piece(f"waiting over {axis}", place, end - now)
            continue
        # Clocks may be off: nothing is sent before its time.
        ready = max(steps[late].start_s, min(float(calls.ready[at]), end))
        yield _Piece(f"network over {axis}", late, end - ready)
        place, now = late, ready


def _waited_for(calls: MatchedCalls) -> list[int]:
    """The calls that held their rank up, the last one first."""
    enough = np.minimum(_MIN_WAIT_S, _MIN_WAIT_SHARE * (calls.ends - calls.starts))
    held = np.flatnonzero((calls.exposed > 0) & (calls.exposed >= enough))
    order: list[int] = held[np.argsort(-calls.ends[held], kind="stable")].tolist()
    return order


def _own(step: StepSummary, place: int, start_s: float, end_s: float) -> Iterator[_Piece]:
    """What the rank did itself in between."""
    ends, names = step.phases
    begin = start_s
    for i in range(bisect_right(ends, start_s), len(ends)):
        taken = min(ends[i], end_s) - begin
        if taken <= 0:
            return
        yield _Piece(names[i], place, taken)
        begin = ends[i]
