"""What stands out in a profiled run, in plain words, most important first, each with what to do about it.

Importance is time: the share of the mean step that would be saved. The memory peak saves none, and comes last.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from opensora_accel.profiler.analysis import (
    LATE_CAUSES,
    AxisAnalysis,
    CongestedLink,
    RankAnalysis,
    RunAnalysis,
)
from opensora_accel.profiler.match_calls import SMALL_BYTES

# What loses less of the step than this is not worth a line.
MIN_SHARE = 0.02
# Exposed communication over an axis: of its own time, and of the step.
EXPOSED_SHARE, EXPOSED_OF_STEP = 0.2, 0.05
# Compute : communication under this makes the network the limit.
MIN_RATIO = 3.0
MORE_COMPUTE = (
    "use fewer ring ranks, larger blocks (more tokens or channels per rank), or accumulate gradients over several "
    "microbatches"
)
# The optimizer's peak stands out if it is above all others by this share of itself.
PEAK_SHARE = 0.03
# Tokens that are dealt out are within 1.05.
MASK_IMBALANCE = 1.1
# All ranks' waiting for data, and the device's for the host, stand out from this share of the step.
DATA_SHARE, HOST_SHARE = 0.05, 0.1
# What lies free between pieces in use, of all that the allocator has.
FRAGMENTED_SHARE = 0.1
# A rank is late as a rule in this share of the steps.
AS_A_RULE = 0.5

_HIDE = {
    "ring": "use fewer ring ranks (put some on ulysses), or give each rank more tokens, so that a block of attention "
    "takes longer than passing keys and values on",
    "ulysses": "set overlap_ulysses=True, which sends under the projections, or use fewer ulysses ranks",
    "tp": "keep tensor parallel ranks within one node, or use fewer",
    "dp_shard": "raise prefetch, so that parameters are gathered earlier, or use zero2, which gathers them once",
}
_MORE_DATA = "give the loader more workers or a longer prefetch, or encode the clips before the run"
_FEWER_MESSAGES = {
    "ring": "use fewer ring ranks, so that each passes more keys and values on at once",
    "ulysses": "use fewer ulysses ranks, or overlap_ulysses=False, which sends all heads in one call",
    "tp": "use fewer tensor parallel ranks, or a larger micro-batch",
    "dp_shard": "shard larger blocks at once, over fewer ranks, or use zero2, which gathers parameters once",
}
_HIDE_GRADIENTS = (
    "accumulate gradients over several microbatches, or let the reduction begin under backward (DDP and FSDP2 do; a "
    "single all-reduce at the end cannot)"
)


@dataclass(frozen=True)
class Finding:
    """One thing that stands out."""

    # slow data, host-bound, imbalance, straggler, slow network, uneven mask, exposed communication, small messages,
    # congested link, slow link, low ratio, memory peak, fragmentation
    kind: str
    text: str
    remedy: str
    # The share of the step that it costs.
    share: float
    seconds: float
    ranks: tuple[int, ...] = ()
    axis: str = ""


def findings_of(run: RunAnalysis) -> list[Finding]:
    """All that stands out, by the share of the step that it costs."""
    looks: tuple[Callable[[RunAnalysis], Iterator[Finding]], ...] = (
        _late_ranks,
        _all_wait_for_data,
        _host_bound,
        _uneven_masks,
        _congestion,
        _small_messages,
        _exposed,
        _ratio,
        _optimizer_peak,
        _fragmentation,
    )
    # Nothing costs more than the step: what runs at once on several links is counted on each.
    findings = [
        replace(finding, share=min(1.0, finding.share), seconds=min(run.mean_step_s, finding.seconds))
        for look in looks
        for finding in look(run)
    ]
    return sorted(findings, key=lambda finding: -finding.share)


def _late_ranks(run: RunAnalysis) -> Iterator[Finding]:
    """Ranks that made others wait, together for each cause."""
    for cause in LATE_CAUSES:
        late = [
            rank
            for rank in run.ranks
            if rank.late_steps[cause] and max(rank.behind_s, key=rank.behind_s.__getitem__) == cause
        ]
        late.sort(key=lambda rank: -rank.behind_s[cause])
        if not late or late[0].behind_s[cause] < MIN_SHARE * run.mean_step_s:
            continue
        if cause == "network" and _congested_axes(run):
            continue  # that says it better
        if cause == "work" and any(_uneven_masks(run)) and late[0] is _busiest(run):
            continue  # so does that
        worst, behind = late[0], late[0].behind_s[cause]
        steps = worst.late_steps[cause]
        often = f"rank {worst.rank} was late in {steps} of {run.num_steps} steps"
        others = f"; so were {len(late) - 1} other ranks, by less" if len(late) > 1 else ""
        if cause == "data":
            kind = "slow data"
            text = f"{often}: it waited {worst.data_s:.3g} s for data, {behind:.3g} s more than the median{others}"
            remedy = f"{_MORE_DATA}, or look at its disk and host"
        elif cause == "network":
            kind = "slow network"
            text = f"{often}: it waited {worst.network_s:.3g} s for its own transfers, {behind:.3g} s more{others}"
            remedy = "measure its links with opensora-accel doctor, on its host and on another one"
        elif steps >= AS_A_RULE * run.num_steps:
            median = statistics.median(rank.work_s for rank in run.ranks)
            kind = "imbalance"
            text = (
                f"work is uneven: rank {worst.rank} works {worst.work_s:.3g} s in a step, the median rank "
                f"{median:.3g} s "
                f"({worst.work_s / median:.2f} ×), and the others wait for it{others}; most of it is "
                f"{_where_behind(run, worst)}"
            )
            remedy = (
                "spread the tokens evenly (samples of one size in a step; zigzag or striped order for "
                "causal attention); "
                "if they are even, look at the rank's device: its clock, its temperature, what else runs on it"
            )
        else:
            kind = "straggler"
            text = f"{often}, by {behind:.3g} s a step on average{others}; most of it is {_where_behind(run, worst)}"
            remedy = "look at what else runs on its host in those steps (the table of steps names them), and at saves"
        ranks = tuple(rank.rank for rank in late)
        yield Finding(kind, text, remedy, behind / run.mean_step_s, behind, ranks)


def _all_wait_for_data(run: RunAnalysis) -> Iterator[Finding]:
    """What the median rank waits; what one waits beyond it is that rank's."""
    # Of two ranks the one that waits less: their mean would be half of what one of them waits.
    waited = statistics.median_low(rank.data_s for rank in run.ranks)
    if waited < DATA_SHARE * run.mean_step_s:
        return
    is_all = min(rank.data_s for rank in run.ranks) >= waited / 2
    who = "the rank waits" if len(run.ranks) == 1 else "every rank waits" if is_all else "most ranks wait"
    yield Finding(
        "slow data",
        f"{who} for data: {waited:.3g} s of every step ({waited / run.mean_step_s:.0%})",
        f"{_MORE_DATA}; measure what the disk or the network file system gives to all ranks at once",
        waited / run.mean_step_s,
        waited,
    )


