"""What the records of a profiled run mean, as numbers: steps, ranks, axes, memory.

Every rank's file is read by itself (`rank_summary`), several at a time; then ranks are compared with one another. For
that a call's time is taken apart (`match_calls`): waiting for the last rank of its group, and the network's share.

So three things can make a rank late, each against the median over the ranks of the same step: its data, its work (the
step without data and exposed communication), and its network (exposed communication after everybody had come). The
time in which it waited for others is not its own.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opensora_accel.observe import AFTER, BACKWARD, FORWARD, KINDS, RECOMPUTE
from opensora_accel.profiler.analysis import (
    LATE_CAUSES,
    Lane,
    MemoryPeak,
    PartTime,
    RankAnalysis,
    RunAnalysis,
    Spread,
    StepAnalysis,
    Timeline,
    Utilization,
)
from opensora_accel.profiler.intervals import exposed_seconds, length, length_of_columns, union
from opensora_accel.profiler.kernels import kernels_of
from opensora_accel.profiler.masks import MAX_MASKS, mask_imbalance, masks_of, pairs_of
from opensora_accel.profiler.match_calls import (
    MatchedCalls,
    axes_of,
    congested_calls,
    congested_links,
    kinds_of,
    match_calls,
    sent_by,
    sizes_of,
)
from opensora_accel.profiler.rank_summary import (
    COMPUTE,
    COPIES,
    LOSS,
    Part,
    RankSummary,
    StepSummary,
    innermost,
    peak_sample,
    summarise,
    without_collection,
)
from opensora_accel.profiler.records import REGIONS, MemorySample, StepRecord, rank_files
from opensora_accel.profiler.waiting import critical_path_of, idle_of, late_ranks_of

__all__ = ["RunAnalysis", "analyse", "analyse_ranks"]

# A rank is late in a step if it is behind the median rank by more than this share of the step.
LATE_SHARE = 0.05
# How many congested calls are kept, those that lost most time, and how many samples or bars a picture has.
MAX_CONGESTED, MAX_DRAWN = 100, 400

PHASES = ("", FORWARD, LOSS, RECOMPUTE, BACKWARD, AFTER)


def analyse(folder: Path, max_processes: int | None = None) -> RunAnalysis:
    """Reads all ranks of a run, each in one of at most `max_processes` (default: one per core), and compares them.

    Raises:
        ValueError: there are no files, one is damaged, or no rank has a whole step.
    """
    files = rank_files(folder)
    processes = min(len(files), max_processes or os.cpu_count() or 1)
    # Large files first, so that none is left alone at the end.
    by_size = sorted(files, key=lambda file: file.stat().st_size, reverse=True)
    if processes == 1 or sum(file.stat().st_size for file in files) < 4 << 20:
        ranks = [summarise(file) for file in by_size]  # sooner than a process starts
    else:
        with (
            ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool,
            without_collection(),
        ):
            ranks = list(pool.map(summarise, by_size))
    ranks.sort(key=lambda rank: rank.run.rank)
    with without_collection():
        return replace(analyse_ranks(ranks, folder.name), kernels=kernels_of(folder, ranks))


def analyse_ranks(ranks: Sequence[RankSummary], name: str) -> RunAnalysis:
    """The run that these ranks, in order, were part of.

    Raises:
        ValueError: no step was finished by all of them.
    """
    shared = sorted(set.intersection(*[{step.step for step in rank.steps} for rank in ranks]))
    if not shared:
        raise ValueError(
            f"{name}: there is no step that all {len(ranks)} ranks have finished; profile a run for longer, or leave "
            "out the files of ranks that were killed at its start"
        )
    summaries = [{step.step: step for step in rank.steps} for rank in ranks]
    slowed = {
        number: next(filter(None, (each[number].slowed_by for each in summaries)), "") for number in shared
    }
    # The first step warms up. Where there is no other, it has to do.
    counted = [number for number in shared[1:] if not slowed[number]] or shared[1:] or shared
    unmatched = set[str]()
    matched = match_calls(ranks, summaries, counted, unmatched)
    shares = [
        {number: _shares(summary[number], matched[i, number]) for number in counted}
        for i, summary in enumerate(summaries)
    ]
    lateness = _Lateness.of(shares, counted)
    analyses = [
        _rank(rank, [summary[number] for number in counted], list(shares[i].values()), lateness, i)
        for i, (rank, summary) in enumerate(zip(ranks, summaries, strict=True))
    ]
    steps = [_step(ranks, summaries, number, number not in counted, lateness) for number in shared]
    congested, masks = congested_calls(matched), masks_of(ranks, summaries, counted)
    first, step_s = ranks[0].run, [step.seconds for step in steps if not step.warm_up]
    mean_step_s = statistics.fmean(step_s)
    throughput = [step.tokens_per_s for step in steps if not step.warm_up and step.tokens_per_s is not None]
    peak_rank = max(
        (i for i, rank in enumerate(analyses) if rank.peak),
        key=lambda i: analyses[i].peak.device_bytes,  # type: ignore[union-attr]
        default=None,
    )
    ratios = [rank.compute_to_communication for rank in analyses if rank.compute_to_communication is not None]
    return RunAnalysis(
        name=name,
        world_size=first.world_size,
        num_ranks=len(ranks),
        num_steps=len(counted),
        warm_up_steps=len(shared) - len(counted),
        started_at=first.started_at,
        clock_error_s=max(rank.run.clock_error_s for rank in ranks),
        plan=first.plan,
        model=first.model,
        environment=_environment(ranks),
        step_s=Spread.of(step_s),
        mean_step_s=mean_step_s,
        tokens_per_s=Spread.of(throughput) if throughput else None,
        parts=_mean_parts(analyses),
        ranks=analyses,
        steps=steps,
        axes=axes_of(ranks, matched, len(counted)),
        kinds=kinds_of(matched, len(ranks), len(counted)),
        sizes=sizes_of(matched, len(ranks), len(counted), mean_step_s),
        idle=idle_of(analyses, summaries, counted, mean_step_s),
        critical_path=critical_path_of(ranks, summaries, counted, matched),
        late_ranks=late_ranks_of(ranks, counted, matched, mean_step_s),
        compute_to_communication=statistics.median(ratios) if ratios else None,
        sent=sent_by(ranks, summaries, counted),
        num_congested=len(congested),
        congested=congested[:MAX_CONGESTED],
        congestion=congested_links(congested, len(counted)),
        masks=masks[:MAX_MASKS],
        num_masks=len(masks),
        mask_imbalance=mask_imbalance(summaries, counted),
        peak_rank=None if peak_rank is None else analyses[peak_rank].rank,
        memory=None if peak_rank is None else _memory_timeline(ranks[peak_rank]),
        offload=_offload_timeline(ranks),
        utilization=_utilization(ranks, statistics.median(step_s)),
        copies={region: _copies(summaries, counted, region) for region in COPIES},
        notes=_notes(ranks, summaries, shared, counted, slowed, unmatched),
    )


@dataclass(frozen=True)
class _Shares:
    """Whose time a step of one rank is."""

    data: float
    work: float
    network: float
    waited: float
    # Seconds in which the network was busy for this rank.
    communication: float

    @property
    def own(self) -> float:
        return self.data + self.work + self.network


def _shares(step: StepSummary, matched: MatchedCalls) -> _Shares:
    exposed, data = step.seconds_of("exposed"), step.seconds_of("data")
    # What compute waited for: the transfer itself, and beside it ranks that came later.
    network = min(matched.exposed_transfer_s(), exposed)
    return _Shares(
        data=data,
        work=sum(step.parts_ns.values()) / 1e9 - exposed - data,
        network=network,
        waited=exposed - network,
        communication=length_of_columns(matched.ready, matched.ends),
    )


@dataclass(frozen=True)
class _Lateness:
    """Seconds behind the median rank: by step, then by place of the rank, for each cause."""

    behind: Mapping[int, Sequence[Mapping[str, float]]]
    # The step's time, of the median rank.
    step_s: Mapping[int, float]

    @staticmethod
    def of(shares: Sequence[Mapping[int, _Shares]], counted: Sequence[int]) -> _Lateness:
        behind, step_s = {}, {}
        for number in counted:
            of_step = [rank[number] for rank in shares]
            medians = {
                cause: statistics.median(getattr(share, cause) for share in of_step) for cause in LATE_CAUSES
            }
            behind[number] = [
                {cause: getattr(share, cause) - medians[cause] for cause in LATE_CAUSES} for share in of_step
            ]
            step_s[number] = statistics.median(share.own + share.waited for share in of_step)
        return _Lateness(behind, step_s)

    def cause(self, number: int, place: int) -> str:
        """What made a rank late in a step; nothing if it was not late."""
        behind = self.behind[number][place]
        if sum(behind.values()) <= LATE_SHARE * self.step_s[number]:
            return ""
        return max(behind, key=behind.__getitem__)


def _rank(
    rank: RankSummary,
    steps: Sequence[StepSummary],
    shares: Sequence[_Shares],
    lateness: _Lateness,
    place: int,
) -> RankAnalysis:
    causes = Counter(lateness.cause(step.step, place) for step in steps)
    communication = sum(share.communication for share in shares)
    parts = sorted(set().union(*[step.parts_ns for step in steps]), key=part_order)
    times = {part: [step.parts_ns.get(part, 0) / 1e9 for step in steps] for part in parts}
    pairs, mean_pairs = (sum(each) for each in zip(*map(pairs_of, steps), strict=True))
    return RankAnalysis(
        rank=rank.run.rank,
        coordinates=rank.run.coordinates,
        step_s=Spread.of([step.seconds for step in steps]),
        mean_step_s=statistics.fmean(step.seconds for step in steps),
        parts=[PartTime(*part, statistics.fmean(times[part]), Spread.of(times[part])) for part in parts],
        data_s=statistics.fmean(share.data for share in shares),
        work_s=statistics.fmean(share.work for share in shares),
        network_s=statistics.fmean(share.network for share in shares),
        waited_s=statistics.fmean(share.waited for share in shares),
        late_steps={cause: causes[cause] for cause in LATE_CAUSES},
        behind_s={
            cause: statistics.fmean(lateness.behind[step.step][place][cause] for step in steps)
            for cause in LATE_CAUSES
        },
        compute_to_communication=sum(share.work for share in shares) / communication
        if communication
        else None,
        peak=_peak(rank.peak_step),
        pairs=pairs / len(steps) if mean_pairs else None,
        pairs_of_mean=pairs / mean_pairs if mean_pairs else None,
        attention_s=statistics.fmean(step.seconds_of("attention") for step in steps),
        host_bound_s=_mean_if_known([step.host_bound_s for step in steps]),
        host=rank.run.environment.get("host", ""),
    )


def _copies(summaries: Sequence[Mapping[int, StepSummary]], counted: Sequence[int], region: str) -> Spread:
    return Spread.of(
        [statistics.fmean(each[number].copies_s[region] for each in summaries) for number in counted]
    )


def _mean_if_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def part_order(part: Part) -> tuple[Any, ...]:
    """Regions as `REGIONS` has them with exposed communication before "other"; phases as they come in a step."""
    order = [*REGIONS[:-1], "exposed", "other"]
    place = order.index(part.region) if part.region in order else len(order) - 2
    phase = PHASES.index(part.phase) if part.phase in PHASES else len(PHASES)
    return place, part.region, part.axis, phase, part.phase


def _mean_parts(ranks: Sequence[RankAnalysis]) -> list[PartTime]:
    """Each part's time over ranks."""
    times: dict[Part, list[float]] = defaultdict(list)
    for rank in ranks:
        for part in rank.parts:
            times[Part(part.region, part.axis, part.phase)].append(part.mean_s)
    # A rank without the part has spent no time in it.
    for values in times.values():
        values.extend([0.0] * (len(ranks) - len(values)))
    return [
        PartTime(*part, statistics.fmean(times[part]), Spread.of(times[part]))
        for part in sorted(times, key=part_order)
    ]


