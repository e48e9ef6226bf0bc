"""One rank's file of records, summed up step by step: which part of the step had every instant, and what was sent.

Spans are nested, and calls run beside them. Every instant of a step belongs to one part only:

    step        |--------------------------------------------------|  10 s
    block            |------------------------------------|           7 s
    attention              |---------------|                          3 s
    call (ring)                   |.....wwww|                         it was waited for in its last 1 s
    parts       other 3 s, block 4 s, attention 2 s, exposed ring 1 s: together 10 s

An instant belongs to the innermost span, that is the one that began last, unless compute waits in it for a call: a call
is waited for at its end, so the last `exposed_s` seconds of it are exposed communication of its axis. What no span
covers is "other", by the phases around it: before a forward, between a forward and a backward (the loss and the model's
head), within or after backward. Times are counted in whole nanoseconds, so that the parts add up to the step exactly.
"""

from __future__ import annotations

import gc
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from opensora_accel.observe import AFTER, BACKWARD, FORWARD, RECOMPUTE
from opensora_accel.profiler.intervals import Interval, exposed_seconds, length
from opensora_accel.profiler.records import (
    MaskedAttention,
    MemorySample,
    RunRecord,
    Span,
    StepRecord,
    read_rank,
)

COPIES = ("copy out", "copy in")
# Regions in which the device computes.
COMPUTE = ("encode", "block", "attention", "mlp", "optimizer")
# Calls between two ranks: every end is recorded, and its partner has it under another kind.
MESSAGES = ("send", "recv")


class Part(NamedTuple):
    """What an instant of a step is spent on."""

    # A region, "exposed" for communication that compute waits for, or "other".
    region: str
    # The axis of the mesh, where the region is "exposed".
    axis: str
    phase: str


OTHER = Part("other", "", "")
# The phase of what no span covers between a forward and a backward.
LOSS = "loss"
_PASS_OF = {FORWARD: FORWARD, RECOMPUTE: BACKWARD, BACKWARD: BACKWARD}


class CallKind(NamedTuple):
    """Calls that should take the same time."""

    axis: str
    kind: str
    sent_bytes: int
    # Those of a message that is received.
    received_bytes: int
    # Who gets it, or sent the message, where that is one rank.
    peer: int | None


@dataclass
class Calls:
    """The calls of one group in one step, in order: four columns, because there may be millions."""

    kinds: list[CallKind] = field(default_factory=list)
    which: array[int] = field(default_factory=lambda: array("L"))
    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    exposed: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class StepSummary:
    """One step of one rank."""

    step: int
    start_s: float
    end_s: float
    parts_ns: dict[Part, int]
    metrics: Mapping[str, float]
    peak_bytes: int
    calls: dict[str, Calls]
    sent_to: dict[int, int]
    masks: Sequence[MaskedAttention]
    # Seconds in which copies ran, by region, beside compute or not.
    copies_s: Mapping[str, float]
    # In which the device waited for the host's next kernel; None where that is not known.
    host_bound_s: float | None
    # In which the device computed nothing, by what it waited for; None where that is not known.
    idle_s: Mapping[str, float | None]
    # What the rank was at, piece by piece: where they end, and their phases, or the regions of those without.
    phases: tuple[array[float], list[str]]
    slowed_by: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def seconds_of(self, *regions: str) -> float:
        return sum(time for part, time in self.parts_ns.items() if part.region in regions) / 1e9


@dataclass
class RankSummary:
    """One rank's run."""

    run: RunRecord
    steps: list[StepSummary]
    # The step with the most live bytes, and the last one: whole, for pictures of a single step.
    peak_step: StepRecord | None
    last_step: StepRecord | None


def summarise(path: Path) -> RankSummary:
    """Reads one rank's file line by line, and keeps what the step's numbers need, and two whole steps.

    Raises:
        ValueError: the file is no record of a profiled run.
    """
    with without_collection():
        run, records = read_rank(path)
        summary = RankSummary(run, [], None, None)
        peak_bytes = -1
        for record in records:
            step = summarise_step(record, run.beside_compute)
            summary.steps.append(step)
            summary.last_step = record
            # The last among equal ones, which is no warm-up.
            if step.peak_bytes >= peak_bytes:
                summary.peak_step, peak_bytes = record, step.peak_bytes
        return summary


