"""The simulated step in the terms in which a run is measured: what `plan --output` writes beside the plan.

Compute is told by the module and the phase that it is in, waiting by what is waited for, and collectives by kind and
axis. On the stream that computes the parts add up to the simulated step. Of the step in simulate.py, whose d waits 4 s
for a gather c of 6 s, they are a, b and d by their modules, and 4 s of c's axis as exposed; c has 6 s as a collective.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opensora_accel.observe import (
    IDLE,
    Forecast,
    ForeseenCalls,
    ForeseenCopies,
    ForeseenPart,
    Three,
    digest_of,
)
from opensora_accel.planner.cost import Placement, alone_s, collective_group, core_share, kernel_s
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.simulate import HOST, Timeline
from opensora_accel.planner.trace import Operation, Trace

if TYPE_CHECKING:
    from opensora_accel.planner.candidates import Candidate, Request

_COPIES = {"copy_out": "copy out", "copy_in": "copy in"}
_Key = tuple[str, str, str]


def _three() -> list[float]:
    return [0.0, 0.0, 0.0]


@dataclass
class StepParts:
    """Seconds of a plan's step at the fast end, as expected, and at the slow end; means over the sizes of a mix."""

    # By region, axis and phase.
    parts: dict[_Key, list[float]] = field(default_factory=lambda: defaultdict(_three))
    kernels: dict[_Key, dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    # By axis, kind and group: calls and bytes, seconds, and what of them is waited for.
    counts: dict[_Key, list[float]] = field(default_factory=lambda: defaultdict(_three))
    calls: dict[_Key, list[float]] = field(default_factory=lambda: defaultdict(_three))
    exposed: dict[_Key, list[float]] = field(default_factory=lambda: defaultdict(_three))
    copies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(_three))
    copied: dict[str, list[float]] = field(default_factory=lambda: defaultdict(_three))

    def add(
        self,
        trace: Trace,
        timelines: Sequence[Timeline],
        hardware: Hardware,
        placement: Placement,
        share: float,
        times: float,
    ) -> None:
        """Adds a step of one size of clips.

        Args:
            timelines: at the fast end, as expected, and at the slow end.
            share: of this size in the mix.
            times: how often all but the optimizer runs in a step, for once in the trace.
        """
        weights = [share * (1 if each.phase == "optimizer" else times) for each in trace.operations]
        for operation, weight in zip(trace.operations, weights, strict=True):
            if operation.kind == "collective":
                counts = self.counts[_calls_of(operation, placement)]
                counts[0] += weight
                counts[1] += weight * operation.num_bytes
            elif operation.kind in _COPIES:
                self.copied[_COPIES[operation.kind]][0] += weight
                self.copied[_COPIES[operation.kind]][1] += weight * operation.num_bytes
        for end, timeline in enumerate(timelines):
            for span in timeline.spans:
                operation, seconds = trace.operations[span.operation], span.end_s - span.start_s
                seconds *= weights[span.operation]
                if operation.kind == "collective":
                    self.calls[_calls_of(operation, placement)][end] += seconds
                elif operation.kind in _COPIES:
                    self.copies[_COPIES[operation.kind]][end] += seconds
                elif span.stream == "compute":
                    part = _part_of(operation)
                    self.parts[part][end] += seconds
                    if end == 1:
                        self._add_kernel(part, operation, seconds, hardware, placement, trace)
            for cause, seconds in timeline.exposed.items():
                self._add_exposed(trace, placement, cause, end, seconds, weights, share * times)

    def _add_kernel(
        self,
        part: _Key,
        operation: Operation,
        seconds: float,
        hardware: Hardware,
        placement: Placement,
        trace: Trace,
    ) -> None:
        """Tells the kernel from what the host takes to start it, where both take time of the step."""
        if trace.plan.cpu_offload and operation.phase == "optimizer":
            self.kernels[part]["host"] += seconds
            return
        alone = alone_s(operation, hardware, placement, trace.plan)
        # Beside a collective both take longer.
        slower = seconds / alone if alone else 0.0
        kernel = slower * kernel_s(operation, hardware) * core_share(hardware, placement)
        self.kernels[part][operation.kind] += min(kernel, seconds)
        self.kernels[part]["host"] += max(0.0, seconds - kernel)

    def _add_exposed(
        self,
        trace: Trace,
        placement: Placement,
        cause: int | str,
        end: int,
        seconds: float,
        weights: Sequence[float],
        default: float,
    ) -> None:
        if cause == HOST or isinstance(cause, str):
            self.parts[IDLE, "", ""][end] += seconds * default
            return
        operation, seconds = trace.operations[cause], seconds * weights[cause]
        if operation.kind == "collective":
            calls = _calls_of(operation, placement)
            self.exposed[calls][end] += seconds
            self.parts["exposed", calls[0], ""][end] += seconds
        elif operation.kind in _COPIES:
            self.parts[_COPIES[operation.kind], "", ""][end] += seconds
        else:
            # A kernel on the stream of a collective, as FSDP2's sums of gradients are.
            self.parts["other", "", operation.phase][end] += seconds


def _part_of(operation: Operation) -> _Key:
    if operation.phase == "optimizer":
        return "optimizer", "", ""
    region = operation.region
    if region is None:
        # A trace that knows no modules knows its attention.
        of_block = "" if operation.block is None else "block"
        region = "attention" if operation.kind == "attention" else of_block
    return region or "other", "", operation.phase


def _calls_of(operation: Operation, placement: Placement) -> _Key:
    return operation.axis, operation.collective, collective_group(operation, placement)


def forecast_of(request: Request, candidate: Candidate, hardware_file: str = "") -> Forecast:
    """The forecast of a plan that was traced."""
    found, trace, hardware = candidate.foreseen, candidate.trace, request.hardware
    assert found is not None and trace is not None, "only what was traced is foreseen by its parts"
    low, high = candidate.step_time_s
    return Forecast(
        plan_digest=digest_of(candidate.plan),
        plan=candidate.plan.to_dict(),
        hardware=hardware.name,
        hardware_file=hardware_file,
        date=datetime.date.today().isoformat(),
        model=", ".join(workload.name for workload, _share in request.mix),
        num_blocks=trace.num_blocks,
        world_size=candidate.plan.world_size,
        samples=candidate.samples,
        accumulation=candidate.passes.accumulation,
        step_s=Three(low, candidate.expected_s, high),
        memory_bytes=candidate.memory_bytes,
        bytes_by_kind=dict(candidate.bytes_by_kind),
        parts=[
            ForeseenPart(*part, _ends(seconds), dict(found.kernels.get(part, {})))
            for part, seconds in found.parts.items()
        ],
        calls=[_calls(name, found) for name in found.calls],
        copies=[
            ForeseenCopies(name, found.copied[name][0], found.copied[name][1], _ends(seconds))
            for name, seconds in found.copies.items()
        ],
        slowness=dict(hardware.slowness),
        collective_slowness=dict(hardware.collective_slowness),
        host_s={
            "launch_s": hardware.launch_s,
            "sharded_launch_s": hardware.sharded_launch_s,
            "hook_s": hardware.hook_s,
        },
    )


def _calls(name: _Key, found: StepParts) -> ForeseenCalls:
    axis, kind, group = name
    calls, sent_bytes, _ = found.counts[name]
    exposed = found.exposed.get(name, _three())
    return ForeseenCalls(axis, kind, group, calls, sent_bytes, _ends(found.calls[name]), _ends(exposed))


def _ends(seconds: Sequence[float]) -> Three:
    """What is waited for may be less where all is slower."""
    return Three(min(seconds), seconds[1], max(seconds))
