"""Measures one case: gradients first, then times in turns, then memory, traffic and queues, scheme by scheme."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER
from opensora_accel.profiler.bench_offload.memory import MemoryFigures, longest_tokens, measure_memory
from opensora_accel.profiler.bench_offload.schemes import (
    AUTOMATIC,
    OFFLOADED,
    REFERENCE,
    Scheme,
    automatic_decision,
    chosen_names,
    make_schemes,
    set_up_arena,
)
from opensora_accel.profiler.bench_offload.trace import HostRecorder, QueueTimes, queue_times
from opensora_accel.profiler.bench_offload.workload import Case, Workload

WARM_UP_ROUNDS = 1
PASSES_TO_DECIDE = 3
VERIFIED_SHARE = 0.98
"""Of the extrapolated length, at which it is run."""

Note = Callable[[str], None]
"""Told of each step before it runs."""


@dataclass(frozen=True)
class Options:
    rounds: int
    budget_bytes: int
    only: str = ""
    with_timeline: bool = False
    verify_longest: bool = False


@dataclass
class Measured:
    """Of one scheme in one case."""

    status: str = "measured"
    """Or "out of memory", or "skipped"."""
    reason: str = ""
    times_ms: list[float] = field(default_factory=list)
    memory: MemoryFigures | None = None
    theory_bytes: int = 0
    kept_bytes: int | None = None
    hidden_share: float | None = None
    queues: QueueTimes | None = None
    decision: str | None = None
    longest: int | None = None
    verified: bool | None = None
    """Whether nearly that length ran within the budget; None where that was not tried."""
    verified_bytes: int | None = None

    @property
    def median_ms(self) -> float | None:
        return statistics.median(self.times_ms) if self.times_ms else None


class GradientsDiffer(Exception):
    """A scheme's gradients are not those of checkpointing alone."""


def measure_case(case: Case, options: Options, note: Note) -> dict[str, Measured]:
    """All schemes of a case, by name; what runs out of memory says so and the others go on."""
    run = _CaseRun(case, options, note)
    GLOBAL_ACTIVATION_MANAGER.memory_target_bytes = options.budget_bytes
    try:
        try:
            run.full_length()
        except torch.OutOfMemoryError:  # outside of any scheme: the weights alone
            run.results = {name: Measured("out of memory") for name in chosen_names(options.only)}
        _free(case.device)
        if any(result.memory is not None for result in run.results.values()):
            run.half_length()
            _free(case.device)
        if options.verify_longest:
            run.verify()
    finally:
        GLOBAL_ACTIVATION_MANAGER.close()
        GLOBAL_ACTIVATION_MANAGER.memory_target_bytes = None
        _free(case.device)
    return run.results


