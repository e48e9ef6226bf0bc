"""A measured run beside the forecast of its plan: by part of the step, by collective, and what one side cannot tell.

    attention, backward    forecast 0.60 s (0.50 to 0.70)    measured 0.78 s (0.77 to 0.79)    1.30    outside

Both sides name the parts of a step by the same modules and phases (`observe/module_regions.py`). Collectives are held
against what they took once the last rank of their group had come: a forecast has no late ranks.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_accel.observe import (
    BACKWARD,
    FORWARD,
    IDLE,
    RECOMPUTE,
    Forecast,
    ForeseenCalls,
    MeasuredParts,
    Three,
    axes_named,
    differences,
)
from opensora_accel.profiler.analysis import KindAnalysis, RunAnalysis, Spread

# Counts and bytes are alike if they are to this share.
_ALIKE = 1e-3


@dataclass(frozen=True)
class Compared:
    """One number that was foreseen, measured, or both."""

    what: str
    # s, bytes or calls.
    unit: str
    # None where this side cannot tell it; `note` says why.
    forecast: Three | None
    measured: Spread | None
    # Measured over expected; None without both.
    ratio: float | None
    is_outside: bool
    note: str = ""

    @staticmethod
    def of(what: str, unit: str, forecast: Three | None, measured: Spread | None, note: str = "") -> Compared:
        if forecast is None or measured is None:
            return Compared(what, unit, forecast, measured, None, False, note)
        found = measured.median
        low, high = forecast.low * (1 - _ALIKE), forecast.high * (1 + _ALIKE)
        ratio = found / forecast.expected if forecast.expected else None
        return Compared(what, unit, forecast, measured, ratio, not low <= found <= high, note)


@dataclass(frozen=True)
class Against:
    """A run against a forecast."""

    plan_file: str
    hardware: str
    date: str
    model: str
    rows: Sequence[Compared]
    # What a hardware file is corrected by.
    measured: MeasuredParts
    notes: Sequence[str]


def against(run: RunAnalysis, forecast: Forecast, plan_file: Path) -> Against:
    """Everything that either side can tell.

    Raises:
        ValueError: the run had another plan, or another model; what differs.
    """
    _check(run, forecast, plan_file)
    notes = []
    if not _tells_attention(run, forecast):
        notes.append(
            "One side does not tell attention from the rest of its block: blocks are compared with it."
        )
    if forecast.accumulation > 2:
        notes.append(f"Calls and bytes of {forecast.accumulation} passes are foreseen from two.")
    rows = [
        Compared.of("step", "s", forecast.step_s, run.step_s),
        *_parts(run, forecast),
        *_collectives(run, forecast),
        *_copies(run, forecast),
        *_waiting(run, forecast),
    ]
    measured = measured_parts(run, forecast)
    return Against(str(plan_file), forecast.hardware, forecast.date, forecast.model, rows, measured, notes)


def measured_parts(run: RunAnalysis, forecast: Forecast) -> MeasuredParts:
    """What a hardware file is corrected by: the parts of which both sides know the kernels, and collectives."""
    parts = []
    for regions, phase in _compute(run, forecast):
        kernels = defaultdict[str, float](float)
        for part in forecast.parts:
            if part.region in regions and part.phase == phase:
                for kind, seconds in part.by_kernel.items():
                    kernels[kind] += seconds
        measured = _measured(run, regions, phase)
        if kernels and measured is not None and measured.median > 0:
            parts.append((dict(kernels), measured.median))
    kinds = _kinds(run)
    calls = {
        each.group: (each.seconds.expected, kinds[_name(each, run)].seconds.median)
        for each in forecast.calls
        if _name(each, run) in kinds
    }
    return MeasuredParts(run.name, run.started_at, run.num_steps, parts, calls)


def _check(run: RunAnalysis, forecast: Forecast, plan_file: Path) -> None:
    if not run.plan:
        raise ValueError(
            f"{run.name} has not recorded its plan, so that it cannot be held against {plan_file}"
        )
    unlike = differences(forecast.plan, run.plan)
    if unlike:
        raise ValueError(
            f"{run.name} had another plan than {plan_file} ({', '.join(unlike)}); profile a run with --plan {plan_file}"
        )
    blocks = run.model.get("num_blocks")
    if blocks is not None and blocks != forecast.num_blocks:
        raise ValueError(
            f"{run.name} trained a model of {blocks} blocks, and the forecast beside {plan_file} is of one of "
            f"{forecast.num_blocks} ({forecast.model}); plan for the model that is trained"
        )


def _tells_attention(run: RunAnalysis, forecast: Forecast) -> bool:
    return any(part.region == "attention" for part in run.parts) and any(
        part.region == "attention" for part in forecast.parts
    )


def _compute(run: RunAnalysis, forecast: Forecast) -> Iterator[tuple[tuple[str, ...], str]]:
    """Regions that are told together, with their phase."""
    apart = _tells_attention(run, forecast)
    for phase in (FORWARD, RECOMPUTE, BACKWARD):
        yield ("block", "mlp") if apart else ("block", "mlp", "attention"), phase
        if apart:
            yield ("attention",), phase
    yield ("optimizer",), ""


def _parts(run: RunAnalysis, forecast: Forecast) -> Iterator[Compared]:
    for regions, phase in _compute(run, forecast):
        what = (
            "optimizer"
            if regions == ("optimizer",)
            else "attention"
            if regions == ("attention",)
            else "blocks"
        )
        foreseen, measured = _foreseen(forecast, regions, phase), _measured(run, regions, phase)
        if foreseen is not None or measured is not None:
            yield Compared.of(", ".join(filter(None, (what, phase))), "s", foreseen, measured)
    foreseen, measured = _foreseen(forecast, ("other",)), _measured(run, ("other",))
    if foreseen is not None or measured is not None:
        note = "measured with what the host does between kernels and steps"
        yield Compared.of("outside of the blocks", "s", foreseen, measured, note)


def _foreseen(forecast: Forecast, regions: Sequence[str], phase: str | None = None) -> Three | None:
    found = [
        part.seconds
        for part in forecast.parts
        if part.region in regions and (phase is None or part.phase == phase)
    ]
    return Three(*(sum(each) for each in zip(*found, strict=True))) if found else None


def _measured(run: RunAnalysis, regions: Sequence[str], phase: str | None = None) -> Spread | None:
    """A rank's, as the mean over ranks of its median and quartiles over steps."""
    found = [
        part.seconds
        for rank in run.ranks
        for part in rank.parts
        if part.region in regions and (phase is None or part.phase == phase)
    ]
    return _sum(found, 1 / len(run.ranks)) if found else None


