"""When each operation of a step runs: an event simulation of one rank's streams.

One thing at a time runs on each stream, in the order in which the host has started it. An operation begins when three
things are true: the host has launched it, the one before it on its stream has ended, and what it waits for on other
streams has ended. Three operations of compute (3 s, 2 s, 4 s), of which the last reads what a gather of 6 s brings,
which reads what the first has computed:

    compute   |── a: 3 ──|─ b: 2 ─|··· 4 ···|── d: 4 ──|      step: 13 s
    gather               |────── c: 6 ──────|
              0          3        5         9          13     exposed: 4 s of the gather's 6 s

The time in which compute has nothing to do is charged to what it waits for, and from there followed back where that had
to wait in its turn. Followed back from the end of the step, the same gives the parts that the step consists of: here a,
c and d.

Operations that share a link run slower beside each other: n at once get a share of 1/n each. Compute runs slower beside
collectives, which take some of the multiprocessors. With a factor of 1.5, b takes 3 s in place of 2 s, if a collective
runs all the while. A collective moves nothing until the last rank has come to it: the more ranks have computed since
they met, the later that is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from opensora_accel.planner.trace import Operation, Trace

# What is left of an operation by rounding is not worth an event.
_NOTHING_S = 1e-15
# In the place of a stream, where the host has not launched in time.
HOST = "host"


def _no_links(_operation: Operation) -> Sequence[str]:
    return ()


def _never_late(_computed_s: float) -> float:
    return 0.0


@dataclass(frozen=True)
class Contention:
    """How much slower operations run beside each other than alone."""

    # Names of the links that an operation uses; n operations at once on a link get 1/n of it each.
    links: Callable[[Operation], Sequence[str]] = _no_links
    # Factor on the seconds of compute while a collective runs, at least 1.
    compute_beside_collective: float = 1.0
    # Whether it is slower too while a collective waits for other ranks.
    compute_beside_waiting: bool = False
    # By which the last rank comes later to a collective than this one, by the seconds of compute since the one before.
    late_s: Callable[[float], float] = _never_late


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
    """A simulated step. Spans stand in the order of the operations."""

    operations: tuple[Operation, ...]
    spans: tuple[Span, ...]
    # For each operation the one whose end let it start; HOST where it was launched last of all, None at the beginning.
    let_start_by: tuple[int | str | None, ...]

    @cached_property
    def step_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    @cached_property
    def busy_s(self) -> Mapping[str, float]:
        """By stream, the seconds in which it runs something."""
        seconds = defaultdict[str, float](float)
        for span in self.spans:
            seconds[span.stream] += span.end_s - span.start_s
        return dict(seconds)

    @cached_property
    def exposed(self) -> Mapping[int | str, float]:
        """By operation (or HOST), the seconds in which compute had nothing to do because of it."""
        seconds_by_cause = defaultdict[int | str, float](float)
        free_s = 0.0
        for span in self.spans:
            if span.stream == "compute":
                if span.start_s > free_s:
                    for cause, seconds in self._behind(span.operation, free_s):
                        seconds_by_cause[cause] += seconds
                free_s = span.end_s
        last = max(self.spans, key=lambda span: span.end_s, default=None)
        if last is not None and last.end_s > free_s:
            seconds_by_cause[last.operation] += last.end_s - max(free_s, last.start_s)
            for cause, seconds in self._behind(last.operation, free_s):
                seconds_by_cause[cause] += seconds
        return {cause: seconds for cause, seconds in seconds_by_cause.items() if seconds > 0}

    @cached_property
    def exposed_s(self) -> Mapping[str, float]:
        """The same by stream, and for the host."""
        return self._summed(self.exposed, lambda operation: operation.stream)

    @cached_property
    def exposed_by_axis(self) -> Mapping[str, float]:
        """What collectives took of it, by the axis of the mesh."""
        collectives: dict[int | str, float] = {
            cause: seconds
            for cause, seconds in self.exposed.items()
            if isinstance(cause, int) and self.operations[cause].kind == "collective"
        }
        return self._summed(collectives, lambda operation: operation.axis)

    @cached_property
    def critical_path(self) -> Mapping[int | str, float]:
        """By operation (or HOST), the parts that the step consists of when it is followed back from its end."""
        seconds_by_kind = defaultdict[int | str, float](float)
        last = max(self.spans, key=lambda span: span.end_s, default=None)
        if last is not None:
            seconds_by_kind[last.operation] += last.end_s - last.start_s
            for cause, seconds in self._behind(last.operation, 0.0):
                seconds_by_kind[cause] += seconds
        return dict(seconds_by_kind)

    @cached_property
    def critical_s(self) -> Mapping[str, float]:
        """The same by what bounds the operations: "gemm", "memory", "copy_in", "all-to-all over ulysses", ..."""
        return self._summed(
            self.critical_path,
            lambda operation: (
                f"{operation.collective} over {operation.axis}" if operation.collective else operation.kind
            ),
        )

    def _behind(self, operation: int, from_s: float) -> Iterator[tuple[int | str, float]]:
        """What the time between `from_s` and the start of an operation was spent on, latest first."""
        until_s, cause = self.spans[operation].start_s, self.let_start_by[operation]
        while until_s > from_s and isinstance(cause, int):
            span = self.spans[cause]
            yield cause, until_s - max(span.start_s, from_s)
            until_s, cause = span.start_s, self.let_start_by[cause]
        if until_s > from_s:
            yield HOST, until_s - from_s

    def _summed(
        self, seconds: Mapping[int | str, float], name: Callable[[Operation], str]
    ) -> dict[str, float]:
        sums = defaultdict[str, float](float)
        for cause, each in seconds.items():
            sums[name(self.operations[cause]) if isinstance(cause, int) else cause] += each
        return dict(sums)


def simulate(
    trace: Trace,
    operation_s: Callable[[Operation], float],
    *,
    launch_s: float | Callable[[Operation], float] = 0.0,
    contention: Contention | None = None,
) -> Timeline:
    """The timeline of a step.

    Args:
        operation_s: seconds of an operation that has the device and its links for itself.
        launch_s: of the host, to launch an operation; it launches them in order and waits for none.

    Raises:
        ValueError: an operation takes less than no time, or `compute_beside_collective` is below 1.
    """
    contention = contention or Contention()
    if contention.compute_beside_collective < 1:
        raise ValueError(
            "compute_beside_collective is a factor on seconds, at least 1 (nothing runs faster beside a collective); "
            f"got {contention.compute_beside_collective}"
        )
    work_s = [operation_s(operation) for operation in trace.operations]
    for operation, seconds in zip(trace.operations, work_s, strict=True):
        if not seconds >= 0:
            raise ValueError(f"operation_s must give seconds, at least 0; got {seconds} for {operation.name}")
    each_s = launch_s if callable(launch_s) else lambda _operation: launch_s
    launched_s = list(accumulate(map(each_s, trace.operations)))
    return _Simulation(trace.operations, work_s, launched_s, contention).run()


class _Simulation:
    def __init__(
        self,
        operations: Sequence[Operation],
        work_s: Sequence[float],
        launched_s: Sequence[float],
        contention: Contention,
    ):
        self.operations, self.contention = operations, contention
        self.left_s, self.launched_s = list(work_s), launched_s
        # Until the other ranks have come too.
        self.wait_s = [0.0] * len(operations)
        self.computed_s = 0.0
        self.start_s = [0.0] * len(operations)
        self.end_s: list[float | None] = [None] * len(operations)
        self.let_start_by: list[int | str | None] = [None] * len(operations)
        # What each stream has not started yet, the next one last.
        self.waiting = defaultdict[str, list[int]](list)
        for number in range(len(operations) - 1, -1, -1):
            self.waiting[operations[number].stream].append(number)
        self.last = dict.fromkeys(self.waiting, -1)
        self.running: dict[str, int] = {}
        self.links: dict[int, Sequence[str]] = {}

    def run(self) -> Timeline:
        now_s = 0.0
        while self.running or any(self.waiting.values()):
            launched_s = self._start(now_s)
            slower = self._slower()
            ends_s = [
                now_s + (self.wait_s[number] or self.left_s[number] * slower[number])
                for number in self.running.values()
            ]
            assert ends_s or launched_s, "operations wait for each other"
            next_s = min([*ends_s, *launched_s])
            for stream, number in list(self.running.items()):
                if self.wait_s[number]:
                    left_s = self.wait_s[number] - (next_s - now_s)
                    self.wait_s[number] = 0.0 if left_s <= _NOTHING_S or now_s + left_s == now_s else left_s
                    continue
                self.left_s[number] -= (next_s - now_s) / slower[number]
                self.computed_s += next_s - now_s if stream == "compute" else 0.0
                if self.left_s[number] <= _NOTHING_S or now_s + self.left_s[number] == now_s:
                    self.end_s[number] = next_s
                    del self.running[stream]
            now_s = next_s
        spans = []
        for number, operation in enumerate(self.operations):
            end_s = self.end_s[number]
            assert end_s is not None
            spans.append(Span(operation.stream, self.start_s[number], end_s, number))
        return Timeline(tuple(self.operations), tuple(spans), tuple(self.let_start_by))

    def _start(self, now_s: float) -> list[float]:
        """Starts what can start now; when the host will have launched what waits for nothing else."""
        launched_s = []
        for stream, waiting in self.waiting.items():
            if not waiting or stream in self.running:
                continue
            number = waiting[-1]
            before = [*self.operations[number].after]
            if self.last[stream] >= 0:
                before.append(self.last[stream])
            if any(self.end_s[each] is None for each in before):
                continue
            launch_s = self.launched_s[number]
            if launch_s > now_s:
                launched_s.append(launch_s)
                continue
            # Where several end at once, compute is said to wait for itself.
            latest = max(before, key=lambda each: (self.end_s[each], each == self.last[stream]), default=None)
            ended_s = 0.0 if latest is None else self.end_s[latest]
            assert ended_s is not None
            self.let_start_by[number] = HOST if launch_s > ended_s else latest
            self.start_s[number] = now_s
            waiting.pop()
            self.running[stream], self.last[stream] = number, number
            self.links[number] = self.contention.links(self.operations[number])
            if self.operations[number].kind == "collective":
                self.wait_s[number] = self.contention.late_s(self.computed_s)
                self.computed_s = 0.0
        return launched_s

    def _slower(self) -> dict[int, float]:
        """How much slower each operation that runs is than alone."""
        moving = [number for number in self.running.values() if not self.wait_s[number]]
        users = Counter(link for number in moving for link in set(self.links[number]))
        has_collective = any(
            self.operations[number].kind == "collective" and self.left_s[number] > 0
            for number in (self.running.values() if self.contention.compute_beside_waiting else moving)
        )
        factors = {}
        for stream, number in self.running.items():
            factor = float(max((users[link] for link in self.links[number]), default=1))
            if stream == "compute" and has_collective:
                factor *= self.contention.compute_beside_collective
            factors[number] = factor
        return factors
