"""When each operation of a step runs: an event simulation of a rank's streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from opensora_accel.planner.trace import Operation, Trace


@dataclass(frozen=True)
class Contention:
    """How much slower things run beside each other than alone: factors of seconds, at least 1."""

    # Compute beside a collective, which takes some of the device's multiprocessors.
    compute_beside_collective: float = 1.0
    # Pairs of streams that share a link: each is this much slower while the other one runs.
    shared_links: Mapping[frozenset[str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """An operation in time: [start_s, end_s)."""

    stream: str
    start_s: float
    end_s: float
    # Index in `Trace.operations`.
    operation: int


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    step_s: float
    spans: tuple[Span, ...]
    # By stream, the seconds in which it ran something.
    busy_s: Mapping[str, float]
    # By stream, and by axis, the seconds in which compute waited for it alone.
    exposed_s: Mapping[str, float]
    exposed_by_axis: Mapping[str, float]
    # What the step consists of when it is followed back from its end: (what it waited for, seconds). They add up to
    # step_s: "gemm", "attention", "memory", "collective over ulysses", "copy_in", "host".
    critical_path: Mapping[str, float]


def simulate(
    trace: Trace,
    operation_s: Callable[[Operation], float],
    *,
    launch_s: float = 0.0,
    contention: Contention | None = None,
) -> Timeline:
    """The timeline of a step, of which `operation_s` tells the seconds of each operation alone.

    Args:
        launch_s: host time to start one operation.
    """
    raise NotImplementedError
