"""Streams, an allocator and NCCL as a GPU has them, for a step on CPUs: what CUDA would let go wrong is found.

On a GPU each stream runs by itself; only events order it after another. Here everything runs at once, and of every
access it is noted on which stream it would run, and how far that stream knows the others (a vector clock):

    host gives                  stream "copies" knows           so
    compute  writes x           nothing
    copies   reads x            nothing of compute              a race: x may not be there yet
    copies   waits for compute  all that compute did until now
    copies   reads x            that x was written              in order

Memory belongs to the stream on which it was made. When its last tensor goes, whatever is made on that stream next gets
it, and writes to it: another stream that still uses it is overtaken. `record_stream` defers that. Pages of the host go
back to the system, which asks no stream: the host must have waited.

A thread is on the first GPU until it says otherwise: page-locked memory that it asks for opens that one in every rank.

NCCL:
    async_op=False      runs on the stream that is current, and gives no work (torch 2.8 and newer)
    async_op=True       runs on a stream of its group, behind what is current; the tensors are held until `wait`, by
                        which the stream that is current then waits
    messages            of one batch are one work, which has no future: to ask it for one ends the process

torch.cpu has the names of torch.cuda, and FSDP2 calls them; here both mean these streams. Numbers are those of gloo.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from opensora_accel.observe import modes
from opensora_accel.observe.operators import arguments_of
from opensora_accel.offload import host_memory

ROOT = Path(__file__).resolve().parents[1]
_OURS = (f"{ROOT}/opensora_accel/", f"{ROOT}/shardformer/")
# Arguments that a collective only reads; it writes the others.
_READ = ("input", "input_tensor", "input_tensors", "input_list", "inputs")
_MESSAGES = ("send", "recv_")


class Stream:
    """Work in the order in which it was given."""

    def __init__(self, device=None, priority=0, *, name=None, is_host=False):
        self.priority, self.device, self.is_host = priority, torch.device("cpu"), is_host
        self.name = name or f"stream {next(_numbers)}"
        self.time = 0
        # How far each other stream has come for sure before work that is given from now on.
        self.known: dict[Stream, int] = {}
        # When all that it was given so far is done.
        self.seconds = 0.0

    def __repr__(self):
        return self.name

    def learn(self, others):
        for stream, time in others.items():
            self.known[stream] = max(time, self.known.get(stream, 0))

    def now(self):
        return {**self.known, self: self.time}

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def wait_event(self, event):
        self.learn(event.at)
        self.seconds = max(self.seconds, event.seconds)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        host().wait_stream(self)

    def query(self):
        return True


class Event:
    """All that a stream had been given when it was recorded."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.at: dict[Stream, int] = {}
        self.seconds = 0.0

    def record(self, stream=None):
        stream = stream or current_stream()
        self.at, self.seconds = stream.now(), stream.seconds

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def synchronize(self):
        host().wait_event(self)

    def query(self):
        return True

    def elapsed_time(self, end):
        """Milliseconds, rounded as CUDA's are."""
        return torch.tensor(1000 * (end.seconds - self.seconds), dtype=torch.float32).item()


_numbers = iter(range(1_000_000))
_local = threading.local()
_compute = Stream(name="compute")


def host():
    """What this thread of the host has waited for."""
    if not hasattr(_local, "host"):
        _local.host = Stream(name=f"host ({threading.current_thread().name})", is_host=True)
    return _local.host


def current_stream(device=None):
    return getattr(_local, "stream", _compute)


@contextlib.contextmanager
def stream(entered):
    before = current_stream()
    _local.stream = entered or before
    try:
        yield
    finally:
        _local.stream = before


class Work(dist.Work):
    """A collective that was started with async_op=True, or the messages of one batch."""

    def __init__(self, works, comm, tensors, *, has_future):
        super().__init__()
        self._works, self._held, self._has_future = works, tensors, has_future
        self._done = comm.record_event()

    def finish(self):
        """The stream that is current waits: what `dist.Work.wait` does."""
        for work in self._works:
            work.wait()
        self._works = []
        current_stream().wait_event(self._done)
        self._held = None
        return True

    def get_future(self):
        assert self._has_future, "a process on a GPU ends here: messages of NCCL have no future"
        future = torch.futures.Future()
        future.set_result([])
        return future