def _host_bound(run: RunAnalysis) -> Iterator[Finding]:
    known = [rank.host_bound_s for rank in run.ranks if rank.host_bound_s is not None]
    starved = statistics.median_low(known) if known else 0.0
    if starved < HOST_SHARE * run.mean_step_s:
        return
    yield Finding(
        "host-bound",
        f"the device waits for the host in {starved:.3g} s of every step ({starved / run.mean_step_s:.0%}): kernels "
        "are so small that it has done them as soon as they are started",
        "compile the blocks, use a fused optimizer (fused=True), give each rank more tokens (fewer sequence ranks, a "
        "larger micro-batch), use fewer mlp_chunks, and read nothing from the device within the step (.item(), print)",
        starved / run.mean_step_s,
        starved,
    )


def _where_behind(run: RunAnalysis, rank: RankAnalysis) -> str:
    """The region that took longest beyond the mean over ranks."""
    means = {(part.region, part.axis, part.phase): part.mean_s for part in run.parts}
    own = [part for part in rank.parts if part.region not in ("data", "exposed")]
    worst = max(own, key=lambda part: part.mean_s - means[part.region, part.axis, part.phase])
    return f"{worst.region} {worst.phase}".strip()


def _uneven_masks(run: RunAnalysis) -> Iterator[Finding]:
    """A ring whose ranks have unlike shares of the pairs that masks leave."""
    if run.mask_imbalance is None or run.mask_imbalance <= MASK_IMBALANCE:
        return
    worst = _busiest(run)
    # What the others have to wait for: its attention beyond the mean.
    lost = worst.attention_s * (1 - 1 / run.mask_imbalance)
    if lost < MIN_SHARE * run.mean_step_s:
        return
    of_one = f"the mask, {run.masks[0].mask}, leaves"
    yield Finding(
        "uneven mask",
        f"{of_one if run.num_masks == 1 else 'masks leave'} rank {worst.rank} {run.mask_imbalance:.2f} times the mean "
        f"of its ring's pairs of queries and keys: the others wait for about {lost:.3g} s of its "
        f"{worst.attention_s:.3g} s of attention",
        "deal the tokens out, so that all have as many pairs: leave balanced=False out of run_packed, or in a loop of "
        "your own take the tokens of attention.slices.deal(mask, ranks); under ulysses every mask is even",
        lost / run.mean_step_s,
        lost,
        (worst.rank,),
        "ring",
    )


