"""Which Plans there are for a job, which of them fit, and which is the fastest for each sample.

    1. candidates    degrees that multiply to the ranks, with every way to save memory; rules exclude some, each told
    2. estimates     memory and seconds of all of them (estimate.py), in a few seconds for thousands
    3. finalists     the fastest by estimate that may fit are traced under their own Plan, and simulated; each one
                     corrects the estimates of plans like it, and then the next one is chosen
    4. ranking       seconds of a step over its samples, among those that fit

On 8 GPUs with a model of 12 heads: ulysses may be 1, 2 or 4, and 8 is excluded, because 12 heads are not divisible by
it. With a global batch of 4, dp=8 is excluded: a data rank would have no sample. What is left has, say, ulysses=2 with
four data ranks, which take 1.1 s for 4 samples, or ulysses=4 with two of them and two microbatches, 1.3 s: the first
one wins, if it fits.

A plan fits if the high end of its memory does. Of a mix of sizes (buckets), memory is that of the largest and time the
mean by how often each comes. Every number is an interval; that of an estimate is wider than that of a traced plan.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from opensora_accel.plan import Plan
from opensora_accel.planner.cost import Placement, contention, host_s, operation_s
from opensora_accel.planner.estimate import (
    HOST_OPTIMIZER_BYTES_PER_S,
    MEMORY_INTERVAL,
    TIME_INTERVAL,
    Estimator,
    Reference,
    axis_groups,
)
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.simulate import Timeline, simulate
from opensora_accel.planner.trace import Operation, Trace, trace_step
from opensora_accel.planner.workload import Workload

GIB = 2**30
# Bytes of optimizer state for each parameter: two moments, the low-bit ones with a scale for every 256 (4bit: 128).
OPTIMIZERS = {"adamw": 8.0, "adamw-8bit": 2.03, "adamw-fp8": 2.03, "adamw-4bit": 1.06, "sgd": 0.0}
_CHECKPOINTS = (
    ("none", 0.0),
    ("selective", 0.0),
    ("selective", 1.0),
    ("full", 0.0),
    ("full", 0.5),
    ("full", 1.0),
)
_CHUNKS = (1, 4)
# Finalists that are traced, and the fewest of them, however long tracing takes.
FINALISTS, FEWEST = 12, 3
# A plan that is slower than the best by this factor, by a corrected estimate, is not traced any more.
_NO_LONGER_WORTH = 1.03
# Plans within about this share of each other count as equally fast.
_AS_FAST = 0.005
_OTHER = "activations and work"
Show = Callable[[str, float], None]


@dataclass(frozen=True)
class Residents:
    """What is on a device beside the step of the transformer.

    Raises:
        ValueError: an unknown optimizer, or negative bytes.
    """

    optimizer: str = "adamw"
    # A second copy of the weights in fp32, sharded as they are.
    ema: bool = False
    text_encoder_bytes: int = 0
    vae_bytes: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {self.optimizer!r}")
        for name in ("text_encoder_bytes", "vae_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}")

    @property
    def state_ratio(self) -> float:
        """Bytes of optimizer state for each byte of fp32 weights."""
        return OPTIMIZERS[self.optimizer] / 4


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Raises:
        ValueError: no ranks, shares that are not above 0, a batch that is none, or ranks without a network.
    """

    # Sizes of clips, and how often each comes.
    mix: tuple[tuple[Workload, float], ...]
    hardware: Hardware
    world_size: int
    precision: str = "bf16"
    residents: Residents = Residents()
    # Samples of an optimizer step over all ranks; None: those of one microbatch of every data rank.
    global_batch: int | None = None
    # Gives a workload with so many samples in a pass: then each data rank has its share of the global batch in one
    # pass, as the trainer does it, and `accumulation` of them. None: a pass has the workload's samples, always.
    resize: Callable[[Workload, int], Workload] | None = None
    accumulation: int = 1
    # Fields of the Plan that are not to be searched.
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.world_size, int) or isinstance(self.world_size, bool) or self.world_size < 1:
            raise ValueError(
                f"the number of GPUs must be a whole number, at least 1; got {self.world_size!r}"
            )
        if not self.mix or any(not share > 0 for _workload, share in self.mix):
            raise ValueError("a mix names at least one size of clips, each with a share above 0")
        if self.global_batch is not None and self.global_batch < 1:
            raise ValueError(f"the global batch is a number of samples, at least 1; got {self.global_batch}")
        Plan.from_dict({name: value for name, value in self.fixed.items() if name in _FREE})
        unknown = [name for name in self.fixed if name not in Plan.__dataclass_fields__]
        if unknown:
            Plan.from_dict({unknown[0]: self.fixed[unknown[0]]})  # says which fields there are
        self.hardware.nodes_of(self.world_size)

    def as_run(self, workload: Workload, samples: int = 1) -> Workload:
        """A size of the mix as it runs on the hardware, with so many times the samples in a pass."""
        if self.resize is not None:
            workload = self.resize(workload, samples)
        return replace(workload, fused_optimizer=self.hardware.runs_ahead)

    @property
    def largest(self) -> Workload:
        return max((workload for workload, _share in self.mix), key=lambda each: each.num_tokens * each.batch)