class Schedule:
    """Within it work is that of a GPU, also that of threads which start there. `races`: each access out of order."""

    def __init__(self, operator_s=0.0, transfer_s=0.0):
        # What each takes on the stream where it runs.
        self._operator_s, self._transfer_s = operator_s, transfer_s
        self.races: list[str] = []
        self.num_accesses = 0
        # By storage: the stream it belongs to, and the accesses that later ones have to come after.
        self._owners: dict[int, Stream] = {}
        self._accesses: dict[int, list[tuple[Any, ...]]] = {}
        self._recorded: dict[int, set[Stream]] = {}
        # Storages whose end is noted: another may lie at their address after it.
        self._noted: set[int] = set()
        # By stream: the accesses to memory that went back to it.
        self._freed: dict[Stream, list[tuple[Stream, int, str]]] = {}
        # Pages for copies: by address their size, the storages that lie there, and accesses to those that are gone.
        self._pages: dict[int, tuple[int, set[int], list[tuple[Any, ...]]]] = {}
        self._streams: set[Stream] = set()
        self._comms: dict[dist.ProcessGroup, Stream] = {}
        # Messages of a batch that is being put together, with their tensors.
        self._batches: dict[dist.ProcessGroup, tuple[list[Any], list[torch.Tensor]]] = {}
        self._works: list[Work] = []
        # Memory is freed in any thread, and in the middle of anything.
        self._lock = threading.RLock()
        self._undo = contextlib.ExitStack()

    def __enter__(self):
        names = {"Stream": Stream, "Event": Event, "stream": stream, "current_stream": current_stream}
        patches = [
            *((module, name, value) for module in (torch.cpu, torch.cuda) for name, value in names.items()),
            (torch.accelerator, "current_stream", current_stream),
            (torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_)),
            (torch.Tensor, "record_stream", lambda tensor, used_on: self._record(tensor, used_on)),
            (torch.Tensor, "is_cuda", property(lambda tensor: True)),
            (torch.cuda, "synchronize", self.synchronize),
            (torch.cuda, "get_device_capability", lambda _device=None: (8, 0)),
            (torch.cuda, "set_device", _set_device),
            (torch.cuda, "get_rng_state", lambda _device=None: torch.get_rng_state()),
            (torch.cuda, "set_rng_state", lambda state, _device=None: torch.set_rng_state(state)),
            (dist.Work, "wait", _waiting(dist.Work.wait)),
            (dist, "batch_isend_irecv", _batch_isend_irecv),
            (dist.ProcessGroup, "_start_coalescing", self._start_coalescing),
            (dist.ProcessGroup, "_end_coalescing", self._end_coalescing),
            (host_memory, "_map_pages", self._mapping(host_memory._map_pages)),
            (host_memory, "_give_back", self._giving_back(host_memory._give_back)),
            (threading.Thread, "start", self._starting(threading.Thread.start)),
            (threading.Thread, "join", self._joining(threading.Thread.join)),
        ]
        for target, name, value in patches:
            self._undo.enter_context(mock.patch.object(target, name, value, create=name == "is_cuda"))
        self._undo.enter_context(_Mode(self))
        return self

    def __exit__(self, *exception):
        self._undo.close()

    # ---- what torch and CUDA do

    def synchronize(self, _device=None):
        for each in list(self._streams):
            each.synchronize()

    def _resizing(self, resize):
        def resize_(storage, size):
            self.free(storage._cdata) if size == 0 else self.allocate(storage._cdata)
            return resize(storage, size)

        return resize_

    def _record(self, tensor, used_on):
        self._recorded.setdefault(tensor.untyped_storage()._cdata, set()).add(used_on)

    def _start_coalescing(self, group, _device):
        self._batches[group] = [], []

    def _end_coalescing(self, group, _device):
        works, tensors = self._batches.pop(group)
        return self._work(works, group, tensors, has_future=False)

    def _mapping(self, map_pages):
        def maps(num_bytes):
            if not (_is_main() or getattr(_local, "has_device", False)):
                self._race(f"page-locked memory in a thread that is still on the first GPU ({_place()})")
            address = map_pages(num_bytes)
            self._pages[address] = num_bytes, set(), []
            return address

        return maps

    def _giving_back(self, give_back):
        """Pages go back, and no stream is asked: as those do that could not be locked."""

        def gives_back(address, *args):
            with self._lock:
                _, storages, accesses = self._pages.pop(address)
                for storage in storages:
                    accesses += self._accesses.pop(storage, ())
                for *_, other, time, _, what in accesses:
                    if not _is_ordered(other, time, host()):
                        self._race(f"{what} on {other} uses pages that the host gives back ({_place()})")
            give_back(address, *args)

        return gives_back

    def _starting(self, start):
        def starts(thread):
            known, run = host().now(), thread.run

            def runs():
                host().learn(known)
                thread.on_host = host()
                with _Mode(self):
                    run()

            thread.run = runs
            start(thread)

        return starts

    def _joining(self, join):
        def joins(thread, timeout=None):
            join(thread, timeout)
            host().learn(thread.on_host.now())

        return joins

    # ---- operators

    def computes(self, func, args, kwargs, outputs):
        """An operator that is no collective has run."""
        if func.is_view:
            return
        values, given, results = arguments_of(func, args, kwargs), _tensors((args, kwargs)), _tensors(outputs)
        given_ids = {id(tensor) for tensor in given}
        for tensor in results:
            storage = tensor.untyped_storage()
            if id(tensor) not in given_ids and storage._cdata not in self._owners:
                self.allocate(storage._cdata)
                self._note_end(storage)
        if "empty" in func._schema.name:
            return
        written = list(results)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += _tensors(values.get(argument.name))
        written_ids = {id(tensor) for tensor in written}
        read = [tensor for tensor in given if id(tensor) not in written_ids]
        # What another thread does on no stream, it does to memory of the host.
        where = current_stream()
        where = host() if where is _compute and not _is_main() else where
        self._run(where, func._schema.name, read, written, self._operator_s)

    def communicates(self, func, values, outputs):
        """What a collective that gloo has run gives under NCCL."""
        name = func._schema.name.split("::")[1]
        if "process_group" not in values or "barrier" in name:
            return outputs
        group = dist.ProcessGroup.unbox(values["process_group"])
        read = _tensors([values.get(each) for each in _READ])
        written = _tensors([value for each, value in values.items() if each not in _READ])
        if name == "send":
            read, written = written, read
        work = dist.Work.unbox(outputs[-1] if isinstance(outputs, (tuple, list)) else outputs)
        if name in _MESSAGES:
            if group not in self._batches:
                # A message of the host's own: the host reads or fills the memory.
                self._run(host(), name, read, written, self._transfer_s)
                return outputs
            works, tensors = self._batches[group]
            works.append(work)
            tensors += read + written
            self._run(self._comm(group), name, read, written, self._transfer_s)
            return outputs
        if values.get("async_op", True):
            self._run(self._comm(group), name, read, written, self._transfer_s)
            replaced = self._work([work], group, read + written, has_future=True).boxed()
        else:
            work.wait()
            self._run(current_stream(), name, read, written, self._transfer_s)
            replaced = dist.Work.boxed(None)
        return (*outputs[:-1], replaced) if isinstance(outputs, (tuple, list)) else replaced

    def _comm(self, group):
        """The group's stream, behind the one that is current."""
        comm = self._comms.setdefault(
            group, Stream(name=f"NCCL of ranks {dist.get_process_group_ranks(group)}")
        )
        comm.wait_stream(current_stream())
        return comm

    def _work(self, works, group, tensors, *, has_future):
        work = Work(works, self._comms[group], tensors, has_future=has_future)
        self._works.append(work)  # torch keeps the C++ part alone
        return work

    # ---- accesses

    def _run(self, where, name, reads, writes, seconds):
        with self._lock:
            self._streams.add(where)
            where.learn(host().known)
            where.time += 1
            where.seconds = max(where.seconds, host().seconds) + seconds
            what = f"{name} ({_place()})"
            for is_write, tensors in ((False, reads), (True, writes)):
                for tensor in tensors:
                    self._access(where, what, tensor, is_write)

    def _access(self, where, what, tensor, is_write):
        self.num_accesses += 1
        storage, (begin, end) = tensor.untyped_storage(), _bytes(tensor)
        # Shapes alone; or a tensor around another, which is seen by itself.
        if storage.device.type == "meta" or hasattr(type(tensor), "__tensor_flatten__"):
            return
        self._note_end(storage)
        # A copy: a thread that saves may map pages meanwhile.
        for address, (num_bytes, storages, _) in list(self._pages.items()):
            if address <= storage.data_ptr() < address + num_bytes:
                storages.add(storage._cdata)
        kept = []
        for each in self._accesses.get(storage._cdata, ()):
            first, last, other, time, other_writes, other_what = each
            is_ordered = _is_ordered(other, time, where)
            if first < end and begin < last and (is_write or other_writes) and not is_ordered:
                verbs = ["writes" if writes else "reads" for writes in (is_write, other_writes)]
                self._race(f"{what} on {where} {verbs[0]} what {other_what} on {other} {verbs[1]}")
            # What comes after this one comes after that one too.
            is_past = is_write or (other is where and not other_writes)
            if not (is_past and is_ordered and begin <= first and last <= end):
                kept.append(each)
        self._accesses[storage._cdata] = [*kept, (begin, end, where, where.time, is_write, what)]

    def _race(self, line):
        if line not in self.races:
            self.races.append(line)

    # ---- memory

    def allocate(self, storage):
        """New memory of the stream that is current: it may be any that was freed there."""
        with self._lock:
            self._owners[storage] = owner = current_stream()
            owner.learn(host().known)
            for other, time, what in self._freed.pop(owner, ()):
                if not _is_ordered(other, time, owner):
                    self._race(f"{what} on {other} uses memory that {owner} has again ({_place()})")

    def _note_end(self, storage):
        with self._lock:
            if storage._cdata not in self._noted:
                self._noted.add(storage._cdata)
                weakref.finalize(storage, self._end, storage._cdata)

    def _end(self, storage):
        with self._lock:
            self._noted.discard(storage)
            for _, storages, accesses in self._pages.values():
                if storage in storages:
                    storages.discard(storage)
                    accesses += self._accesses.pop(storage, ())
            self.free(storage)

    def free(self, storage):
        with self._lock:
            owner, recorded = self._owners.pop(storage, None), self._recorded.pop(storage, ())
            accesses = self._accesses.pop(storage, ())
            if owner is not None:
                # What the host itself has touched is its own memory, and not freed before it is done.
                self._freed.setdefault(owner, []).extend(
                    (other, time, what)
                    for *_, other, time, _, what in accesses
                    if other not in recorded and not other.is_host
                )


