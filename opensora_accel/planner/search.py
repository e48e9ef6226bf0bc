"""Which Plan fits and is the fastest for each sample, without tracing all of them.

    1. candidates    degrees that multiply to the ranks, with every way to save memory (candidates.py)
    2. estimates     memory and seconds of all of them (estimate.py), in a few seconds for thousands
    3. finalists     the fastest by estimate that may fit are traced under their own Plan, and simulated; each one
                     corrects the estimates of plans like it, and then the next one is chosen: until no estimate can
                     win within the error that estimates have shown, or the time is up
    4. ranking       seconds of a step over its samples, among those that fit

Of two plans that are estimated at 1.0 and 1.1 s for a sample, the first one is traced, and takes 1.3 s. Plans like it
are taken for 1.3 times slower from then on; the second one, of other degrees, is now the fastest, and traced next. What
is foreseen of a plan has been off by so much for plans that are as much like those that were traced: where that is 2 %,
one that is foreseen at 1.05 of the best one's time cannot win, and one of other degrees, for which it is 12 %, may.

A plan fits if the high end of its memory does. Of a mix of sizes (buckets), memory is that of the largest and time the
mean by how often each comes. Every number is an interval; that of an estimate is wider than that of a traced plan.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from opensora_accel.experimental import has_experiments
from opensora_accel.observe import CPU
from opensora_accel.plan import Plan
from opensora_accel.planner.allocator import StepMemory
from opensora_accel.planner.candidates import (
    GIB,
    Candidate,
    Outcome,
    Passes,
    Request,
    Residents,
    candidates,
    describe,
)
from opensora_accel.planner.cost import Placement, alone_s, contention, host_s
from opensora_accel.planner.estimate import (
    MEMORY_INTERVAL,
    TIME_INTERVAL,
    Estimator,
    Reference,
    axis_groups,
    farthest_rank,
)
from opensora_accel.planner.evidence import Corrections, Errors, Floors, floor_s
from opensora_accel.planner.foresee import StepParts
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.simulate import Timeline, simulate
from opensora_accel.planner.trace import Operation, Trace

# As many are traced, however long it takes; and while none of them fits, as many in search of one that does.
FEWEST, MOST_THAT_DO_NOT_FIT = 3, 12
# Ranks within this factor of pairs have as much attention: tokens are dealt out to be as even.
_AS_BUSY = 1.1
# Plans within about this share of each other count as equally fast.
_AS_FAST = 0.005
_OTHER = "activations and work"
# Fields that are not searched with the others, tried on the plan that has won; and why one is not taken by itself.
_CHANGES: tuple[tuple[str, Any, str], ...] = (
    ("prefetch", 2, ""),
    ("prefetch", 0, ""),
    ("reduce_dtype", "bf16", "gradients are rounded on their way"),
    ("gather_dtype", "int8", "weights are rounded on their way"),
    ("overlap_ulysses", True, "an experiment that no GPU has confirmed"),
)
# Of the search's time, until when they are.
_FOR_CHANGES = 1.3
Show = Callable[[str, float], None]


def _check_fixed(request: Request) -> None:
    """Before anything is traced, which takes a while. A table for tp is taken for granted."""
    excluded: Counter[str] = Counter()
    if not request.fixed or any(True for _ in candidates(request, excluded, has_tensor_table=True)):
        return
    fixed = ", ".join(f"{name}={value}" for name, value in request.fixed.items())
    rules = "".join(f"; {rule}" for rule, _count in excluded.most_common(2))
    raise ValueError(
        f"no plan for {request.world_size} GPUs has {fixed}: degrees multiply to the GPUs, and fields that depend on "
        f"others want them too (offload a checkpoint, cpu_offload and dp_shard a sharding){rules}"
    )


def search(request: Request, show: Show = lambda what, share: None, budget_s: float = 35.0) -> Outcome:
    """Ranks what there is.

    Args:
        show: called with what is done now, and the share of all that is done.
        budget_s: no further finalist is traced after so many seconds, and after 1.3 times as many no change of the best
            one; of what may win still, the outcome tells.

    Raises:
        ValueError: no plan has the fields that are fixed.
    """
    _check_fixed(request)
    start = time.perf_counter()
    estimators: list[tuple[Estimator, float]] = []
    for number, (workload, share) in enumerate(request.mix):
        show(f"tracing {workload.name}", 0.3 * number / len(request.mix))
        reference = Reference.of(request.as_run(workload), request.precision)
        estimators.append((Estimator(reference, request.hardware, request.residents.state_ratio), share))
    excluded: Counter[str] = Counter()
    show("estimating every plan", 0.3)
    found = [
        _estimate(request, estimators, plan, passes)
        for plan, passes in candidates(request, excluded, estimators[0][0].reference.has_tensor_table)
    ]
    show("choosing finalists", 0.4)
    traced: dict[Plan, Candidate] = {}
    errors, floors = Errors(), Floors(request.hardware)
    may_win: list[Candidate] = []
    while True:
        correction = Corrections(found, traced)
        left = [
            each
            for each in found
            if each.plan not in traced and _may_fit(request, each, correction.of_least_memory(each.plan))
        ]
        best_s = min((each.seconds_per_sample for each in traced.values() if each.fits), default=math.inf)
        foreseen = {each.plan: each.seconds_per_sample * correction.of(each.plan) for each in left}
        least = {
            each.plan: max(
                foreseen[each.plan] * errors.least(correction.level(each.plan)),
                floors.of(each) / each.samples,
            )
            for each in left
        }
        may_win = [each for each in left if least[each.plan] < (1 - _AS_FAST) * best_s]
        is_late = time.perf_counter() - start > budget_s
        # First what is foreseen to fit and to be faster than the best; then what is only not known to be slower.
        better = (
            each
            for each in left
            if foreseen[each.plan] < (1 - _AS_FAST) * best_s
            and _may_fit(request, each, correction.of_memory(each.plan))
        )
        each = min(better, key=lambda each: foreseen[each.plan], default=None) or min(
            left, key=lambda each: least[each.plan], default=None
        )
        has_one = best_s < math.inf
        is_enough = len(traced) >= (FEWEST if has_one else MOST_THAT_DO_NOT_FIT)
        if each is None or (is_enough and (is_late or not may_win)):
            break
        spent = max(
            (time.perf_counter() - start) / max(budget_s, 1e-9),
            len(traced) / (len(traced) + len(may_win) + 1),
        )
        show(f"tracing {describe(each.plan)}: {len(may_win):,} more may win", 0.4 + 0.6 * min(1.0, spent))
        traced[each.plan] = exact(request, each.plan, each.passes)
        floors.note(traced[each.plan])
        errors.note(correction.level(each.plan), traced[each.plan].seconds_per_sample / foreseen[each.plan])
    # Where nothing fits there is nothing to win from.
    may_win = may_win if has_one else []
    correction = Corrections(found, traced)
    merged = [traced.get(each.plan) or _scaled(each, correction.of(each.plan)) for each in found]
    priced = []
    if has_one:
        best = min((each for each in traced.values() if each.fits), key=lambda each: each.seconds_per_sample)
        for name, value, why in _CHANGES:
            if time.perf_counter() - start > _FOR_CHANGES * budget_s:
                break
            show(f"tracing the best with {name}={value}", 0.99)
            candidate = _changed(request, best, name, value)
            if candidate is None:
                continue
            gain = 1 - candidate.seconds_per_sample / best.seconds_per_sample
            if why:
                priced.append((candidate, why))
            elif gain <= 0 or gain > _AS_FAST:
                merged.append(candidate)
                best = candidate if candidate.fits and gain > 0 else best
    show("ranking", 1.0)
    return Outcome(
        request,
        _ranked(request, merged),
        dict(excluded),
        time.perf_counter() - start,
        may_win=tuple(each.plan for each in sorted(may_win, key=lambda each: least[each.plan])),
        gain=max((1 - least[each.plan] / best_s for each in may_win), default=0.0),
        priced=tuple(priced),
    )


def _changed(request: Request, best: Candidate, name: str, value: Any) -> Candidate | None:
    """Its plan with another value of a field; None where the field is fixed, or it changes nothing or is refused."""
    plan = best.plan
    changes_something = {
        "prefetch": plan.num_shards > 1,
        "reduce_dtype": plan.mixed > 1,
        "gather_dtype": plan.num_shards > 1 and has_experiments(),
        "overlap_ulysses": plan.ulysses > 1 and has_experiments(),
    }
    if name in request.fixed or not changes_something[name]:
        return None
    with contextlib.suppress(ValueError):  # by other fields of the plan, or by the step that is traced
        return exact(request, plan.replace(**{name: value}), best.passes)
    return None


def _may_fit(request: Request, candidate: Candidate, factor: float) -> bool:
    """By the middle of what is estimated, times a factor that traced plans like it have shown."""
    low, high = candidate.memory_bytes
    return factor * (low + high) / 2 <= request.hardware.memory_bytes and not _host_excess(request, candidate)


def _scaled(candidate: Candidate, factor: float) -> Candidate:
    low, high = candidate.step_time_s
    seconds = {kind: factor * each for kind, each in candidate.seconds_by_kind.items()}
    return replace(
        candidate, step_time_s=(factor * low, factor * high), expected_s=factor * candidate.expected_s,
        seconds_by_kind=seconds,
    )  # fmt: skip


def _estimate(
    request: Request, estimators: Sequence[tuple[Estimator, float]], plan: Plan, passes: Passes
) -> Candidate:
    samples = passes.samples
    kinds = max(
        (each.bytes_by_kind(plan, samples) for each, _share in estimators),
        key=lambda kinds: sum(kinds.values()),
    )
    host = max(each.host_bytes(plan, samples) for each, _share in estimators)
    seconds = defaultdict[str, float](float)
    whole = sum(share for _each, share in estimators)
    for each, share in estimators:
        for kind, taken in each.seconds_by_kind(plan, *passes).items():
            seconds[kind] += taken * share / whole
    expected = sum(seconds.values())
    interval = expected * (1 - TIME_INTERVAL), expected * (1 + TIME_INTERVAL)
    live = sum(kinds.values())
    trained = max(each.trained_bytes(plan) for each, _share in estimators)
    return _candidate(
        request, plan, passes, live, MEMORY_INTERVAL, kinds, trained, interval, expected, seconds, host
    )


def exact(request: Request, plan: Plan, passes: Passes) -> Candidate:
    """One Plan, traced under itself for every size of clips, and simulated."""
    hardware = request.hardware
    placement = Placement.on(hardware, plan.world_size)
    bounds = [hardware.bound(-1), hardware, hardware.bound(+1)]
    whole = sum(share for _workload, share in request.mix)
    times, kinds_s = [0.0, 0.0, 0.0], defaultdict[str, float](float)
    largest: tuple[Trace, Timeline] | None = None
    foreseen, floors = StepParts(), [0.0, 0.0]
    # Any number of microbatches follows from two.
    traced = min(2, passes.accumulation)
    for workload, share in request.mix:
        as_run = replace(request.as_run(workload, passes.samples), accumulation=traced)
        trace = trace_step(as_run, plan, rank=farthest_rank(plan, placement))
        if (busiest := busiest_rank(trace)) != trace.rank:
            trace = trace_step(as_run, plan, rank=busiest)
        trace = replace(trace, operations=(*trace.operations, *beside_optimizer(trace, request.residents)))
        timelines = [simulated(trace, each, placement) for each in bounds]
        for index, each in enumerate(timelines):
            times[index] += repeated_s(trace, each, passes.accumulation / traced) * share / whole
        repeats = passes.accumulation / traced
        foreseen.add(trace, timelines, hardware, placement, share / whole, repeats)
        for index, seconds in enumerate(floor_s(trace, hardware, placement)):
            floors[index] += seconds * repeats * share / whole
        for kind, seconds in timelines[1].critical_s.items():
            kinds_s[kind] += seconds * repeats * share / whole
        if largest is None or trace.peak_bytes > largest[0].peak_bytes:
            largest = trace, timelines[1]
    assert largest is not None
    trace, timeline = largest
    kinds = trace.bytes_by_kind_at_peak
    # What is no parameter, gradient, ... is what autograd keeps, and what operators work with.
    device = {
        _OTHER if kind == "other" else kind: size for kind, size in kinds.items() if not kind.endswith("host")
    }
    state = device.get("optimizer state", 0)
    device["optimizer state"] = round(state * request.residents.state_ratio / 2)
    live = sum(device.values())
    candidate = _candidate(
        request, plan, passes, live, 0.0, device, trace.trained_bytes, (times[0], times[2]), times[1], kinds_s,
        trace.host_bytes,
        communication_bytes=communication_buffer_bytes(trace, hardware),
        storages=trace.storages,
    )  # fmt: skip
    return replace(
        candidate, trace=trace, timeline=timeline, foreseen=foreseen, floor_s=(floors[0], floors[1])
    )


def beside_optimizer(trace: Trace, residents: Residents) -> list[Operation]:
    """What passes over a rank's shards beside the optimizer's own operators.

    Clipping reads the gradients for their norm, and reads and writes them where it scales them; averaging weights reads
    two and writes one. Of 1 GiB of trained shards 3 GiB are moved for each.
    """
    passes = {"clipping": 3 * residents.clips, "averaging weights": 3 * residents.ema}
    return [
        Operation(name, "memory", "compute", phase="optimizer", num_bytes=times * trace.trained_bytes)
        for name, times in passes.items()
        if times and trace.trained_bytes
    ]


def repeated_s(trace: Trace, timeline: Timeline, repeats: float) -> float:
    """Seconds of a step whose microbatches come so many times as often as they were traced, and its optimizer once."""
    optimizer_s = sum(
        span.end_s - span.start_s
        for span in timeline.spans
        if trace.operations[span.operation].phase == "optimizer" and span.stream == "compute"
    )
    return repeats * (timeline.step_s - optimizer_s) + optimizer_s


def busiest_rank(trace: Trace) -> int:
    """The rank that the others of the traced one's ring wait for: it itself, where none has much more attention.

    Tokens that are dealt out by a mask are as even as that. A causal mask over runs in order gives the last rank of
    four 1.75 times the mean, and the first one a quarter of it.
    """
    if trace.attention is None or trace.plan.ring == 1:
        return trace.rank
    areas = trace.attention.deal.areas
    if max(areas) <= _AS_BUSY * areas[trace.attention.place]:
        return trace.rank
    return axis_groups(trace.plan, trace.rank)["ring"][areas.index(max(areas))]


def communication_buffer_bytes(trace: Trace, hardware: Hardware) -> int:
    """What the communication library takes of a rank's memory beside the step's own tensors.

    NCCL has buffers for each communicator. gloo, on a CPU, also copies what a reduce-scatter is given.
    """
    copied = 0.0
    if hardware.cores:
        given = (
            each.num_bytes * len(each.group) / (len(each.group) - 1)
            for each in trace.operations
            if each.collective == "reduce-scatter" and len(each.group) > 1
        )
        copied = max(given, default=0.0)
    return hardware.communicator_bytes * len(trace.groups) + round(copied)


def simulated(trace: Trace, hardware: Hardware, placement: Placement) -> Timeline:
    """The timeline of a trace on a machine."""

    def seconds(operation: Operation) -> float:
        return alone_s(operation, hardware, placement, trace.plan)

    def launch_s(operation: Operation) -> float:
        return host_s(operation, hardware, placement, trace.plan) if hardware.runs_ahead else 0.0

    return simulate(trace, seconds, launch_s=launch_s, contention=contention(hardware, placement))


def _candidate(
    request: Request,
    plan: Plan,
    passes: Passes,
    live: int,
    uncertain: float,
    kinds: Mapping[str, int],
    trained_bytes: int,
    step_time_s: tuple[float, float],
    expected_s: float,
    seconds: Mapping[str, float],
    host_bytes: int,
    communication_bytes: int | None = None,
    storages: StepMemory | None = None,
) -> Candidate:
    """With what lies in memory beside the step, and what the allocator and the libraries take."""
    hardware, residents = request.hardware, request.residents
    if communication_bytes is None:
        communication_bytes = hardware.communicator_bytes * len(axis_groups(plan))
    by_kind = dict(kinds)
    if residents.ema:
        by_kind["ema"] = trained_bytes
    by_kind |= {kind: part.size_bytes for kind, part in residents.frozen.items() if part.size_bytes}
    beside = sum(by_kind.values()) - sum(kinds.values())
    low, high = live * (1 - uncertain) + beside, live * (1 + uncertain) + beside
    by_kind["context"] = hardware.context_bytes
    by_kind["communication buffers"] = communication_bytes
    lost = 0
    # On a CPU there is no such allocator.
    if storages is not None and hardware.architecture != CPU:
        others = beside + hardware.context_bytes + communication_bytes
        lost = storages.replayed(hardware.memory_bytes - others, residents.state_ratio / 2).lost_bytes
    spread = hardware.uncertainties.get("reserved", 0.0)
    # What fragments hold an allocator that moves its segments does not lose, so that the low end has none.
    low *= 1 - spread
    reserved = (high + lost) * (1 + hardware.allocator_slack) * (1 + spread)
    by_kind["allocator slack"] = round(reserved - high)
    low += hardware.context_bytes
    high += hardware.context_bytes + by_kind["communication buffers"] + by_kind["allocator slack"]
    memory = round(low), round(high)
    candidate = Candidate(
        plan, passes, plan.data * request.largest.batch * passes.samples * passes.accumulation, memory, step_time_s,
        expected_s,
        by_kind, dict(seconds), host_bytes, fits=memory[1] <= hardware.memory_bytes,
    )  # fmt: skip
    return replace(candidate, fits=candidate.fits and not _host_excess(request, candidate))


def _host_excess(request: Request, candidate: Candidate) -> str:
    """Why the host's memory does not hold it, or ""."""
    ranks = min(request.world_size, request.hardware.ranks_per_node)
    needed, has = ranks * candidate.host_bytes, request.hardware.host_memory_bytes
    if needed <= has:
        return ""
    return f"needs {needed / GIB:,.0f} GiB of host memory on a node that has {has / GIB:,.0f} GiB"


