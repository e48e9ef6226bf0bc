"""Every collective and message of a step: when it was started, when it was done, and what compute waited for it.

Seen are the operators of torch.distributed, whoever calls them: this package, FSDP2, DDP's reducer in C++, a compiled
graph. Three points of each are noted, none of which makes the host wait:

    started    when the operator is called
    done       when its future is; on a GPU the future's callback runs on a stream that waits for the transfer, and
               leaves an event there
    exposed    from when somebody waits for it until it goes on: on a CPU the host, on a GPU the compute stream

    compute     ████████████░░░░████      ░ exposed
    transfer        ▒▒▒▒▒▒▒▒▒▒▒▒

What C++ waits for is not seen (DDP at the end of backward). Of such a call the part counts as exposed that lies beside
no span of compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from opensora_accel.arguments import tensors_in
from opensora_accel.interception import intercept, switched_on
from opensora_accel.observe import CollectiveCall, calls_of, transfer_operators
from opensora_accel.profiler.clock import HostClock
from opensora_accel.profiler.intervals import Interval, exposed_seconds
from opensora_accel.profiler.records import CommunicationCall


@dataclass(eq=False)
class _Transfer:
    """One call of an operator, until its times are known."""

    calls: tuple[CollectiveCall, ...]
    started: Any
    # None until the future's callback has run, and always where there is no future.
    done: Any = None
    has_future: bool = False
    # Marks before and after each wait for it.
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    # Kept, so that a wait finds its transfer by the object.
    work: Any = None
    # All tensors that it was given: what a functional collective returned is one of them.
    storages: frozenset[int] = frozenset()


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
        self._libraries: list[Any] = []

    def __enter__(self) -> Transfers:
        self._libraries = [intercept(f"c10d::{name}", self._call) for name in transfer_operators()]
        self._libraries.append(intercept("_c10d_functional::wait_tensor", self._wait_tensor))
        self._wait = dist.Work.wait

        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            transfer = self._by_work.get(id(work))
            if transfer is None:
                return self._wait(work, *args, **kwargs)
            before = self._clock.mark()
            try:
                return self._wait(work, *args, **kwargs)
            finally:
                transfer.waits.append((before, self._clock.mark()))

        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        self._guard = switched_on()
        self._guard.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._guard.__exit__(*exception)
        dist.Work.wait = self._wait  # type: ignore[method-assign]
        self._libraries.clear()

    def take(self) -> list[_Transfer]:
        """The transfers that were started since the last call."""
        taken, self._started = self._started, []
        self._by_work.clear()
        return taken

    def are_done(self, transfers: Iterable[_Transfer]) -> bool:
        """Whether all times can be read without waiting."""
        return all(transfer.done is not None and self._clock.is_done(transfer.done) for transfer in transfers)

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
        calls = tuple(call for call, _tensors in calls_of(operator, args, kwargs))
        storages = frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
        transfer = _Transfer(calls, self._clock.mark(), storages=storages)
        result = operator(*args, **kwargs)
        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        transfer.work = work = dist.Work.unbox(boxed)
        self._started.append(transfer)
        self._by_work[id(work)] = transfer

        def note(_future: Any) -> None:
            transfer.done = self._clock.mark()

        try:
            future = work.get_future()
        except RuntimeError:
            # Messages and reduce-scatters of gloo have none; they are done when somebody has waited for them.
            return result
        transfer.has_future = True
        future.add_done_callback(note)
        return result

    def _wait_tensor(self, operator: Any, tensor: Any) -> Any:
        """What a functional collective returned, of any shape, is waited for."""
        before = self._clock.mark()
        result = operator(tensor)
        if not isinstance(tensor, FakeTensor):
            storage = tensor.untyped_storage()._cdata
            for transfer in self._started:
                if storage in transfer.storages and not transfer.waits:
                    transfer.waits.append((before, self._clock.mark()))
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
