"""What is known of a profiled run: the numbers of its report, as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What can make a rank late, against the median rank.
LATE_CAUSES = ("data", "work", "network")


@dataclass(frozen=True)
class Spread:
    """Median, first and third quartile."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return Spread(*[values[0] if values else 0.0] * 3)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)


@dataclass(frozen=True)
class PartTime:
    """Exclusive time of one part of the step. The means of all parts add up to the mean step."""

    region: str
    axis: str
    phase: str
    mean_s: float
    seconds: Spread


@dataclass(frozen=True)
class MemoryPeak:
    """The most live bytes on a rank's device, and in what they came up."""

    step: int
    time_s: float
    device_bytes: int
    host_bytes: int
    bytes_by_kind: Mapping[str, int]
    region: str
    name: str
    phase: str
    # The most in this step while another region ran.
    elsewhere_bytes: int
    # Where the allocator had most of the device in this step: that, and what of it lay free between pieces in use.
    reserved_bytes: int | None = None
    fragmented_bytes: int | None = None


@dataclass(frozen=True)
class RankAnalysis:
    """One rank over the steps that count. Times are means over steps; they add up to the mean step."""

    rank: int
    coordinates: Mapping[str, int]
    step_s: Spread
    mean_step_s: float
    parts: Sequence[PartTime]
    data_s: float
    work_s: float
    network_s: float
    # Exposed communication before the last rank of the group had come.
    waited_s: float
    # Behind the median rank, in steps that were late by `LATE_SHARE`, by what was most behind.
    late_steps: Mapping[str, int]
    # Mean seconds behind the median rank, by cause; negative where the rank is ahead.
    behind_s: Mapping[str, float]
    # Time that work takes for each second in which the network is busy; None without communication.
    compute_to_communication: float | None
    peak: MemoryPeak | None
    # Pairs of queries and keys of masks that ranks share, a step; and of the mean of those ranks. None without masks.
    pairs: float | None = None
    pairs_of_mean: float | None = None
    # Exclusive time of attention in all phases.
    attention_s: float = 0.0
    # In which the device waited for the host's next kernel; None where that is not known, as on a CPU.
    host_bound_s: float | None = None
    # The machine that it ran on, or "".
    host: str = ""


@dataclass(frozen=True)
class AxisAnalysis:
    """Communication over one axis of the mesh: a rank's, per step, as the mean over ranks."""

    axis: str
    calls: float
    sent_bytes: float
    # From a call's start to its end, and what is left of that when the last rank has come.
    seconds: float
    transfer_s: float
    exposed_s: float
    # What compute waits for it after the last rank has come.
    exposed_transfer_s: float
    # The share of `seconds`, None where there are none.
    exposed_share: float | None
    # The share of `transfer_s`.
    exposed_transfer_share: float | None
    bytes_per_s: float | None
    transfer_bytes_per_s: float | None
    link_bytes_per_s: float | None
    # Of its calls those of less than `match_calls.SMALL_BYTES`, and what compute waits for these.
    small_calls: float = 0.0
    small_exposed_s: float = 0.0


@dataclass(frozen=True)
class KindAnalysis:
    """Calls of one kind over one axis: a rank's, per step, as the mean over ranks."""

    axis: str
    kind: str
    calls: float
    sent_bytes: float
    # Steps that have such a call, of those that count.
    steps: int
    # After the last rank has come, and of that what compute waits for; over steps. Of messages both ends.
    seconds: Spread
    exposed: Spread


@dataclass(frozen=True)
class MessageSize:
    """Calls of one kind and of about one size over one axis: a rank's, per step, as the mean over ranks."""

    axis: str
    # As of `KindAnalysis`, but "message" for its two ends together.
    kind: str
    # What a rank sends in a call: so many bytes or more, and fewer than these, where there is an end.
    from_bytes: int
    below_bytes: int | None
    calls: float
    sent_bytes: float
    # In which there is such a call that all ranks have come to, and what is sent in them.
    seconds: float
    bytes_per_s: float | None
    # These seconds, of the mean step.
    share: float


@dataclass(frozen=True)
class IdleTime:
    """What the devices waited for, in the mean step: the mean over ranks, and the rank that waited longest."""

    # data, host, network, late ranks, copies, save, other.
    cause: str
    # None where no rank knows it.
    mean_s: float | None
    share: float | None
    most_s: float | None
    rank: int | None


@dataclass(frozen=True)
class CriticalPart:
    """A part of the path that the step's time is made of, followed back from its end; in the mean step."""

    # A phase, a region without phases, or "network over AXIS".
    what: str
    seconds: float
    share: float
    # The rank that the path leads through most in this part; of the network who came last to its calls.
    rank: int
    rank_s: float


