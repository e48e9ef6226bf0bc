"""A search as plain data: what `opensora-accel plan --json` writes, and what the page is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opensora_accel.observe import KINDS
from opensora_accel.planner.bill import Bill
from opensora_accel.planner.candidates import Candidate, Outcome, describe
from opensora_accel.planner.explain import Explanation
from opensora_accel.planner.trace import MemoryState


def document_of(
    outcome: Outcome, explanation: Explanation | None, bill: Bill | None = None
) -> dict[str, Any]:
    """Of the best plan, and of every other with the reason why it is not."""
    request, best = outcome.request, outcome.best
    shown = best or next((each for each in outcome.candidates if each.is_traced), None)
    return {
        "model": ", ".join(workload.name for workload, _share in request.mix),
        "gpus": request.world_size,
        "hardware": request.hardware.name,
        "device_bytes": request.hardware.memory_bytes,
        "precision": request.precision,
        "best": best.to_dict() if best else None,
        "bill": bill.to_dict() if bill else None,
        "explanation": explanation.to_dict() if explanation else None,
        "timeline": _lanes(shown) if shown else None,
        "memory": _samples(shown) if shown else None,
        "excluded": dict(outcome.excluded),
        "may_win": [describe(plan) for plan in outcome.may_win],
        "gain": outcome.gain,
        "ties": [describe(each.plan) for each in outcome.ties],
        "candidates": [{"text": describe(each.plan), **each.to_dict()} for each in outcome.candidates],
        "sources": {
            **request.hardware.sources,
            **{kind: part.source for kind, part in request.residents.frozen.items()},
        },
        "seconds": outcome.seconds,
    }


def _lanes(candidate: Candidate) -> dict[str, Any] | None:
    """The streams of a simulated step: bars of the same phase that touch are one."""
    trace, timeline = candidate.trace, candidate.timeline
    if trace is None or timeline is None:
        return None
    lanes = []
    for stream in timeline.busy_s:
        bars: list[list[Any]] = []
        for span in timeline.spans:
            if span.stream != stream:
                continue
            phase = trace.operations[span.operation].phase
            if (
                bars
                and bars[-1][0] == phase
                and span.start_s - bars[-1][1] - bars[-1][2] < timeline.step_s / 2000
            ):
                bars[-1][2] = span.end_s - bars[-1][1]
            else:
                bars.append([phase, span.start_s, span.end_s - span.start_s])
        lanes.append(
            {"name": stream, "bars": bars, "busy_s": timeline.busy_s[stream],
             "share": timeline.busy_s[stream] / timeline.step_s, "exposed_s": timeline.exposed_s.get(stream, 0.0)}
        )  # fmt: skip
    # Of compute, by phase and by what the operators are for.
    classes: dict[tuple[str, str], float] = {}
    for span in timeline.spans:
        operation = trace.operations[span.operation]
        if span.stream == "compute":
            name = operation.phase, operation.operator_class
            classes[name] = classes.get(name, 0.0) + span.end_s - span.start_s
    compute = [
        {"phase": phase, "operators": name, "busy_s": busy_s, "share": busy_s / timeline.step_s}
        for (phase, name), busy_s in classes.items()
    ]
    return {"seconds": timeline.step_s, "lanes": lanes, "compute": compute}


def _samples(candidate: Candidate, most: int = 400) -> list[tuple[float, Mapping[str, int]]] | None:
    """Live bytes by kind over the simulated step."""
    trace, timeline = candidate.trace, candidate.timeline
    if trace is None or timeline is None:
        return None
    ends = {span.operation: span.end_s for span in timeline.spans}
    peak = trace.peak
    every = max(1, len(trace.memory) // most)
    samples, last = list[tuple[float, Mapping[str, int]]](), 0.0
    for number, state in enumerate(trace.memory):
        last = max(last, ends.get(state.operation, last))
        if number % every == 0 or state is peak:
            samples.append((last, _kinds(state)))
    return samples


def _kinds(state: MemoryState) -> dict[str, int]:
    """Bytes by kind in the order of `KINDS`, and of what is none of them by the operators that made it."""
    kinds = {kind: state.bytes_by_kind[kind] for kind in KINDS if kind in state.bytes_by_kind}
    if not state.other_by_class:
        return kinds
    del kinds["other"]
    return kinds | {f"other: {name}": size for name, size in sorted(state.other_by_class.items())}