@contextmanager
def without_collection() -> Iterator[None]:
    """Records do not point back at themselves, and looking for cycles among millions takes much of the time."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def summarise_step(record: StepRecord, beside_compute: Sequence[str] = ()) -> StepSummary:
    """One step's parts, calls by group, and bytes by receiver."""
    groups: dict[str, Calls] = defaultdict(Calls)
    index: dict[tuple[Any, ...], int] = {}
    sent_to: dict[int, int] = defaultdict(int)
    waits = []
    # Millions of calls come this way, which are taken apart at once.
    for kind, axis, group, start_s, end_s, exposed_s, num_bytes, receivers, senders in record.calls:
        others = receivers or senders
        peer = next(iter(others)) if len(others) == 1 else None
        calls, name = groups[group], (group, axis, kind, num_bytes, sum(senders.values()), peer)
        which = index.get(name)
        if which is None:
            which = index[name] = len(calls.kinds)
            calls.kinds.append(CallKind(*name[1:]))
        calls.which.append(which)
        calls.starts.append(start_s)
        calls.ends.append(end_s)
        calls.exposed.append(exposed_s)
        for rank, size in receivers.items():
            sent_to[rank] += size
        if exposed_s > 0:
            waits.append((_ns(end_s - exposed_s), _ns(end_s), Part("exposed", axis, "")))
    spans = [
        (_ns(span.start_s), _ns(span.end_s), Part(span.region, "", span.phase))
        for span in record.spans
        if span.region not in beside_compute
    ]
    start, end = _ns(record.start_s), _ns(record.end_s)
    pieces = pieces_of(start, end, spans)
    parts_ns, host_bound_s = exclusive_ns(start, pieces, waits), _host_bound_s(record)
    return StepSummary(
        step=record.step,
        start_s=record.start_s,
        end_s=record.end_s,
        parts_ns=parts_ns,
        metrics=record.metrics,
        peak_bytes=max((sample.device_bytes for sample in record.memory), default=0),
        calls=dict(groups),
        sent_to=dict(sent_to),
        masks=record.masks,
        copies_s={
            region: length((span.start_s, span.end_s) for span in record.spans if span.region == region)
            for region in COPIES
        },
        host_bound_s=host_bound_s,
        idle_s=_idle_s(record, parts_ns, host_bound_s, beside_compute),
        phases=_phases(pieces),
        slowed_by=record.slowed_by,
    )


def _phases(pieces: Iterable[tuple[int, Part]]) -> tuple[array[float], list[str]]:
    ends, names = array("d"), list[str]()
    for until, part in pieces:
        name = part.phase or part.region
        if names and names[-1] == name:
            ends[-1] = until / 1e9
        else:
            ends.append(until / 1e9)
            names.append(name)
    return ends, names


def _host_bound_s(record: StepRecord) -> float | None:
    """Where the device was starved while the host neither read nor saved, and no call was waited for."""
    if record.starved is None:
        return None
    return exposed_seconds([*_waits(record), *_spans_of(record, "data", "encode", "save")], record.starved)


def _idle_s(
    record: StepRecord,
    parts_ns: Mapping[Part, int],
    host_bound_s: float | None,
    beside_compute: Sequence[str],
) -> dict[str, float | None]:
    """Every instant in which nothing is computed has one cause; what is exposed communication is told elsewhere."""
    by_region: dict[str, float] = defaultdict(float)
    for part, time in parts_ns.items():
        by_region[part.region] += time / 1e9
    # Copies on the queue of compute take its time; those on queues of their own are waited for where nothing else is.
    beside_s = starved_s = 0.0
    if record.starved or beside_compute:
        starved = record.starved or ()
        busy = [*_spans_of(record, *COMPUTE, "data", "save"), *_waits(record)]
        beside_s = exposed_seconds([*busy, *starved], _spans_of(record, *beside_compute))
        starved_s = exposed_seconds(busy, starved)
    return {
        "data": by_region["data"],
        "save": by_region["save"],
        "copies": sum(by_region[region] for region in COPIES) + beside_s,
        "host": host_bound_s,
        # What is starved or copies outside of all regions has its cause.
        "other": max(0.0, by_region["other"] - beside_s - starved_s),
    }


def _waits(record: StepRecord) -> list[Interval]:
    return [(call.end_s - call.exposed_s, call.end_s) for call in record.calls if call.exposed_s > 0]


