"""Where the time of a step goes, in any loop.

    with profile(model, plan, "profile") as run:
        for batch in loader:
            loss = train_step(batch)
            run.step(loss=loss, tokens=batch.num_tokens)     # a step ends here, and the next one begins

Nothing in the loop has to change. Blocks, their attention and their MLPs are found by the model's policy, and hooks
show when each runs. What a module does in backward begins when the gradient of its output is there, and ends when that
of its input is. Where a forward runs within a backward, it is a recomputation:

    forward     ├─ block 0 ──┤├─ block 1 ──┤
    backward                                ├─ block 1: recomputed ─┤ gradients ┤├─ block 0: recomputed ─┤ gradients ┤

Whatever else is of interest announces itself (`opensora_accel.regions.region`): copies to the host and back, reading
clips, encoding, saving; the optimizer by torch's own hooks. Collectives are noted one by one (`communication.py`).

When no profiler runs, no hook is there. When one runs, a step's record is written as soon as its times are known, which
on a GPU is a step later: nothing makes the host wait for the device.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from opensora_accel import regions
from opensora_accel.observe import (
    BACKWARD,
    RECOMPUTE,
    FlopCounter,
    blocks_by_policy,
    follow_modules,
    phase_of_modules,
)
from opensora_accel.parallel_states import (
    get_exchange_groups,
    get_mesh,
    get_parallel_group,
    has_mesh,
    has_parallel_group,
)
from opensora_accel.plan import Plan
from opensora_accel.profiler.clock import agree, clock_for
from opensora_accel.profiler.communication import Transfers
from opensora_accel.profiler.findings import MIN_RATIO, MORE_COMPUTE
from opensora_accel.profiler.intervals import length, union
from opensora_accel.profiler.memory import MemoryTimeline
from opensora_accel.profiler.records import (
    CommunicationCall,
    MaskedAttention,
    MemorySample,
    RecordWriter,
    RunRecord,
    Span,
    StepRecord,
)
from shardformer.policy import Policy, find_policy, has_policy

logger = logging.getLogger(__name__)

# Steps after the first in which the ratio of compute to communication is looked at.
_STEPS_BEFORE_WARNING = 10
# Regions in which the device computes, or the host for it.
_COMPUTE = ("block", "attention", "mlp", "optimizer", "encode")
# They may run beside compute, whose place they do not tell.
_BESIDE = ("copy out", "copy in", "save")
# A device that comes to a mark so soon after the host had nothing else to do before it; an event takes some 10 µs.
_CAUGHT_UP_S = 1e-4
# Groups by which a call is named, the narrowest first; where two have the same ranks the first name counts.
_GROUPS = ("ulysses", "ring", "tp", "dp_shard", "dp_replicate", "sequence", "tensor", "data", "mixed")


@dataclass(eq=False)
class _Open:
    """A span that has begun."""

    region: str
    name: str
    phase: str
    begin: Any
    # The region's mark in torch's trace, where one is made.
    in_trace: Any = None
    end: Any = None


@dataclass(eq=False)
class _Step:
    """A step whose times are not all known yet."""

    number: int
    begin: Any
    end: Any
    metrics: dict[str, Any]
    spans: list[_Open]
    transfers: list[Any]
    masks: Sequence[MaskedAttention]
    memory: Sequence[MemorySample] = ()
    slowed_by: str = ""


class profile:
    """Records every step within it, on this rank, into `folder`; all ranks enter it together.

    Args:
        model: sharded or not. Blocks, attention and MLPs are those of its policy; without one, the items of its
            outermost lists of modules count as blocks.
        plan: written beside the records.
        folder: gets rank_00000.jsonl, rank_00001.jsonl, ...; a record that is there is replaced.
        policy: as given to `shardformer.shard`.
        first_step: the number of the first step.
        trace_steps: numbers of steps of which torch's profiler makes a trace too, with the names of the regions:
            trace_rank_00000_step_00005.json.gz, for ui.perfetto.dev. Such a step is slower, and its file may be large.
        memory_steps: numbers of steps in which it is followed what fills the memory (`MemoryTimeline`). On a CPU such a
            step takes longer, because every operator passes through Python.
        optimizer: whose state counts as such in these steps.
        count_flops: counts floating-point operations in the first step, which takes longer for it (`flops`).
        link_bytes_per_s: of each axis, as measured (`opensora-accel doctor`) or given.
        peak_flops: of this rank's device, per second, with `peak_flops_source`.

    Raises:
        ValueError: a profiler runs already.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        folder: str | Path = "profile",
        *,
        policy: Policy | None = None,
        first_step: int = 1,
        trace_steps: Collection[int] = (),
        memory_steps: Collection[int] = (),
        optimizer: torch.optim.Optimizer | None = None,
        count_flops: bool = True,
        link_bytes_per_s: Mapping[str, float] | None = None,
        peak_flops: float | None = None,
        peak_flops_source: str = "",
    ):
        self._model, self._plan, self._folder = model, plan, Path(folder)
        self._policy = policy or (find_policy(model) if has_policy(model) else None)
        self._link, self._peak = dict(link_bytes_per_s or {}), (peak_flops, peak_flops_source)
        self._number, self._first_step, self._trace_steps = first_step, first_step, frozenset(trace_steps)
        self._trace: torch.profiler.profile | None = None
        self._memory_steps, self._optimizer = frozenset(memory_steps), optimizer
        self._memory: MemoryTimeline | None = None
        self._counter = FlopCounter() if count_flops else None
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._device = device
        self._spans: list[_Open] = []
        self._stack: list[_Open] = []
        self._lock = threading.RLock()  # a save announces itself from a thread of its own
        self._waiting: deque[_Step] = deque()
        # Of the step that runs, by the mask.
        self._masks: dict[str, MaskedAttention] = {}
        self._slowed_by = ""
        # Seconds of work and of a busy network in the steps after the first, until the ratio was reported.
        self._work_s = self._network_s = 0.0

    def __enter__(self) -> profile:
        self._clock = clock_for(self._device)
        groups = _groups()
        with ExitStack() as undo:
            regions.listen(self)
            undo.callback(regions.listen, None)
            if not dist.is_initialized() or dist.get_rank() == 0:
                for path in self._folder.glob("rank_*.jsonl"):
                    path.unlink()  # an earlier run may have had more ranks
            error_s = agree(self._clock)  # behind which no rank finds them
            # Before anything is trained it is known that the folder can be written to.
            self._writer = RecordWriter(self._folder, self._run_record(groups, error_s))
            undo.callback(self._writer.close)
            undo.enter_context(follow_modules(self._model, self._policy, self._begin, self._end))
            undo.callback(
                register_optimizer_step_pre_hook(lambda *_: self._begin("optimizer", "", "")).remove
            )
            undo.callback(register_optimizer_step_post_hook(lambda *_: self._end("optimizer", "")).remove)
            self._transfers = undo.enter_context(Transfers(self._clock, groups))
            if self._counter is not None:
                # Innermost, as it is the first to go.
                self._counting = ExitStack()
                self._counting.enter_context(self._counter)
                undo.callback(self._counting.close)
            self._undo = undo.pop_all()
        self._begin_looking()
        self._step_begin = self._clock.mark()
        return self

    def __exit__(self, *exception: Any) -> None:
        # In the order in which they were begun, from the last: modes of torch lie on a stack.
        if self._trace is not None:
            self._trace.stop()
        if self._memory is not None:
            self._memory.__exit__(*exception)
        try:
            # What was begun when an error came is no step.
            while self._waiting:
                self._write(self._waiting.popleft())
        finally:
            self._undo.close()

    def step(self, **metrics: float | Tensor) -> None:
        """A step has ended.

        Args:
            metrics: numbers of this rank's step (loss, tokens, grad_norm, ...), as floats or scalar tensors; a tensor
                on a GPU is read when the step is written, so that nothing waits for it here.
        """
        now = self._clock.mark()
        with self._lock:
            self._close_all(now)
            masks, transfers = list(self._masks.values()), self._transfers.take()
            step = _Step(self._number, self._step_begin, now, metrics, self._spans, transfers, masks)
            step.slowed_by = self._slowed_by
            self._spans, self._masks = [], {}
        was_looking = self._trace is not None or self._memory is not None
        self._end_looking(step)
        if self._counter is not None:
            self._counting.close()
            flops = {name: getattr(self._counter, name) for name in ("model_flops", "hardware_flops")}
            self._writer.run = dataclasses.replace(self._writer.run, **flops)
            self._counter = None
        self._number += 1
        self._waiting.append(step)
        while self._waiting and self._is_known(self._waiting[0]):
            self._write(self._waiting.popleft())
        self._begin_looking()
        # A trace takes seconds to begin and to write, which are of no step.
        is_looking = was_looking or self._trace is not None or self._memory is not None
        if was_looking and not self._slowed_by:
            # Caches are cold, and the allocator has other blocks.
            self._slowed_by = "memory or a trace in the step before"
        self._step_begin = self._clock.mark() if is_looking else now

    def _begin_looking(self) -> None:
        """Begins what is asked for in the step that begins alone."""
        looks = {"memory": self._memory_steps, "a trace": self._trace_steps}
        self._slowed_by = " and ".join(what for what, steps in looks.items() if self._number in steps)
        if self._number in self._memory_steps:
            blocks = blocks_by_policy(self._model, self._policy)
            self._memory = MemoryTimeline(self._model, self._optimizer, blocks=list(blocks.values()))
            self._memory.__enter__()
        if self._number in self._trace_steps:
            self._trace = torch.profiler.profile(record_shapes=False)
            self._trace.start()

    def _end_looking(self, step: _Step) -> None:
        if self._memory is not None:
            self._memory.__exit__(None, None, None)
            step.memory = self._memory.samples
            self._memory = None
        if self._trace is not None:
            self._trace.stop()
            rank = dist.get_rank() if dist.is_initialized() else 0
            name = f"trace_rank_{rank:05d}_step_{self._number:05d}.json.gz"
            self._trace.export_chrome_trace(str(self._folder / name))
            self._trace = None

    @contextmanager
    def region(self, kind: str, name: str, phase: str) -> Iterator[None]:
        """`opensora_accel.regions.region`, while this profiler listens."""
        span, depth = self._open(kind, name, phase, self._clock.mark()), len(self._stack)
        recomputing: AbstractContextManager[None] = nullcontext()
        if phase == RECOMPUTE and self._counter is not None:
            recomputing = self._counter.recomputing()
        try:
            with recomputing:
                yield
        finally:
            mark = self._clock.mark()
            with self._lock:
                if phase == RECOMPUTE:
                    # A checkpoint stops as soon as it has what backward needs, by an exception: no hook runs then.
                    self._close_all(mark, depth)
                self._close(span, mark)

    def attends(self, shares: regions.Shares, place: int, num_samples: int) -> None:
        """`opensora_accel.regions.attends`, while this profiler listens."""
        # Of cross-attention every rank has all keys, and as many pairs as tokens.
        if phase_of_modules() == RECOMPUTE or shares.mask.num_queries != shares.mask.num_keys:
            return
        mask, areas = str(shares.mask), shares.areas
        with self._lock:
            _, calls, pairs, mean = self._masks.get(mask, MaskedAttention(mask, 0, 0, 0.0))
            pairs += num_samples * areas[place]
            mean += num_samples * sum(areas) / len(areas)
            self._masks[mask] = MaskedAttention(mask, calls + 1, pairs, mean)

    # ---- spans

    def _begin(self, region: str, name: str, phase: str) -> None:
        with self._lock:
            # Once: where gradients come in parts, a hook may be called for a module that began already.
            if any((each.region, each.name, each.phase) == (region, name, phase) for each in self._stack):
                return
            mark = self._clock.mark()
            # Backward leaves a block when it enters the one before it, and says nothing where it needs no gradient.
            if phase == BACKWARD and region == "block":
                self._close_all(mark)
            self._stack.append(self._open(region, name, phase, mark))

    def _end(self, region: str, name: str, phase: str = "") -> None:
        with self._lock:
            mark = self._clock.mark()
            names = [(each.region, each.name, each.phase) for each in self._stack]
            if (region, name, phase) in names:
                # Spans are nested: what began within it has ended too.
                self._close_all(mark, names.index((region, name, phase)))

    def _close_all(self, mark: Any, above: int = 0) -> None:
        while len(self._stack) > above:
            self._close(self._stack.pop(), mark)

    def _open(self, region: str, name: str, phase: str, mark: Any) -> _Open:
        span = _Open(region, name, phase, mark)
        if self._trace is not None:
            span.in_trace = record_function(" ".join(filter(None, (region, phase, name))))
            span.in_trace.__enter__()
        return span

    def _close(self, span: _Open, mark: Any) -> None:
        span.end = mark
        if span.in_trace is not None:
            span.in_trace.__exit__(None, None, None)
        self._spans.append(span)

    # ---- records

    def _is_known(self, step: _Step) -> bool:
        return self._clock.is_done(step.end) and self._transfers.are_done(step.transfers)

    def _write(self, step: _Step) -> None:
        seconds = self._clock.seconds
        spans = [
            Span(each.region, each.name, each.phase, seconds(each.begin), seconds(each.end))
            for each in step.spans
        ]
        spans.sort(key=lambda span: (span.start_s, -span.end_s))
        compute = [(span.start_s, span.end_s) for span in spans if span.region in _COMPUTE]

        def within(host_s: float) -> float:
            """Samples are taken by the host's time, the first just before the step and the last just after it."""
            return min(max(host_s - self._clock.zero_s, seconds(step.begin)), seconds(step.end))

        metrics = {name: float(value) for name, value in step.metrics.items()}
        calls = self._transfers.records(step.transfers, compute)
        self._watch_ratio(step, seconds(step.end) - seconds(step.begin), spans, calls)
        self._writer.step(
            StepRecord(
                step.number,
                seconds(step.begin),
                seconds(step.end),
                metrics,
                spans,
                calls,
                [each._replace(time_s=within(each.time_s)) for each in step.memory],
                step.masks,
                self._starved(step.spans),
                step.slowed_by,
            )
        )

    def _starved(self, spans: Sequence[_Open]) -> list[tuple[float, float]] | None:
        """Where the device had nothing left to do: between marks at both of which it had caught up with the host."""
        marks = [mark for span in spans if span.region not in _BESIDE for mark in (span.begin, span.end)]
        points = [(self._clock.seconds(mark), self._clock.behind_s(mark)) for mark in marks]
        known = sorted((at, behind < _CAUGHT_UP_S) for at, behind in points if behind is not None)
        if not known:
            return None
        return union(
            (start, end)
            for (start, is_caught_up), (end, is_still) in pairwise(known)
            if is_caught_up and is_still
        )

    def _watch_ratio(
        self, step: _Step, step_s: float, spans: Sequence[Span], calls: Sequence[CommunicationCall]
    ) -> None:
        """Warns once, on rank 0, where compute : communication stays under 3 : 1."""
        if step.number == self._first_step or self._work_s < 0:
            return
        network = [(call.start_s, call.end_s) for call in calls]
        data = [(span.start_s, span.end_s) for span in spans if span.region == "data"]
        exposed = length((call.end_s - call.exposed_s, call.end_s) for call in calls)
        self._work_s += max(0.0, step_s - exposed - length(data))
        self._network_s += length(network)
        if step.number < self._first_step + _STEPS_BEFORE_WARNING:
            return
        if self._work_s < MIN_RATIO * self._network_s and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning(
                "compute : communication is %.2g : 1 over %d steps, under %g : 1: the network is the limit, or "
                "a rank that comes late; %s",
                self._work_s / self._network_s,
                step.number - self._first_step,
                MIN_RATIO,
                MORE_COMPUTE,
            )
        self._work_s = -1.0  # once

    def _run_record(self, groups: Mapping[str, list[int]], clock_error_s: float) -> RunRecord:
        started = dist.is_initialized()
        coordinates = {}
        if has_mesh():
            mesh = get_mesh()
            coordinates = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=False))
        is_cuda = self._device.type == "cuda"
        return RunRecord(
            rank=dist.get_rank() if started else 0,
            world_size=dist.get_world_size() if started else 1,
            coordinates=coordinates,
            groups=groups,
            plan={} if self._plan is None else self._plan.to_dict(),
            model={
                "class": type(self._model).__name__,
                "num_parameters": sum(parameter.numel() for parameter in self._model.parameters()),
                "num_blocks": len(blocks_by_policy(self._model, self._policy)),
            },
            environment={
                "host": platform.node(),
                "device": torch.cuda.get_device_name(self._device)
                if is_cuda
                else platform.processor() or "CPU",
                "device_type": self._device.type,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "backend": str(dist.get_backend()) if started else "none",
            },
            peak_flops=self._peak[0],
            peak_flops_source=self._peak[1],
            link_bytes_per_s=self._link,
            # Copies have streams of their own there.
            beside_compute=["copy out", "copy in"] if is_cuda else [],
            clock_error_s=clock_error_s,
            started_at=time.time(),
        )


def _groups() -> dict[str, list[int]]:
    """Global ranks of this rank's groups: of the mesh's axes, those of other names, and their levels by node."""
    groups: dict[str, list[int]] = {}
    by_node: dict[str, list[int]] = {}
    if not dist.is_initialized():
        return groups
    for name in _GROUPS:
        if has_parallel_group(name):
            group = get_parallel_group(name)
            if group is not None and group.size() > 1:
                groups[name] = dist.get_process_group_ranks(group)
                for part, of_part in get_exchange_groups(group).items():
                    by_node[f"{name} {part}"] = dist.get_process_group_ranks(of_part)
    groups |= by_node
    groups["world"] = list(range(dist.get_world_size()))
    return groups