# Fields that are checked without the others.
_FREE = ("checkpoint", "mlp_chunks", "prefetch", "precision")


class Passes(NamedTuple):
    """Microbatches of an optimizer step, and how many times the workload's samples each has on a data rank."""

    accumulation: int = 1
    samples: int = 1


@dataclass(frozen=True)
class Candidate:
    """A Plan, and what it needs and takes."""

    plan: Plan
    passes: Passes
    # Of an optimizer step, over all ranks.
    samples: int
    # [low, high], of the device and of an optimizer step.
    memory_bytes: tuple[int, int]
    step_time_s: tuple[float, float]
    expected_s: float
    bytes_by_kind: Mapping[str, int]
    seconds_by_kind: Mapping[str, float]
    # Of one rank.
    host_bytes: int
    fits: bool
    # Why it is not the best, or "".
    reason: str = ""
    # Of the largest size of clips; None for an estimate.
    trace: Trace | None = None
    timeline: Timeline | None = None

    @property
    def is_traced(self) -> bool:
        return self.trace is not None

    @property
    def seconds_per_sample(self) -> float:
        return self.expected_s / self.samples

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_dict(),
            "accumulation": self.passes.accumulation,
            "samples": self.samples,
            "memory_bytes": list(self.memory_bytes),
            "step_time_s": list(self.step_time_s),
            "seconds_per_sample": self.seconds_per_sample,
            "bytes_by_kind": dict(self.bytes_by_kind),
            "seconds_by_kind": dict(self.seconds_by_kind),
            "host_bytes": self.host_bytes,
            "fits": self.fits,
            "traced": self.is_traced,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Outcome:
    """All candidates, the best first, then those that fit, then the others by what they need."""

    request: Request
    candidates: tuple[Candidate, ...]
    # Rules that exclude, with how many sets of degrees each took.
    excluded: Mapping[str, int]
    seconds: float

    @property
    def best(self) -> Candidate | None:
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and first.fits else None


def describe(plan: Plan) -> str:
    """A Plan in few words: what is not the default."""
    default = Plan()
    parts = [
        f"{name}={value}" if not isinstance(value, bool) else name
        for name, value in plan.to_dict().items()
        if value != getattr(default, name) and name not in ("precision", "sharding_factor", "ranks_per_node")
    ]
    return " ".join(parts) or "one rank, nothing saved"