@dataclass(frozen=True)
class LateRank:
    """What others waited for one rank in calls of one axis, in the mean step."""

    rank: int
    axis: str
    waiting_ranks: int
    # Of those that waited, the mean; and the one that waited most.
    mean_s: float
    most_rank: int
    most_s: float


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one name or of one kind, in the step that was traced."""

    name: str
    # matrix products, attention, norms, elementwise, copies, collectives, ...
    kind: str
    count: int
    seconds: float
    # Of the traced step.
    share: float


@dataclass(frozen=True)
class Kernels:
    """What ran in one traced step of one rank, the longest first."""

    rank: int
    step: int
    step_s: float
    # Whether these are a GPU's kernels, or operators of a host with the time that each had for itself.
    is_gpu: bool
    by_kind: Sequence[KernelTime]
    # The first of `num_names`.
    by_name: Sequence[KernelTime]
    num_names: int


@dataclass(frozen=True)
class CongestedCall:
    """A call that took more than twice as long as the median of its kind, axis and size."""

    step: int
    rank: int
    axis: str
    kind: str
    # Who got it, where that is one rank.
    peer: int | None
    sent_bytes: int
    seconds: float
    median_s: float
    bytes_per_s: float
    median_bytes_per_s: float


@dataclass(frozen=True)
class CongestedLink:
    """Congested calls of one rank over one axis, to one peer or to its group."""

    axis: str
    rank: int
    peer: int | None
    calls: int
    steps: int
    # What they took beyond the median of their kind, per step.
    lost_s: float
    bytes_per_s: float
    median_bytes_per_s: float


@dataclass(frozen=True)
class MaskAnalysis:
    """Attention by the slices of one mask, whose pairs of queries and keys ranks share."""

    # As it prints itself.
    mask: str
    # Steps that have it, of those that count.
    steps: int
    # A rank's, in a step that has it.
    calls: float
    # Of these ranks: pairs in such a step.
    mean_pairs: float
    # Over the mean, of the rank that has most.
    imbalance: float
    busiest_rank: int


@dataclass(frozen=True)
class StepAnalysis:
    """One step over all ranks."""

    step: int
    # From the first rank's start to the last one's end.
    seconds: float
    warm_up: bool
    # The rank that was furthest behind the median, by what, and how much.
    slowest_rank: int
    behind_s: float
    cause: str
    loss: float | None
    tokens_per_s: float | None
    peak_bytes: int
    # Memory or a trace, in it or in the step before; or "".
    slowed_by: str = ""


@dataclass(frozen=True)
class Lane:
    """One row of the offload timeline."""

    name: str
    seconds: float
    # Those among them in which nothing was computed.
    exposed_s: float
    intervals: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Timeline:
    """One step of one rank; times are counted from its start."""

    rank: int
    step: int
    seconds: float
    lanes: Sequence[Lane] = ()
    # Time and live bytes by kind.
    memory: Sequence[tuple[float, Mapping[str, int]]] = ()


@dataclass(frozen=True)
class Utilization:
    """Share of the devices' peak that the model's operations take (MFU), and that with recomputation (HFU)."""

    mfu: float | None
    hfu: float | None
    model_flops: float | None
    hardware_flops: float | None
    peak_flops: float | None
    peak_flops_source: str
    # What is missing for them.
    why_not: str


@dataclass(frozen=True)
class RunAnalysis:
    """A profiled run."""

    name: str
    world_size: int
    num_ranks: int
    num_steps: int
    # The first step, and those that `StepAnalysis.slowed_by` names, are left out of everything but memory, the loss and
    # the table of steps.
    warm_up_steps: int
    started_at: float
    clock_error_s: float
    plan: Mapping[str, Any]
    model: Mapping[str, Any]
    environment: Mapping[str, str]
    step_s: Spread
    mean_step_s: float
    tokens_per_s: Spread | None
    parts: Sequence[PartTime]
    ranks: Sequence[RankAnalysis]
    steps: Sequence[StepAnalysis]
    axes: Sequence[AxisAnalysis]
    kinds: Sequence[KindAnalysis]
    sizes: Sequence[MessageSize]
    idle: Sequence[IdleTime]
    critical_path: Sequence[CriticalPart]
    late_ranks: Sequence[LateRank]
    compute_to_communication: float | None
    # Bytes from rank to rank per step: source, target, bytes.
    sent: Sequence[tuple[int, int, float]]
    num_congested: int
    congested: Sequence[CongestedCall]
    congestion: Sequence[CongestedLink]
    # Those first whose busiest rank has most beyond its share, of `num_masks`.
    masks: Sequence[MaskAnalysis]
    num_masks: int
    # The busiest rank's pairs over the mean of those that share a mask; the mean over steps. None without masks.
    mask_imbalance: float | None
    peak_rank: int | None
    memory: Timeline | None
    offload: Timeline | None
    utilization: Utilization
    # A rank's, in a step: "copy out" and "copy in", beside compute or not.
    copies: Mapping[str, Spread]
    # Of a step that torch's profiler has traced; None without such a trace.
    kernels: Kernels | None = None
    notes: Sequence[str] = ()