def _sum(spreads: Sequence[Spread], times: float = 1.0) -> Spread:
    return Spread(
        *(times * sum(getattr(each, name) for each in spreads) for name in ("median", "low", "high"))
    )


def _kinds(run: RunAnalysis) -> dict[tuple[str, str], KindAnalysis]:
    """By axes and kind; of messages their sends, which have the times of both ends."""
    return {
        (axes_named(each.axis, run.plan), each.kind): each
        for each in run.kinds
        if each.kind not in ("recv", "barrier") and run.world_size > 1
    }


def _name(calls: ForeseenCalls, run: RunAnalysis) -> tuple[str, str]:
    return axes_named(calls.axis, run.plan), calls.kind


def _collectives(run: RunAnalysis, forecast: Forecast) -> Iterator[Compared]:
    kinds = _kinds(run)
    foreseen = {_name(each, run): each for each in forecast.calls}
    for axis, kind in dict.fromkeys([*foreseen, *kinds]):
        calls, found = foreseen.get((axis, kind)), kinds.get((axis, kind))
        note = "" if calls and found else "none is foreseen" if found else "none was measured"
        rows: tuple[tuple[str, str, Three | None, Spread | None], ...] = (
            (
                "calls",
                "calls",
                _exactly(calls.calls) if calls else None,
                _always(found.calls) if found else None,
            ),
            (
                "sent",
                "bytes",
                _exactly(calls.sent_bytes) if calls else None,
                _always(found.sent_bytes) if found else None,
            ),
            ("time", "s", calls.seconds if calls else None, found.seconds if found else None),
            ("exposed", "s", calls.exposed if calls else None, found.exposed if found else None),
        )
        for what, unit, one, other in rows:
            yield Compared.of(f"{kind} over {axis or 'no axis'}: {what}", unit, one, other, note)


def _exactly(value: float) -> Three:
    return Three(value, value, value)


def _always(value: float) -> Spread:
    return Spread(value, value, value)


def _copies(run: RunAnalysis, forecast: Forecast) -> Iterator[Compared]:
    foreseen = {each.region: each.seconds for each in forecast.copies}
    for region, seconds in run.copies.items():
        if region in foreseen or seconds.high > 0:
            yield Compared.of(
                region, "s", foreseen.get(region), seconds, "" if region in foreseen else "not foreseen"
            )


def _waiting(run: RunAnalysis, forecast: Forecast) -> Iterator[Compared]:
    waited = Spread.of([rank.waited_s for rank in run.ranks])
    if len(run.ranks) > 1:
        yield Compared.of("waiting for late ranks", "s", None, waited, "no rank is late in a forecast")
    for region in ("data", "encode", "save"):
        measured = _measured(run, (region,))
        if measured is not None:
            yield Compared.of(region, "s", None, measured, "not foreseen")
    starved = [rank.host_bound_s for rank in run.ranks if rank.host_bound_s is not None]
    foreseen = _foreseen(forecast, (IDLE,))
    if foreseen is not None or starved:
        measured = Spread(*[statistics.fmean(starved)] * 3) if starved else None
        note = "" if starved else "a CPU does not tell it"
        yield Compared.of(
            "idle, while the host starts kernels", "s", foreseen or Three(0.0, 0.0, 0.0), measured, note
        )


def text_of(found: Mapping[str, Any]) -> str:
    """The table for a terminal, of an `Against` as the report's JSON has it."""
    lines = [
        "against the forecast of {plan_file} ({model} on {hardware}, {date}):".format(**found),
    ]
    width = max(len(row["what"]) for row in found["rows"])
    lines.append(f"  {'':{width}}  {'forecast':32}  {'measured':32}  {'ratio':>6}")
    for row in found["rows"]:
        foreseen = _interval(row["forecast"], "expected", row["unit"])
        measured = _interval(row["measured"], "median", row["unit"])
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        mark = "outside" if row["is_outside"] else ""
        cells = f"  {row['what']:{width}}  {foreseen:32}  {measured:32}  {ratio:>6}  {mark:7}  {row['note']}"
        lines.append(cells.rstrip())
    return "\n".join([*lines, *(f"  {note}" for note in found["notes"])])


def _interval(value: Mapping[str, float] | None, middle: str, unit: str) -> str:
    if value is None:
        return "–"
    shown, low, high = (_shown(value[name], unit) for name in (middle, "low", "high"))
    return shown if low == high else f"{shown} ({low} to {high})"


def _shown(value: float, unit: str) -> str:
    if unit == "calls":
        return f"{value:,.6g}"
    if unit == "bytes":
        for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value >= size:
                return f"{value / size:,.4g} {name}"
        return f"{value:,.4g} B"
    return f"{value:.4g} s" if value >= 1 or not value else f"{value * 1e3:.4g} ms"