class _CaseRun:
    def __init__(self, case: Case, options: Options, note: Note):
        self.case, self.options = case, options
        self.results: dict[str, Measured] = {}
        self._note = note

    def full_length(self) -> None:
        workload = Workload(self.case)
        first_decision = len(GLOBAL_ACTIVATION_MANAGER.decisions)
        schemes, skipped = make_schemes(workload, self.options.only)
        self.results = {scheme.name: Measured() for scheme in schemes}
        self.results |= {name: Measured("skipped", reason) for name, reason in skipped.items()}
        set_up_arena(self.case)
        self._check(workload, schemes)
        self._let_decide(workload, schemes)
        self._time(workload, schemes)
        for scheme in self._running(schemes):
            if scheme.name == AUTOMATIC:
                self.results[scheme.name].decision = automatic_decision(first_decision)
            self._note(f"{scheme.name}: memory")
            self._attempt(scheme, partial(self._look_inside, workload, scheme))

    def _look_inside(self, workload: Workload, scheme: Scheme) -> None:
        result = self.results[scheme.name]
        result.kept_bytes = scheme.kept_bytes
        result.memory = measure_memory(workload, scheme, with_timeline=self.options.with_timeline)
        result.theory_bytes = scheme.theory_bytes()
        self._watch_queues(workload, scheme)

    def half_length(self) -> None:
        """A second point of the line; not of "auto", which decides anew for every length."""
        workload = Workload(dataclasses.replace(self.case, tokens=max(1, self.case.tokens // 2)))
        schemes, _ = make_schemes(workload, self.options.only)
        for scheme in self._running(schemes):
            if scheme.name != AUTOMATIC:
                self._note(f"{scheme.name}: memory at half the length")
                self._attempt(scheme, partial(self._extrapolate, workload, scheme))

    def _extrapolate(self, workload: Workload, scheme: Scheme) -> None:
        result = self.results[scheme.name]
        half = measure_memory(workload, scheme, with_timeline=False)
        assert result.memory is not None
        result.longest = longest_tokens(
            (workload.case.tokens, self.case.tokens),
            (half.total_bytes, result.memory.total_bytes),
            self.options.budget_bytes,
        )

    def verify(self) -> None:
        for name, result in self.results.items():
            tokens = int((result.longest or 0) * VERIFIED_SHARE)
            if not tokens:
                continue
            self._note(f"{name}: verifying {tokens} tokens")
            result.verified = False
            with contextlib.suppress(torch.OutOfMemoryError):
                result.verified_bytes = self._total_bytes(name, tokens)
                result.verified = result.verified_bytes <= self.options.budget_bytes
            _free(self.case.device)

    def _total_bytes(self, name: str, tokens: int) -> int:
        workload = Workload(dataclasses.replace(self.case, tokens=tokens))
        schemes, _ = make_schemes(workload, name)
        scheme = next(scheme for scheme in schemes if scheme.name == name)
        return measure_memory(workload, scheme, with_timeline=False).total_bytes

    def _check(self, workload: Workload, schemes: Sequence[Scheme]) -> None:
        """Every scheme's gradients are the reference's, bit for bit."""
        expected: dict[str, Tensor] = {}

        def check(scheme: Scheme) -> None:
            with _deterministic(self.case.device):
                self._step(workload, scheme)
            if expected:
                _compare(scheme.name, workload, expected)
            else:
                expected.update((name, g.to("cpu", copy=True)) for name, g in _gradients(workload))

        for scheme in sorted(schemes, key=lambda scheme: scheme.name != REFERENCE):
            self._note(f"{scheme.name}: gradients")
            self._attempt(scheme, partial(check, scheme))

    def _let_decide(self, workload: Workload, schemes: Sequence[Scheme]) -> None:
        """ "auto" measures a pass after an optimizer's first step, which nothing here would make, and then decides."""
        for scheme in (scheme for scheme in self._running(schemes) if scheme.name == AUTOMATIC):
            self._note(f"{scheme.name}: deciding")
            set_up_arena(self.case)  # the slots of the others would count
            _free(self.case.device)
            torch.optim.SGD([torch.zeros(1)]).step()
            for _ in range(PASSES_TO_DECIDE - 1):  # the gradient check was the first
                self._attempt(scheme, partial(self._step, workload, scheme))

    def _time(self, workload: Workload, schemes: Sequence[Scheme]) -> None:
        for number in range(-WARM_UP_ROUNDS, self.options.rounds):
            running = self._running(schemes)
            for at in range(len(running)):
                scheme = running[(number + at) % len(running)]
                self._note(f"{scheme.name}: " + (f"round {number + 1}" if number >= 0 else "warm-up"))
                elapsed_ms = self._attempt(scheme, partial(self._step, workload, scheme))
                if number >= 0 and elapsed_ms is not None:
                    self.results[scheme.name].times_ms.append(elapsed_ms)

    def _step(self, workload: Workload, scheme: Scheme) -> float:
        workload.clear_gradients()
        scheme.prepare()
        _synchronize(self.case.device)
        start = time.perf_counter()
        workload.step(scheme.forward)
        _synchronize(self.case.device)
        return (time.perf_counter() - start) * 1000

    def _watch_queues(self, workload: Workload, scheme: Scheme) -> None:
        result, device = self.results[scheme.name], self.case.device
        if device.type == "cuda":
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                self._step(workload, scheme)
            times = queue_times(profile.events())
            result.hidden_share = times.hidden_share()
            result.queues = times if scheme.name == OFFLOADED else None
        elif scheme.name == OFFLOADED:
            recorder = HostRecorder(scheme.blocks)
            with recorder.recording(device):
                self._step(workload, scheme)
            result.queues = recorder.times()

    def _running(self, schemes: Sequence[Scheme]) -> list[Scheme]:
        return [scheme for scheme in schemes if self.results[scheme.name].status == "measured"]

    def _attempt(self, scheme: Scheme, run: Callable[[], float | None]) -> float | None:
        """What `run` returns. A scheme for which the device is too small is out of the case from here on."""
        try:
            return run()
        except torch.OutOfMemoryError:
            self.results[scheme.name] = Measured("out of memory")
        # After `except`: the traceback holds what the step had made.
        _free(self.case.device)
        return None


@contextlib.contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """CUDA's flash attention adds up its gradients in any order otherwise."""
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _gradients(workload: Workload) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in workload.differentiated():
        assert tensor.grad is not None  # made with the workload
        yield name, tensor.grad


def _compare(scheme: str, workload: Workload, expected: dict[str, Tensor]) -> None:
    worst, where, differing = 0.0, "", 0
    for name, on_device in _gradients(workload):
        gradient = on_device.to("cpu")
        if not torch.equal(gradient, expected[name]):
            differing += 1
            difference = float((gradient.double() - expected[name].double()).abs().max())
            # A NaN is worse than any number.
            if not difference <= worst or not where:
                worst, where = difference, name
    if differing:
        raise GradientsDiffer(
            f"{scheme}: {differing} of {len(expected)} gradients are not those of {REFERENCE} bit for bit; the "
            f"largest difference is {worst:g}, in {where}. Nothing was measured: a scheme that computes something "
            "else has no step time to compare"
        )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