def _step(
    ranks: Sequence[RankSummary],
    summaries: Sequence[Mapping[int, StepSummary]],
    number: int,
    warm_up: bool,
    lateness: _Lateness,
) -> StepAnalysis:
    steps = [summary[number] for summary in summaries]
    seconds = max(step.end_s for step in steps) - min(step.start_s for step in steps)
    losses = [step.metrics["loss"] for step in steps if "loss" in step.metrics]
    tokens = [step.metrics["tokens"] for step in steps if "tokens" in step.metrics]
    if warm_up:
        slowest, behind, cause = max(range(len(steps)), key=lambda i: steps[i].seconds), 0.0, ""
    else:
        late = [sum(of_rank.values()) for of_rank in lateness.behind[number]]
        slowest = max(range(len(steps)), key=late.__getitem__)
        behind, cause = late[slowest], lateness.cause(number, slowest)
    return StepAnalysis(
        step=number,
        seconds=seconds,
        warm_up=warm_up,
        slowest_rank=ranks[slowest].run.rank,
        behind_s=behind,
        cause=cause,
        loss=statistics.fmean(losses) if losses else None,
        tokens_per_s=sum(tokens) / seconds if tokens and seconds > 0 else None,
        peak_bytes=max(step.peak_bytes for step in steps),
        slowed_by=next(filter(None, (step.slowed_by for step in steps)), ""),
    )


