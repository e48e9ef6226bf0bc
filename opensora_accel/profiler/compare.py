"""What changed between two profiled runs: what was set differently, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opensora_accel.profiler.analysis import RunAnalysis

# What changed by less than this share of its whole is noise.
MIN_WEIGHT = 0.001


@dataclass(frozen=True)
class Setting:
    """A field of the Plan, the environment or the model that differs; as text, because it may be of any kind."""

    group: str
    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Change:
    """A number that differs."""

    # step, region, memory, communication
    group: str
    name: str
    # s, bytes, tokens/s or share
    unit: str
    before: float
    after: float
    difference: float
    # The difference as a share of the whole that it is part of (the step, the peak, all bytes), by which changes are
    # sorted: a region that doubled from 1 ms is no news in a step of a second.
    weight: float


def settings_changed(before: RunAnalysis, after: RunAnalysis) -> list[Setting]:
    """In the order Plan, environment, model."""
    rows = []
    for group in ("plan", "environment", "model"):
        old, new = getattr(before, group), getattr(after, group)
        for name in dict.fromkeys([*old, *new]):
            was, now = (str(side.get(name, "not recorded")) for side in (old, new))
            if was != now:
                rows.append(Setting(group, name, was, now))
    return rows


def changes(before: RunAnalysis, after: RunAnalysis) -> list[Change]:
    """Largest weight first."""
    rows = [
        Change(group, name, unit, was, now, now - was, abs(now - was) / whole)
        for group, name, unit, was, now, whole in _numbers(before, after)
        if whole > 0 and abs(now - was) >= MIN_WEIGHT * whole
    ]
    return sorted(rows, key=lambda change: -change.weight)


def _numbers(before: RunAnalysis, after: RunAnalysis) -> Iterator[tuple[str, str, str, float, float, float]]:
    runs = (before, after)
    step = max(run.mean_step_s for run in runs)
    yield "step", "mean step", "s", before.mean_step_s, after.mean_step_s, step
    regions = [
        {" ".join(filter(None, (part.region, part.axis, part.phase))): part.mean_s for part in run.parts}
        for run in runs
    ]
    yield from _pairs("region", "s", regions, step)
    if before.tokens_per_s and after.tokens_per_s:
        speeds = [run.tokens_per_s.median for run in runs if run.tokens_per_s]
        yield "step", "tokens per second", "tokens/s", speeds[0], speeds[1], max(speeds)
    peaks = [_peak(run) for run in runs]
    highest = max(sum(peak.values()) for peak in peaks)
    yield "memory", "peak of the fullest rank", "bytes", *[sum(peak.values()) for peak in peaks], highest
    yield from _pairs("memory", "bytes", peaks, highest)
    sent = [{f"sent over {axis.axis or 'no axis'}": axis.sent_bytes for axis in run.axes} for run in runs]
    yield from _pairs("communication", "bytes", sent, max(sum(each.values()) for each in sent))
    if before.utilization.mfu and after.utilization.mfu:
        yield "step", "MFU", "share", before.utilization.mfu, after.utilization.mfu, 1.0


def _pairs(
    group: str, unit: str, runs: Sequence[Mapping[str, float]], whole: float
) -> Iterator[tuple[str, str, str, float, float, float]]:
    before, after = runs
    for name in dict.fromkeys([*before, *after]):
        yield group, name, unit, before.get(name, 0.0), after.get(name, 0.0), whole


def _peak(run: RunAnalysis) -> dict[str, Any]:
    """Bytes by kind on the device of the fullest rank."""
    peak = next((rank.peak for rank in run.ranks if rank.rank == run.peak_rank), None)
    kinds = peak.bytes_by_kind if peak else {}
    return {f"{kind} at the peak": size for kind, size in kinds.items() if not kind.endswith("host")}