def _busiest(run: RunAnalysis) -> RankAnalysis:
    return max(run.ranks, key=lambda rank: rank.pairs_of_mean or 0.0)


def _congestion(run: RunAnalysis) -> Iterator[Finding]:
    worst: dict[str, list[CongestedLink]] = {}
    for link in run.congestion:
        if link.lost_s >= MIN_SHARE * run.mean_step_s:
            worst.setdefault(link.axis, []).append(link)
    for axis, links in worst.items():
        link = links[0]
        to = f"to rank {link.peer}" if link.peer is not None else "in its group"
        is_between = _is_between_nodes(run, link)
        others = f"; {len(links) - 1} more links are in the table" if len(links) > 1 else ""
        text = (
            f"the {axis or 'unnamed'} link of rank {link.rank} {to} is {'congested' if is_between else 'slow'}: "
            f"{link.calls:,} calls in "
            f"{link.steps} of "
            f"{run.num_steps} steps were slower than half of the median, at {link.bytes_per_s / 1e9:.3g} "
            "GB/s instead of "
            f"{link.median_bytes_per_s / 1e9:.3g}, {link.lost_s:.3g} s a step more{others}"
        )
        remedy = (
            "measure the link with opensora-accel doctor on both hosts; look for other jobs on the switch "
            "and for a card "
            "or cable that fell back to a lower rate; lay the mesh so that this axis stays within a node"
            if is_between
            else "measure the link with opensora-accel doctor; both ranks are on one machine, so look at what else "
            "runs there, at the slot's width (PCIe) and at errors of NVLink"
        )
        ranks = (link.rank,) if link.peer is None else (link.rank, link.peer)
        # Part of it may have been hidden.
        exposed = max((each.exposed_transfer_s for each in run.axes if each.axis == axis), default=0.0)
        cost = min(link.lost_s, exposed)
        yield Finding(
            "congested link" if is_between else "slow link",
            text,
            remedy,
            cost / run.mean_step_s,
            cost,
            ranks,
            axis,
        )


def _is_between_nodes(run: RunAnalysis, link: CongestedLink) -> bool:
    """Within a machine no switch is shared with others. Ranks whose machine is not known are on one."""
    hosts = {rank.rank: rank.host for rank in run.ranks}
    ends = [link.rank, link.peer] if link.peer is not None else list(hosts)
    return len({hosts.get(rank, "") for rank in ends}) > 1


def _small_messages(run: RunAnalysis) -> Iterator[Finding]:
    for axis in run.axes:
        cost = axis.small_exposed_s
        if cost < MIN_SHARE * run.mean_step_s:
            continue
        name = axis.axis or "communication of no named axis"
        yield Finding(
            "small messages",
            f"{name} sends {axis.small_calls:,.0f} of its {axis.calls:,.0f} calls "
            f"a step in messages of less than {SMALL_BYTES >> 10} KiB, in which latency counts and not bandwidth: "
            f"{cost:.3g} s of every step ({cost / run.mean_step_s:.0%}) compute waits for them",
            _FEWER_MESSAGES.get(
                axis.axis, "send more at once: larger buckets of gradients, sums of metrics together"
            ),
            cost / run.mean_step_s,
            cost,
            (),
            axis.axis,
        )


