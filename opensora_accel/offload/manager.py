"""The offload engine: moves what checkpointed calls save to host memory, and brings it back in time.

Four blocks, of which the last one stays on the device. `out i` and `in i` are the copies of block i's input:

    compute     forward 0  | forward 1  | forward 2  | forward 3  | backward 3 | backward 2 | backward 1 | backward 0
    copies out  out 0      | out 1      | out 2      |            |            |            |            |
    copies in              |            |            |            | in 2       | in 1       | in 0       |
    slot A                 |            |            |            | 2          | 2          | 0          | 0
    slot B                 |            |            |            |            | 1          | 1          |

Copies out start when a block starts and are waited for when it ends. In backward, while one block computes, the one
before it is fetched into the other of two device slots. A ticket is the only handle to what was moved. Its bytes are
free again when nothing refers to it any more, which autograd decides: after backward, when a graph is dropped
half-way, after an exception. So no order of microbatches is assumed, and `retain_graph` may fetch a tensor twice.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from opensora_accel.offload.arena import Arena, aligned, default_limit_bytes
from opensora_accel.offload.calls import Call, Fetched, Kept, Leaving, Saved, Ticket
from opensora_accel.offload.choose import Decision
from opensora_accel.offload.counters import OffloadCounters
from opensora_accel.offload.layout import can_move, from_bytes, identity, layout_of, to_bytes
from opensora_accel.offload.measure import CallTimes, Measurement
from opensora_accel.offload.queues import Queue, Queues, queues_for
from opensora_accel.offload.slots import Slots

logger = logging.getLogger(__name__)


class ActivationManager:
    """Moves marked tensors to the arena and back. Open-Sora's name; its entries are tickets, in any order."""

    def __init__(self, make_queues: Callable[[torch.device], Queues] = queues_for) -> None:
        """Args: `make_queues` gives a device's queues, once for each device."""
        self.enable = False
        self.arena: Arena | None = None
        self.decisions: list[Decision] = []
        """What `offload="auto"` has chosen, newest last."""
        self.memory_target_bytes: int | None = None
        """Device memory that "auto" may fill; by default 90 % of the device's."""
        self._make_queues = make_queues
        self._queues: dict[torch.device, Queues] = {}
        self._slots: dict[torch.device, Slots] = {}
        self._counters = OffloadCounters()
        self._lock = threading.RLock()
        self._ended: deque[Call] = deque()
        self._returned: deque[tuple[int, Callable[[], None]]] = deque()
        self._ignored: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._tickets: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._last_call: weakref.ref[Call] | None = None
        self._warned: set[str] = set()
        self._num_users = 0
        self._is_for_users = False

    # ---- set-up

    @property
    def counters(self) -> OffloadCounters:
        self._take_back()
        return self._counters

    @property
    def slot_bytes(self) -> int:
        """Device memory that the slots hold."""
        return sum(slots.size_bytes for slots in self._slots.values())

    def setup_buffer(self, numel: int, dtype: torch.dtype) -> None:
        """Open-Sora's call: an arena of exactly `numel` elements of `dtype`; other dtypes may use it too."""
        self.setup_arena(numel * dtype.itemsize)

    def setup_arena(self, size_bytes: int | None = None, limit_bytes: int | None = None) -> None:
        """An arena of exactly `size_bytes`, or one that grows as it is used.

        It grows up to `limit_bytes`; by default to half of the host memory that is free now, shared by the ranks
        of this machine.
        """
        for name, value in (("size_bytes", size_bytes), ("limit_bytes", limit_bytes)):
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative; got {value}")
        if size_bytes is None and limit_bytes is None:
            limit_bytes = default_limit_bytes()
        self.close()
        self.arena = Arena(size_bytes, limit_bytes, before_freeing=self._synchronize)
        self.enable, self._is_for_users = True, False
        self._warned.clear()

    def close(self) -> None:
        """Stops moving, and lets slots and arena go as soon as the last ticket does."""
        self._take_back()
        with self._lock:
            self._synchronize()
            self.enable, self.arena = False, None
            self._slots.clear()

    def use(self) -> Callable[[], None]:
        """For as long as somebody moves blocks: an arena, if there is none. Call what it returns when done.

        The last one closes the arena, unless it was set up by hand.
        """
        with self._lock:
            if not self.enable:
                self.setup_arena()
                self._is_for_users = True
            self._num_users += 1
        return partial(self._end_use, [True])

    def _end_use(self, is_using: list[bool]) -> None:
        with self._lock:
            if is_using:
                is_using.clear()
                self._num_users -= 1
                if self._num_users == 0 and self._is_for_users:
                    self.close()

    def trim(self) -> None:
        """Gives back what nothing uses: the slots, and what an open arena has grown by. Both come again."""
        self._take_back()
        with self._lock:
            self._slots.clear()
            if self.arena is not None:
                self.arena.trim()

    def is_open(self) -> bool:
        """Whether a call that begins now could move anything."""
        return self.enable and torch._C._autograd._top_saved_tensors_default_hooks(False) is None

    def reset_counters(self) -> None:
        in_use = self.counters.in_use_bytes
        self._counters = OffloadCounters(in_use_bytes=in_use, peak_bytes=in_use)

    def add_ignore_tensor(self, tensor: Tensor) -> None:
        """Never move this tensor: it stays alive on the device anyhow."""
        self._ignored[tensor] = True

    # ---- single tensors

    def offload(self, tensor: Tensor) -> Ticket | None:
        """A copy on the host, which the compute queue waits for; None where the tensor stays on the device."""
        with self._lock:
            call = Call()
            ticket = self._offload(tensor, call)
            self._wait_for_copies_out(call)
            return ticket

    def onload(self, ticket: Ticket) -> Tensor:
        """The tensor as it was when it was moved, strides included. May be called again."""
        with self._lock:
            return self._take(Saved(ticket, Call(), 0))

    # ---- checkpointed calls

    @contextlib.contextmanager
    def call(self, marked: Sequence[Tensor] = (), measurement: Measurement | None = None) -> Iterator[Call]:
        """One checkpointed call: within it, what autograd saves of the marked tensors goes through the arena.

        Everything else is saved as always. So is all of it inside of another checkpoint, which recomputes it.
        With a `measurement` the call is timed.
        """
        if not self.enable or self._is_inside_other_hooks(marked):
            yield Call()
            return
        call = self._begin(measurement)
        by_identity = {identity(tensor): tensor for tensor in marked}

        def pack(tensor: Tensor) -> Saved | Kept:
            key = identity(tensor)
            saved = self.save(by_identity[key], call) if key in by_identity else None
            return saved or Kept(tensor, tensor._version)

        def unpack(packed: Saved | Kept) -> Tensor:
            return self.load(packed) if isinstance(packed, Saved) else packed.tensor_unchanged()

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        try:
            with hooks if marked else contextlib.nullcontext():
                yield call
            call.check_unchanged()
        finally:
            by_identity.clear()  # autograd keeps `pack`, and with it all that it refers to, as long as the graph
            self._end(call)

    def save(self, tensor: Tensor, call: Call) -> Saved | None:
        """Starts the copy out of what an open call must find again; None where it stays on the device."""
        with self._lock:
            ticket = self._offload(tensor, call) if call.is_open else None
            if ticket is None:
                return None
            saved = Saved(ticket, call, len(call.saved))
            call.saved.append(weakref.ref(saved))
            # A finalizer may run between any two instructions: it only takes note.
            weakref.finalize(saved, self._ended.append, call)
            return saved

    def keep(self, marked: Sequence[Tensor], why: str) -> None:
        """Counts tensors that were marked and stay on the device, and warns of it once."""
        for tensor in marked if self.enable else ():
            self._keep(tensor.nbytes)
            self._warn_once(why, f"a block's input stays on the device: {why}")

    def load(self, saved: Saved) -> Tensor:
        """The tensor, in a slot. The compute queue waits for its copy in, which mostly is under way or done."""
        with self._lock:
            if saved.call.times is not None:
                saved.call.times.begin_load()
            return self._take(saved)

    def begin_backward(self, call: Call) -> None:
        """The call's recomputation starts: what backward needs after it is fetched meanwhile."""
        with self._lock:
            if call.times is not None:
                call.times.begin_backward()
            self._take_back()
            previous = call.previous() if call.previous is not None else None
            if previous is not None and previous.fetched is None:
                fetched = self._fetch(previous.alive(), in_advance=True)
                self._counters.prefetched += fetched is not None
                previous.fetched = fetched

    def queues(self, device: torch.device) -> Queues:
        if device not in self._queues:
            self._queues[device] = self._make_queues(device)
        return self._queues[device]

    # ---- how it is done

    def _synchronize(self) -> None:
        """The host takes memory back at once, under a copy or not."""
        for queues in self._queues.values():
            queues.synchronize()

    def _begin(self, measurement: Measurement | None) -> Call:
        with self._lock:
            call = Call(self._last_call, is_open=True)
            self._last_call = weakref.ref(call)
            if measurement is not None:
                call.times = measurement.begin_call()
            return call

    def _end(self, call: Call) -> None:
        with self._lock:
            call.is_open = False
            if call.times is not None:
                call.times.end_forward()
            self._wait_for_copies_out(call)
            call.leaving.clear()
            alive = call.alive()
            if alive:
                device = alive[0].ticket.device
                slots = self._slots.setdefault(device, Slots(device))
                slots.reserve(sum(aligned(saved.ticket.size_bytes) for saved in alive))

    def _offload(self, tensor: Tensor, call: Call) -> Ticket | None:
        if not self.enable or self.arena is None or tensor in self._ignored:
            return None
        self._take_back()
        if not can_move(tensor) or call.device not in (None, tensor.device):
            self._keep(tensor.numel() * tensor.element_size())
            return None
        call.device = tensor.device
        known = self._known(tensor)
        if known is not None:
            self._counters.shared += 1
            return known
        layout = layout_of(tensor)
        allocation = self.arena.allocate(layout.size_bytes) if layout.size_bytes else None
        if allocation is None:
            self._keep(layout.size_bytes)
            self._warn_full(layout.size_bytes)
            return None
        host, release = allocation
        ticket = Ticket(host, layout, tensor.device, tensor._version)
        self._copy_out(ticket, tensor, call)
        self._count_moved(ticket, release)
        if call.times is not None:
            call.times.moved_bytes += ticket.size_bytes
        self._tickets[tensor] = weakref.ref(ticket)
        return ticket

    def _known(self, tensor: Tensor) -> Ticket | None:
        reference = self._tickets.get(tensor)
        ticket = None if reference is None else reference()
        # Changed in place since: another value, so another entry.
        return ticket if ticket is not None and ticket.version == tensor._version else None

    def _copy_out(self, ticket: Ticket, source: Tensor, call: Call) -> None:
        queues = self.queues(ticket.device)
        data = to_bytes(source, ticket.layout)
        queues.wait(Queue.OUT, queues.record(Queue.COMPUTE))
        _copy(queues, Queue.OUT, ticket.host, data, call.times)
        ticket.copied = queues.record(Queue.OUT)
        call.leaving.append(Leaving(ticket, source, data))

    def _wait_for_copies_out(self, call: Call) -> None:
        """Then the sources may be freed: no memory is used again under a running copy."""
        if call.leaving:
            last = call.leaving[-1].ticket
            queues = self.queues(last.device)
            queues.wait(Queue.COMPUTE, last.copied)  # and with it for all before it
        for leaving in call.leaving:
            leaving.ticket.copied = None

    def _take(self, saved: Saved) -> Tensor:
        call = saved.call
        fetched = call.fetched
        if fetched is None or saved.index not in fetched.pieces:
            # What one asks for again, or has saved since, is not in a fetch that others wait for.
            assert fetched is None or fetched.waited
            fetched = call.fetched = self._fetch(call.alive() or [saved], in_advance=False)
        assert fetched is not None
        self._wait_for_copies_in(fetched)
        memory = fetched.pieces.pop(saved.index)
        if not fetched.pieces:
            call.fetched = None
        return from_bytes(memory, saved.ticket.layout)

    def _wait_for_copies_in(self, fetched: Fetched) -> None:
        if not fetched.waited:
            self.queues(fetched.device).wait(Queue.COMPUTE, fetched.arrived)
            fetched.waited = True

    def _fetch(self, wanted: Sequence[Saved], *, in_advance: bool) -> Fetched | None:
        """Starts the copies in. In advance only where a slot is free: what is not needed yet may not cost memory."""
        if not wanted:
            return None
        device = wanted[0].ticket.device
        queues = self.queues(device)
        sizes = [aligned(saved.ticket.size_bytes) for saved in wanted]
        slots = self._slots.get(device)
        memory = None if slots is None else slots.take(sum(sizes))
        if memory is None:
            if in_advance:
                return None
            self._counters.overflows += slots is not None
            memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        # Whatever computed in this memory before has been given to the compute queue by now.
        queues.wait(Queue.IN, queues.record(Queue.COMPUTE))
        pieces = {}
        for saved, piece in zip(wanted, memory.split(sizes), strict=True):
            ticket = saved.ticket
            if ticket.copied is not None:
                queues.wait(Queue.IN, ticket.copied)
            pieces[saved.index] = piece[: ticket.size_bytes]
            _copy(queues, Queue.IN, pieces[saved.index], ticket.host, saved.call.times)
            self._counters.fetched += 1
            self._counters.fetched_bytes += ticket.size_bytes
        return Fetched(device, pieces, queues.record(Queue.IN))

    def _take_back(self) -> None:
        """Frees the bytes of the tickets that are gone, after what still copies from them."""
        with self._lock:
            returned = [self._returned.popleft() for _ in range(len(self._returned))]
            while self._ended:
                self._drop_unwanted(self._ended.popleft())
            for size_bytes, release in returned:
                release()
                self._counters.in_use_bytes -= size_bytes

    def _drop_unwanted(self, call: Call) -> None:
        """What was fetched for an aborted backward: its slot and its host bytes are free after the copy."""
        fetched = call.fetched
        if fetched is None:
            return
        dead = [index for index in fetched.pieces if call.saved[index]() is None]
        if dead:
            self._wait_for_copies_in(fetched)
        for index in dead:
            del fetched.pieces[index]
        if not fetched.pieces:
            call.fetched = None

    def _count_moved(self, ticket: Ticket, release: Callable[[], None]) -> None:
        counters = self._counters
        counters.moved += 1
        counters.moved_bytes += ticket.size_bytes
        counters.in_use_bytes += ticket.size_bytes
        counters.peak_bytes = max(counters.peak_bytes, counters.in_use_bytes)
        weakref.finalize(ticket, self._returned.append, (ticket.size_bytes, release))

    def _keep(self, size_bytes: int) -> None:
        self._counters.kept += 1
        self._counters.kept_bytes += size_bytes

    def _warn_full(self, size_bytes: int) -> None:
        if size_bytes and self.arena is not None:
            self._warn_once(
                "full",
                f"the offload arena ({self.arena.size_bytes} bytes) is full: {size_bytes} bytes stay on the device; "
                "nothing fails, but setup_arena() with more would free them",
            )

    def _is_inside_other_hooks(self, marked: Sequence[Tensor]) -> bool:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and marked and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
            name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
            self._warn_once(
                "hooks",
                f"nothing is offloaded inside of other saved-tensor hooks ({name}); leave them (save_on_cpu, for "
                "one) or set offload=0",
            )
        return hooks is not None

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", message)


def _copy(queues: Queues, queue: Queue, destination: Tensor, source: Tensor, times: CallTimes | None) -> None:
    if times is None:
        queues.copy(queue, destination, source)
    else:
        with times.measurement.copying(queue, source.numel()):
            queues.copy(queue, destination, source)


GLOBAL_ACTIVATION_MANAGER = ActivationManager()