# ---- ranking


def _ranked(request: Request, found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The best first. A plan that was only estimated does not stand before one that was traced."""
    fitting = sorted(
        (each for each in found if each.fits),
        # Among plans that are as fast the one with the least to set comes first.
        key=lambda each: (
            not each.is_traced, round(math.log(each.seconds_per_sample) / _AS_FAST), len(describe(each.plan)),
        ),
    )  # fmt: skip
    others = sorted((each for each in found if not each.fits), key=lambda each: each.memory_bytes[1])
    best = fitting[0] if fitting else None
    return tuple(
        each if each is best else replace(each, reason=reason_of(request, each, best))
        for each in (*fitting, *others)
    )


def reason_of(request: Request, candidate: Candidate, best: Candidate | None) -> str:
    """Why a candidate is not the best, with the numbers that decide."""
    if not candidate.fits:
        excess = _host_excess(request, candidate)
        if excess:
            return excess
        has = request.hardware.memory_bytes
        kinds = sorted(candidate.bytes_by_kind.items(), key=lambda item: -item[1])[:2]
        most = ", ".join(f"{kind} {size / GIB:,.1f}" for kind, size in kinds)
        return f"needs up to {candidate.memory_bytes[1] / GIB:,.1f} GiB of {has / GIB:,.1f}: {most}"
    assert best is not None
    slower = candidate.seconds_per_sample / best.seconds_per_sample - 1
    if slower < 0 and not candidate.is_traced:
        return f"not traced: by estimate {-slower:.0%} faster than the best, within the estimate's interval"
    if abs(slower) <= 2 * _AS_FAST and candidate.is_traced:
        return "as fast, with more to set, or more memory"
    ours, theirs = (
        {kind: seconds / each.samples for kind, seconds in each.seconds_by_kind.items()}
        for each in (candidate, best)
    )
    more = max(ours, key=lambda kind: ours[kind] - theirs.get(kind, 0.0), default="")
    what = "" if not more or candidate.is_traced != best.is_traced else f", most of it {more}"
    return f"{slower:.1%} slower for each sample{what}"