class _Mode(modes.OperatorMode):
    """Shows a thread's operators to a schedule."""

    sees_parts = True

    def __init__(self, schedule):
        super().__init__()
        self._schedule = schedule

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "c10d":
            return super().__torch_dispatch__(func, types, args, kwargs)
        outputs = func(*args, **(kwargs or {}))
        return self._schedule.communicates(func, arguments_of(func, args, kwargs or {}), outputs)

    def after(self, func, args, kwargs, outputs):
        self._schedule.computes(func, args, kwargs, outputs)


def _waiting(wait):
    """NCCL's works have no `wait` of their own: whoever replaces torch's sees them."""

    def waits(work, *timeout):
        return work.finish() if isinstance(work, Work) else wait(work, *timeout)

    return waits


def _batch_isend_irecv(messages):
    """As torch does where messages become one: with NCCL."""
    group, device = messages[0].group, messages[0].tensor.device
    dist.ProcessGroup._start_coalescing(group, device)
    for each in messages:
        peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
        each.op(each.tensor, group=group, tag=each.tag, **peer)
    return [dist.ProcessGroup._end_coalescing(group, device)]


def _set_device(_device):
    _local.has_device = True


def _is_main():
    return threading.current_thread() is threading.main_thread()


def _is_ordered(earlier, time, later):
    return earlier is later or later.known.get(earlier, 0) >= time


def _tensors(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor):
    """The bytes of its storage that a tensor may touch: the first, and the one behind the last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset()
    return begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize


def _place():
    """The innermost line of this project, or of torch's FSDP, that gave the work."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS) and name != modes.__file__:
            return f"{name.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
        if "/fsdp/_fully_shard/" in name:
            return f"torch's {name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