def _peak(record: StepRecord | None) -> MemoryPeak | None:
    sample = peak_sample(record.memory) if record else None
    if record is None or sample is None:
        return None
    spans = innermost(record.spans, (each.time_s for each in record.memory))
    span = spans[record.memory.index(sample)]
    region = span.region if span else "other"
    fullest = max(record.memory, key=lambda each: each.reserved_bytes or 0)
    return MemoryPeak(
        step=record.step,
        time_s=sample.time_s - record.start_s,
        device_bytes=sample.device_bytes,
        host_bytes=sum(sample.bytes_by_kind.values()) - sample.device_bytes,
        bytes_by_kind={kind: sample.bytes_by_kind[kind] for kind in KINDS if kind in sample.bytes_by_kind},
        region=region,
        name=span.name if span else "",
        phase=span.phase if span else "",
        elsewhere_bytes=max(
            (
                each.device_bytes
                for each, at in zip(record.memory, spans, strict=True)
                if (at.region if at else "other") != region
            ),
            default=0,
        ),
        reserved_bytes=fullest.reserved_bytes,
        fragmented_bytes=fullest.fragmented_bytes,
    )


def _memory_timeline(rank: RankSummary) -> Timeline:
    record = rank.peak_step
    assert record is not None
    samples = thinned(record.memory)
    return Timeline(
        rank.run.rank,
        record.step,
        record.seconds,
        memory=[(sample.time_s - record.start_s, dict(sample.bytes_by_kind)) for sample in samples],
    )