def _congested_axes(run: RunAnalysis) -> set[str]:
    return {link.axis for link in run.congestion if link.lost_s >= MIN_SHARE * run.mean_step_s}


def _exposed(run: RunAnalysis) -> Iterator[Finding]:
    for axis in run.axes:
        exposed, share = axis.exposed_transfer_s, axis.exposed_transfer_share
        # The finding of a congested link reports this part already.
        congested = max((link.lost_s for link in run.congestion if link.axis == axis.axis), default=0.0)
        left = max(0.0, exposed - congested - _told_as_small(run, axis))
        of_step = left / run.mean_step_s
        if share is None or share * left < EXPOSED_SHARE * exposed or of_step < EXPOSED_OF_STEP:
            continue
        text = (
            f"{axis.axis or 'communication of no named axis'} hides {1 - share:.0%} of its transfers: "
            f"{exposed:.3g} s of every step ({exposed / run.mean_step_s:.0%}) compute waits for them"
        )
        remedy = _HIDE.get(axis.axis, _HIDE_GRADIENTS)
        yield Finding("exposed communication", text, remedy, of_step, left, (), axis.axis)


def _told_as_small(run: RunAnalysis, axis: AxisAnalysis) -> float:
    return axis.small_exposed_s if axis.small_exposed_s >= MIN_SHARE * run.mean_step_s else 0.0


def _ratio(run: RunAnalysis) -> Iterator[Finding]:
    ratio = run.compute_to_communication
    # What its most exposed axis costs, of those that no other finding names.
    named = _congested_axes(run) | {
        finding.axis for look in (_exposed, _small_messages) for finding in look(run)
    }
    exposed = max((axis.exposed_transfer_s for axis in run.axes if axis.axis not in named), default=0.0)
    if ratio is None or ratio >= MIN_RATIO:
        return
    yield Finding(
        "low ratio",
        f"compute : communication is {ratio:.2g} : 1, under {MIN_RATIO:g} : 1: the network is the limit, or "
        "will be with "
        "more ranks",
        MORE_COMPUTE,
        exposed / run.mean_step_s,
        exposed,
    )


def _optimizer_peak(run: RunAnalysis) -> Iterator[Finding]:
    worst = next((rank for rank in run.ranks if rank.rank == run.peak_rank), None)
    peak = worst.peak if worst else None
    if worst is None or peak is None or peak.region not in ("optimizer", "save"):
        return
    above = peak.device_bytes - peak.elsewhere_bytes
    if above < PEAK_SHARE * peak.device_bytes:
        return
    yield Finding(
        "memory peak",
        f"the memory peak is in the {peak.region}: {peak.device_bytes / 2**30:.3g} GiB on rank {worst.rank} in step "
        f"{peak.step}, {above / 2**30:.3g} GiB above the highest point of forward and backward",
        "use a fused optimizer (fused=True) or foreach=False, which makes no temporary copies of all "
        "parameters; shard its "
        "state (sharding='zero2'); free what is not needed before the step",
        0.0,
        0.0,
        (worst.rank,),
    )


def _fragmentation(run: RunAnalysis) -> Iterator[Finding]:
    def share(rank: RankAnalysis) -> float:
        peak = rank.peak
        return (peak.fragmented_bytes or 0) / peak.reserved_bytes if peak and peak.reserved_bytes else 0.0

    worst = max(run.ranks, key=share)
    if share(worst) < FRAGMENTED_SHARE or worst.peak is None:
        return
    free, held = (size or 0 for size in (worst.peak.fragmented_bytes, worst.peak.reserved_bytes))
    yield Finding(
        "fragmentation",
        f"memory is in pieces: of {held / 2**30:.3g} GiB that the allocator has on rank {worst.rank}, "
        f"{free / 2**30:.3g} GiB ({share(worst):.0%}) lie free between tensors, where nothing larger fits",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, use clips of fewer sizes, and let the first step have "
        "the largest one",
        0.0,
        0.0,
        (worst.rank,),
    )