def _spans_of(record: StepRecord, *regions: str) -> list[Interval]:
    return [(span.start_s, span.end_s) for span in record.spans if span.region in regions]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def exclusive_ns(
    start: int, pieces: Sequence[tuple[int, Part]], waits: Iterable[tuple[int, int, Part]]
) -> dict[Part, int]:
    """How long each part had the step from `start` on: that of `pieces_of`, but waits before all of them.

    The sum is the step's length, whatever the waits are. Of two waits that overlap, the first keeps what both claim.
    """
    parts: dict[Part, int] = defaultdict(int)
    # The earliest one last, where `pop` takes it.
    pending = list(_disjoint(start, pieces[-1][0] if pieces else start, waits))[::-1]
    now = start
    for until, part in pieces:
        # [now, until) is this part's, without what is waited for in it.
        while pending and pending[-1][0] < until:
            first, last, wait = pending[-1]
            if first > now:
                parts[part] += first - now
                now = first
            parts[wait] += min(last, until) - now
            now = min(last, until)
            # The rest of it lies in the next piece.
            if last > until:
                break
            pending.pop()
        if until > now:
            parts[part] += until - now
            now = until
    return dict(parts)


def _innermost_parts(
    start: int, end: int, spans: Iterable[tuple[int, int, Part]]
) -> Iterator[tuple[int, Part]]:
    """The step [start, end) piece by piece, in order: where each piece ends, and the innermost span in it."""
    now = start
    # The spans that are open at `now`, the innermost last, each with its end.
    around: list[tuple[int, Part]] = []
    # Where two begin together the longer one comes first, which is around the other.
    for first, last, part in sorted(spans, key=lambda span: (span[0], -span[1])):
        first, last = max(first, start), min(last, end)
        if last <= first:
            continue
        while around and around[-1][0] <= first:
            until, inner = around.pop()
            if until > now:
                yield until, inner
                now = until
        if first > now:
            yield first, around[-1][1] if around else OTHER
            now = first
        around.append((last, part))
    # The step has no more beginnings: what is open ends from the inside out.
    for until, inner in reversed(around):
        if until > now:
            yield until, inner
            now = until
    if end > now:
        yield end, OTHER


def pieces_of(start: int, end: int, spans: Iterable[tuple[int, int, Part]]) -> list[tuple[int, Part]]:
    """The step [start, end) piece by piece: where each ends, and the span in it that began last.

    Of two that begin together, the shorter one is inside. Pieces outside of all spans have the phase that the step is
    in.
    """
    pieces = list(_innermost_parts(start, end, spans))
    before, outside = "", list[int]()
    for i, (_until, part) in enumerate(pieces):
        if part is OTHER:
            outside.append(i)
        elif part.phase in _PASS_OF:
            now = _PASS_OF[part.phase]
            if outside:
                between = Part("other", "", LOSS if (before, now) == (FORWARD, BACKWARD) else now)
                for each in outside:
                    pieces[each] = pieces[each][0], between
                outside.clear()
            before = now
    if before == BACKWARD:
        for each in outside:
            pieces[each] = pieces[each][0], Part("other", "", AFTER)
    return pieces


def _disjoint(
    start: int, end: int, intervals: Iterable[tuple[int, int, Part]]
) -> Iterator[tuple[int, int, Part]]:
    """The intervals within [start, end) in order, each without what an earlier one has."""
    for first, last, part in sorted(intervals):
        first, last = max(first, start), min(last, end)
        if last > first:
            yield first, last, part
            start = last


def innermost(spans: Iterable[Span], times_s: Iterable[float]) -> list[Span | None]:
    """For each time the span that began last among those that hold it, or end at it."""
    found: dict[float, Span | None] = {}
    pending = sorted(spans, key=lambda span: (span.start_s, -span.end_s))[::-1]
    around: list[Span] = []
    times_s = list(times_s)
    for time_s in sorted(times_s):
        while pending and pending[-1].start_s <= time_s:
            around.append(pending.pop())
        while around and around[-1].end_s < time_s:
            around.pop()
        found[time_s] = around[-1] if around else None
    return [found[time_s] for time_s in times_s]


def peak_sample(samples: Iterable[MemorySample]) -> MemorySample | None:
    """The sample with the most bytes on the device; the first of equal ones."""
    return max(samples, key=lambda sample: sample.device_bytes, default=None)