def thinned(samples: Sequence[MemorySample]) -> list[MemorySample]:
    """At most `MAX_DRAWN` of them: of every stretch of the step the one with the most bytes, so the peak stays."""
    stretch = -(-len(samples) // MAX_DRAWN) or 1
    return [
        max(samples[i : i + stretch], key=lambda sample: sample.device_bytes)
        for i in range(0, len(samples), stretch)
    ]


def _offload_timeline(ranks: Sequence[RankSummary]) -> Timeline | None:
    """The last step of the rank that spent most time on copies in it; None if nothing was copied."""

    def copying(rank: RankSummary) -> float:
        spans = rank.last_step.spans if rank.last_step else ()
        return sum(span.end_s - span.start_s for span in spans if span.region in COPIES)

    rank = max(ranks, key=copying)
    record = rank.last_step
    if record is None or not copying(rank):
        return None
    intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in record.spans:
        name = span.region if span.region in COPIES else "compute" if span.region in COMPUTE else ""
        intervals[name].append((span.start_s - record.start_s, span.end_s - record.start_s))
    compute = union(intervals["compute"])
    if not set(COPIES) & set(rank.run.beside_compute):
        # Copies on the queue of compute: while one runs, the span around it computes nothing.
        compute = _without(compute, union(intervals[COPIES[0]] + intervals[COPIES[1]]))
    lanes = [Lane("compute", length(compute), 0.0, compute[:MAX_DRAWN])]
    for name in COPIES:
        copies = union(intervals[name])
        lanes.append(Lane(name, length(copies), exposed_seconds(compute, copies), copies[:MAX_DRAWN]))
    return Timeline(rank.run.rank, record.step, record.seconds, lanes)


def _without(
    intervals: Sequence[tuple[float, float]], holes: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """What is left of the intervals; both are apart and in order."""
    left = []
    holes = [*holes, (float("inf"), float("inf"))]
    i = 0
    for start, end in intervals:
        # Holes that end before this interval end before all later ones too.
        while holes[i][1] <= start:
            i += 1
        j = i
        while holes[j][0] < end:
            if holes[j][0] > start:
                left.append((start, holes[j][0]))
            start = max(start, holes[j][1])
            j += 1
        if start < end:
            left.append((start, end))
    return left


def _utilization(ranks: Sequence[RankSummary], step_s: float) -> Utilization:
    def total(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(ranks) else None

    model = total(rank.run.model_flops for rank in ranks)
    hardware = total(rank.run.hardware_flops for rank in ranks)
    peak = total(rank.run.peak_flops for rank in ranks)
    missing = [
        name
        for name, value in (
            ("the model's operations (model_flops)", model),
            ("those with recomputation (hardware_flops)", hardware),
            ("the device's peak (peak_flops)", peak),
        )
        if value is None
    ]
    return Utilization(
        mfu=model / (peak * step_s) if model is not None and peak else None,
        hfu=hardware / (peak * step_s) if hardware is not None and peak else None,
        model_flops=model,
        hardware_flops=hardware,
        peak_flops=peak,
        peak_flops_source=ranks[0].run.peak_flops_source,
        why_not=f"the run does not know {' and '.join(missing)}" if missing else "",
    )


def _environment(ranks: Sequence[RankSummary]) -> dict[str, str]:
    """Where ranks differ, every value with how many of them have it."""
    names = dict.fromkeys(name for rank in ranks for name in rank.run.environment)
    environment = {}
    for name in names:
        values = Counter(str(rank.run.environment.get(name, "unknown")) for rank in ranks)
        environment[name] = (
            next(iter(values))
            if len(values) == 1
            else ", ".join(
                f"{value} ({count} ranks)" if count > 1 else f"{value} (1 rank)"
                for value, count in values.items()
            )
        )
    return environment


def _notes(
    ranks: Sequence[RankSummary],
    summaries: Sequence[Mapping[int, StepSummary]],
    shared: Sequence[int],
    counted: Sequence[int],
    slowed: Mapping[int, str],
    unmatched: Collection[str],
) -> list[str]:
    """What a reader has to know before believing the numbers."""
    notes = []
    if len(shared) > 1:
        notes.append(f"Step {shared[0]} is a warm-up and is left out of times and bytes.")
    else:
        notes.append("There is one step only, and it holds the warm-up: profile at least three.")
    left_out = [number for number in shared[1:] if number not in counted]
    if left_out:
        why = " and ".join(dict.fromkeys(slowed[number] for number in left_out))
        notes.append(f"{len(left_out)} more step(s) are left out of times and bytes: {why} was followed.")
    elif any(slowed[number] for number in counted):
        notes.append(
            "Memory or a trace was followed in every step or in the one before: times are not those of a run."
        )
    if unmatched:
        notes.append(
            f"Calls of {', '.join(sorted(unmatched))} cannot be laid side by side: what ranks waited in them counts as "
            "waiting for others, and none of it as the network's."
        )
    missing = sorted(set(range(ranks[0].run.world_size)) - {rank.run.rank for rank in ranks})
    if missing:
        notes.append(
            f"{len(missing)} of {ranks[0].run.world_size} ranks have no file here ({named_ranks(missing)}): their "
            "calls are missing, and those of their groups are not compared."
        )
    shorter = [
        rank.run.rank for rank, summary in zip(ranks, summaries, strict=True) if max(summary) > shared[-1]
    ]
    if shorter:
        notes.append(f"Some ranks stopped after step {shared[-1]}; what others did later is left out.")
    error = max(rank.run.clock_error_s for rank in ranks)
    if error > 0:
        notes.append(f"The ranks' clocks agree within {error * 1e3:.3g} ms.")
    return notes


def named_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """ "rank 3", "ranks 1, 2 and 5", or the first few of many."""
    names = [str(rank) for rank in ranks[:most]]
    if len(ranks) > most:
        return f"ranks {', '.join(names)} and {len(ranks) - most} more"
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"
