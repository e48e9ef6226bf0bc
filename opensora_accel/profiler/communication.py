"""Every collective and message of a step: when it was started, when it was done, and what compute waited for it.

Seen are the operators of torch.distributed, whoever calls them: this package, FSDP2, DDP's reducer in C++, a compiled
graph. Three points of each are noted, none of which makes the host wait:

    started    when the operator is called
    done       on a CPU when its future is; on a GPU when a stream that only waits for the transfer goes on
    exposed    from when somebody waits for it until it goes on: on a CPU the host, on a GPU the compute stream

    compute     ████████████░░░░████      ░ exposed
    transfer        ▒▒▒▒▒▒▒▒▒▒▒▒

NCCL runs a collective that is waited for at once (async_op=False) on the compute stream itself, which has one mark
before it and one behind it: all of it is exposed. The messages of one batch are one transfer, done when the batch is.

What C++ waits for is not seen (DDP at the end of backward). Of such a call the part counts as exposed that lies beside
no span of compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from opensora_accel.arguments import tensors_in
from opensora_accel.interception import intercept, switched_on
from opensora_accel.observe import (
    CollectiveCall,
    arguments_of,
    calls_of,
    process_group_of,
    transfer_operators,
)
from opensora_accel.profiler.clock import HostClock
from opensora_accel.profiler.intervals import Interval, exposed_seconds
from opensora_accel.profiler.records import CommunicationCall


@dataclass(eq=False)
class _Transfer:
    """One call of an operator, until its times are known."""

    calls: tuple[CollectiveCall, ...]
    started: Any
    # None where nobody says so, as of a message of gloo: it is done when somebody has waited for it.
    done: Any = None
    # Marks before and after each wait for it.
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    # Kept, so that a wait finds its transfer by the object.
    work: dist.Work | None = None
    # All tensors that it was given: what a functional collective returned is one of them.
    storages: frozenset[int] = frozenset()
    # NCCL keeps them until the first wait. Where that is the clock's, they are kept here until the next one.
    kept: Sequence[Tensor] = ()

    def marks(self) -> Iterator[Any]:
        """All points in time that it has."""
        yield self.started
        if self.done is not None:
            yield self.done
        for before_and_after in self.waits:
            yield from before_and_after


class Transfers:
    """The transfers that this rank starts between `__enter__` and `__exit__`.

    Args:
        groups: global ranks of each group of the mesh, by name; the first that fits names a call's axis.
    """

    def __init__(self, clock: HostClock, groups: Mapping[str, Sequence[int]]):
        self._clock = clock
        self._axes = {tuple(ranks): name for name, ranks in reversed(list(groups.items()))}
        self._started: list[_Transfer] = []
        self._by_work: dict[int, _Transfer] = {}
        # Of each group whose messages are being put together: their calls, and their tensors.
        self._batches: dict[dist.ProcessGroup | None, tuple[list[CollectiveCall], list[Tensor]]] = {}
        self._libraries: list[Any] = []

    def __enter__(self) -> Transfers:
        self._libraries = [intercept(f"c10d::{name}", self._call) for name in transfer_operators()]
        self._libraries.append(intercept("_c10d_functional::wait_tensor", self._wait_tensor))
        self._wait, self._start_batch = dist.Work.wait, dist.ProcessGroup._start_coalescing
        self._end_batch = dist.ProcessGroup._end_coalescing

        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            transfer = self._by_work.get(id(work))
            if transfer is None:
                return self._wait(work, *args, **kwargs)
            before = self._clock.mark()
            try:
                return self._wait(work, *args, **kwargs)
            finally:
                transfer.waits.append((before, self._clock.mark()))
                transfer.kept = ()

        def start_batch(group: dist.ProcessGroup, *args: Any) -> None:
            self._start_batch(group, *args)
            self._batches[group] = [], []

        def end_batch(group: dist.ProcessGroup, *args: Any) -> dist.Work | None:
            calls, tensors = self._batches.pop(group, ([], []))
            started, work = self._clock.mark(), self._end_batch(group, *args)
            if calls:
                self._add(calls, tensors, started, work)
            return work

        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        dist.ProcessGroup._start_coalescing = start_batch  # type: ignore[method-assign, assignment]
        dist.ProcessGroup._end_coalescing = end_batch  # type: ignore[method-assign, assignment]
        self._guard = switched_on()
        self._guard.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._guard.__exit__(*exception)
        dist.Work.wait = self._wait  # type: ignore[method-assign]
        dist.ProcessGroup._start_coalescing = self._start_batch  # type: ignore[method-assign]
        dist.ProcessGroup._end_coalescing = self._end_batch  # type: ignore[method-assign]
        self._libraries.clear()

    def take(self) -> list[_Transfer]:
        """The transfers that were started since the last call."""
        taken, self._started = self._started, []
        self._by_work.clear()
        return taken

    def are_done(self, transfers: Iterable[_Transfer]) -> bool:
        """Whether all times can be read without waiting."""
        return all(self._clock.is_done(mark) for transfer in transfers for mark in transfer.marks())

    def records(self, transfers: Iterable[_Transfer], compute: Sequence[Interval]) -> list[CommunicationCall]:
        """What became of them. `compute`: when this rank computed, in seconds, for those that C++ waited for."""
        calls, seconds = [], self._clock.seconds
        for transfer in transfers:
            start = seconds(transfer.started)
            waits = [(seconds(before), seconds(after)) for before, after in transfer.waits]
            # One that never called back was done when somebody had waited for it, at the latest.
            ends = [end for _, end in waits]
            end = seconds(transfer.done) if transfer.done is not None else max([start, *ends])
            exposed = sum(end - begin for begin, end in waits)
            if not waits:
                exposed = exposed_seconds(compute, [(start, end)])
            end = max(end, start)
            for call in transfer.calls:
                calls.append(
                    CommunicationCall(
                        call.kind,
                        self._axes.get(call.group, ""),
                        self._axes.get(call.group, f"ranks {', '.join(map(str, call.group))}"),
                        start,
                        end,
                        # Sends and receives that are one operator have a part each.
                        exposed / len(transfer.calls),
                        call.sent_bytes,
                        _sent_to(call),
                        {call.peer: call.input_bytes}
                        if call.kind == "recv" and call.peer is not None
                        else {},
                    )
                )
        return calls

    def _call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        # A compiler that looks at an operator sends nothing.
        tensors = tensors_in((args, kwargs))
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return operator(*args, **kwargs)
        calls = [call for call, _tensors in calls_of(operator, args, kwargs)]
        batch = self._batches.get(process_group_of(arguments_of(operator, args, kwargs)))
        if batch is not None:
            batch[0].extend(calls)
            batch[1].extend(tensors)
            return operator(*args, **kwargs)
        started, result = self._clock.mark(), operator(*args, **kwargs)
        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        self._add(calls, tensors, started, dist.Work.unbox(boxed))
        return result

    def _add(
        self, calls: Sequence[CollectiveCall], tensors: Sequence[Tensor], started: Any, work: dist.Work | None
    ) -> None:
        """A transfer has been started. Of one that ran on the current stream NCCL gives no work."""
        storages = frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
        transfer = _Transfer(tuple(calls), started, work=work, storages=storages)
        self._started.append(transfer)
        if work is None:
            transfer.done = self._clock.mark()
            transfer.waits.append((started, transfer.done))
            return

        def note(mark: Any) -> None:
            transfer.done = mark

        if self._clock.when_done(work, note):
            transfer.kept = tensors
        # From here on waits are somebody else's.
        self._by_work[id(work)] = transfer

    def _wait_tensor(self, operator: Any, tensor: Any) -> Any:
        """What a functional collective returned, of any shape, is waited for."""
        before = self._clock.mark()
        result = operator(tensor)
        if not isinstance(tensor, FakeTensor):
            storage = tensor.untyped_storage()._cdata
            for transfer in self._started:
                if storage in transfer.storages and not transfer.waits:
                    transfer.waits.append((before, self._clock.mark()))
                    transfer.kept = ()
        return result


def _sent_to(call: CollectiveCall) -> dict[int, int]:
    """The bytes that each other rank gets, by global rank."""
    if call.is_point_to_point:
        return {call.peer: call.sent_bytes} if call.kind == "send" and call.peer is not None else {}
    own = dist.get_rank()
    if call.sent_to is not None:
        return {rank: size for rank, size in zip(call.group, call.sent_to, strict=True) if rank != own}
    others = [rank for rank in call.group if rank != own]
    if call.kind in ("reduce", "gather"):
        return {call.peer: call.sent_bytes} if call.sent_bytes and call.peer is not None else {}
    return {rank: call.sent_bytes // len(others) for rank in others} if call.sent_bytes else {}