# ---- candidates


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def candidates(
    request: Request, excluded: Counter[str], has_tensor_table: bool = False
) -> Iterator[tuple[Plan, Passes]]:
    """Plans that keep the rules, each with its microbatches; what the rules exclude is counted."""
    for degrees, data in _meshes(request, excluded, has_tensor_table):
        passes = passes_of(request, data)
        if passes is None:
            excluded[
                f"the data ranks' samples must divide the global batch of {request.global_batch}; put more ranks on "
                "ring or ulysses, or raise the batch"
            ] += 1
            continue
        for sharding, (checkpoint, offload), chunks in itertools.product(
            _shardings(request, degrees, data), _CHECKPOINTS, _CHUNKS
        ):
            for extra in _extras(request, {**degrees, **sharding}):
                fields = {
                    "precision": request.precision, "checkpoint": checkpoint, "offload": offload, "mlp_chunks": chunks,
                    **degrees, **sharding, **extra,
                }  # fmt: skip
                if any(fields.get(name, value) != value for name, value in request.fixed.items()):
                    continue
                try:
                    plan = Plan.from_dict({**fields, **request.fixed})
                except ValueError:
                    continue  # not with what is fixed
                if plan.world_size == request.world_size:
                    yield plan, passes


def _meshes(
    request: Request, excluded: Counter[str], has_tensor_table: bool
) -> Iterator[tuple[dict[str, int], int]]:
    """Degrees of ring, ulysses and tp, with the data ranks that are left."""
    largest = request.largest
    # A user's own step may not say what it has.
    heads = largest.num_heads or request.world_size
    tokens = min(workload.num_tokens for workload, _share in request.mix) or request.world_size
    wanted = {axis: request.fixed.get(axis) for axis in ("ring", "ulysses", "tp")}

    def choices(axis: str, number: int) -> list[int]:
        return [each for each in divisors(number) if wanted[axis] in (None, each)]

    for tp in choices("tp", request.world_size):
        if tp > 1 and not has_tensor_table:
            excluded[f"tp > 1: no policy says where the layers of {largest.name} are cut"] += 1
            continue
        if heads % tp or tp > request.hardware.ranks_per_node:
            excluded[
                f"tp must divide the {heads} heads and stay in a node of {request.hardware.ranks_per_node}"
            ] += 1
            continue
        for ulysses in choices("ulysses", request.world_size // tp):
            if heads % (ulysses * tp):
                excluded[f"ulysses × tp must divide the {heads} heads"] += 1
                continue
            for ring in choices("ring", request.world_size // tp // ulysses):
                if ring * ulysses > tokens:
                    excluded[f"ring × ulysses may not pass the {tokens} tokens of the shortest clips"] += 1
                    continue
                data = request.world_size // (tp * ulysses * ring)
                yield {"ring": ring, "ulysses": ulysses, "tp": tp}, data


def passes_of(request: Request, data: int) -> Passes | None:
    """So that a step has the global batch; None where so many data ranks cannot have it."""
    if request.global_batch is None:
        return Passes(request.accumulation)
    of_a_pass = data * request.largest.batch
    if request.global_batch % of_a_pass:
        return None
    times = request.global_batch // of_a_pass
    return Passes(request.accumulation, times) if request.resize is not None else Passes(times)


def _shardings(request: Request, degrees: Mapping[str, int], data: int) -> list[dict[str, Any]]:
    """Whole parameters, and ZeRO over all ranks, over a node's, and over four and sixteen nodes'."""
    found: list[dict[str, Any]] = [{"sharding": "none", "dp_replicate": data, "dp_shard": 1}]
    sequence, per_node = (
        degrees["ring"] * degrees["ulysses"],
        request.hardware.ranks_per_node // degrees["tp"],
    )
    sizes = {data}
    for nodes in (1, 4, 16):
        if data * sequence > nodes * per_node:
            sizes.add(
                max(each for each in divisors(data) if each == 1 or each * sequence <= nodes * per_node)
            )
    for size, stage in itertools.product(sorted(sizes), ("zero2", "zero3")):
        # A single rank has nothing to share; with ZeRO-3 its shard may lie in host memory.
        if size * sequence > 1 or stage == "zero3":
            found.append({"sharding": stage, "dp_replicate": data // size, "dp_shard": size})
    return found


def _extras(request: Request, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Shards in host memory, and collectives in two levels where a group leaves its node with several ranks on it."""
    choices: list[dict[str, Any]] = [{}]
    shards = fields["dp_shard"] * fields["ring"] * fields["ulysses"]
    # A device that computes in host memory has nothing to move there.
    if fields["sharding"] == "zero3" and request.hardware.runs_ahead:
        choices.append({"cpu_offload": True})
        if shards == 1:
            return choices[1:]
    per_node = request.hardware.ranks_per_node
    span = fields["ulysses"] * fields["tp"]
    if 1 < per_node < span and request.world_size % per_node == 0:
        choices.append({"two_level": "on", "ranks_per_node": per_node})
    return choices


# ---- search


def search(request: Request, show: Show = lambda what, share: None, budget_s: float = 35.0) -> Outcome:
    """Ranks what there is.

    Args:
        show: called with what is done now, and the share of all that is done.
        budget_s: no further finalist is traced after so many seconds.
    """
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
    while len(traced) < FINALISTS:
        correction = _Correction(found, traced)
        left = [
            each
            for each in found
            if each.plan not in traced and _may_fit(request, each, correction.of_memory(each.plan))
        ]
        best_s = min((each.seconds_per_sample for each in traced.values() if each.fits), default=math.inf)
        each = min(left, key=lambda each: each.seconds_per_sample * correction.of(each.plan), default=None)
        if each is None:
            break
        is_late = time.perf_counter() - start > budget_s
        is_slower = each.seconds_per_sample * correction.of(each.plan) > _NO_LONGER_WORTH * best_s
        if best_s < math.inf and len(traced) >= FEWEST and (is_late or is_slower):
            break
        show(f"tracing {describe(each.plan)}", 0.4 + 0.6 * len(traced) / FINALISTS)
        traced[each.plan] = exact(request, each.plan, each.passes)
    correction = _Correction(found, traced)
    merged = [traced.get(each.plan) or _scaled(each, correction.of(each.plan)) for each in found]
    show("ranking", 1.0)
    return Outcome(request, _ranked(request, merged), dict(excluded), time.perf_counter() - start)


def _may_fit(request: Request, candidate: Candidate, factor: float) -> bool:
    """By the middle of what is estimated, times a factor that traced plans like it have shown."""
    low, high = candidate.memory_bytes
    return factor * (low + high) / 2 <= request.hardware.memory_bytes and not _host_excess(request, candidate)


class _Correction:
    """What traced plans took and needed, over what was estimated of them: of plans like them, or of all."""

    def __init__(self, found: Sequence[Candidate], traced: Mapping[Plan, Candidate]):
        ratios = defaultdict[Any, list[float]](list)
        for each in found:
            exact_one = traced.get(each.plan)
            if exact_one is not None:
                plan, middle = each.plan, sum(each.memory_bytes) / 2
                for key in self._time_keys(plan):
                    ratios[key].append(exact_one.expected_s / each.expected_s)
                for key in self._memory_keys(plan):
                    ratios[key].append(exact_one.memory_bytes[1] / middle)
        self._median = {key: statistics.median(values) for key, values in ratios.items()}

    def of(self, plan: Plan) -> float:
        """For its seconds."""
        return next((self._median[key] for key in self._time_keys(plan) if key in self._median), 1.0)

    def of_memory(self, plan: Plan) -> float:
        return next((self._median[key] for key in self._memory_keys(plan) if key in self._median), 1.0)

    @staticmethod
    def _time_keys(plan: Plan) -> tuple[Any, ...]:
        degrees = plan.ring, plan.ulysses, plan.tp
        return ("time", *degrees, plan.checkpoint), ("time", *degrees), ("time", plan.ring), "time"

    @staticmethod
    def _memory_keys(plan: Plan) -> tuple[Any, ...]:
        return ("memory", plan.checkpoint, plan.sharding), ("memory", plan.checkpoint), "memory"


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
    return _candidate(request, plan, passes, live, MEMORY_INTERVAL, kinds, interval, expected, seconds, host)


def exact(request: Request, plan: Plan, passes: Passes) -> Candidate:
    """One Plan, traced under itself for every size of clips, and simulated."""
    hardware = request.hardware
    placement = Placement.on(hardware, plan.world_size)
    bounds = [hardware.bound(-1), hardware, hardware.bound(+1)]
    whole = sum(share for _workload, share in request.mix)
    times, kinds_s = [0.0, 0.0, 0.0], defaultdict[str, float](float)
    largest: tuple[Trace, Timeline] | None = None
    # Two microbatches tell of any number of them.
    traced = min(2, passes.accumulation)
    for workload, share in request.mix:
        trace = trace_step(replace(request.as_run(workload, passes.samples), accumulation=traced), plan)
        timelines = [simulated(trace, each, placement) for each in bounds]
        optimizer_s = [
            sum(span.end_s - span.start_s for span in each.spans
                if trace.operations[span.operation].phase == "optimizer" and span.stream == "compute")
            for each in timelines
        ]  # fmt: skip
        for index, each in enumerate(timelines):
            step_s = passes.accumulation / traced * (each.step_s - optimizer_s[index]) + optimizer_s[index]
            times[index] += step_s * share / whole
        for kind, seconds in timelines[1].critical_s.items():
            kinds_s[kind] += seconds * passes.accumulation / traced * share / whole
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
    found = _candidate(
        request, plan, passes, live, 0.0, device, (times[0], times[2]), times[1], kinds_s, trace.host_bytes,
        num_groups=len(trace.groups), parameter_bytes=trace.parameter_bytes,
    )  # fmt: skip
    return replace(found, trace=trace, timeline=timeline)


def simulated(trace: Trace, hardware: Hardware, placement: Placement) -> Timeline:
    """The timeline of a trace on a machine."""
    # Where kernels run on the host's cores, starting one is part of it.
    start_s = host_s(hardware, placement)
    beside_s = 0.0 if hardware.runs_ahead else start_s

    def seconds(operation: Operation) -> float:
        if trace.plan.cpu_offload and operation.phase == "optimizer":
            return operation.num_bytes / HOST_OPTIMIZER_BYTES_PER_S + beside_s
        return operation_s(operation, hardware, placement) + beside_s

    return simulate(trace, seconds, launch_s=start_s - beside_s, contention=contention(hardware, placement))


def _candidate(
    request: Request,
    plan: Plan,
    passes: Passes,
    live: int,
    uncertain: float,
    kinds: Mapping[str, int],
    step_time_s: tuple[float, float],
    expected_s: float,
    seconds: Mapping[str, float],
    host_bytes: int,
    num_groups: int | None = None,
    parameter_bytes: int | None = None,
) -> Candidate:
    """With what lies in memory beside the step, and what the allocator and the libraries take."""
    hardware, residents = request.hardware, request.residents
    num_groups = len(axis_groups(plan)) if num_groups is None else num_groups
    by_kind = dict(kinds)
    if residents.ema:
        by_kind["ema"] = by_kind.get("parameters", 0) if parameter_bytes is None else parameter_bytes
    for name in ("text_encoder", "vae"):
        size = getattr(residents, f"{name}_bytes")
        if size:
            by_kind[name.replace("_", " ")] = size
    beside = sum(by_kind.values()) - sum(kinds.values())
    low, high = live * (1 - uncertain) + beside, live * (1 + uncertain) + beside
    by_kind["context"] = hardware.context_bytes
    by_kind["communication buffers"] = hardware.communicator_bytes * num_groups
    by_kind["allocator slack"] = round(high * hardware.allocator_slack)
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
        # Of plans that are as fast the one with the least to set comes first.
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
