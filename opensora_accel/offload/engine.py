"""The offload engine: moves what checkpointed blocks start from to host memory, and has it back in time.

Four blocks over time, of which the last one stays on the device. Each line is a queue (a CUDA stream) or a slot; `out
i` and `in i` are the copies of block i's input:

    compute     forward 0 | forward 1 | forward 2 | forward 3 | backward 3 | backward 2 | backward 1 | backward 0
    copies out  out 0     | out 1     | out 2     |           |            |            |            |
    copies in             |           |           |           | in 2       | in 1       | in 0       |
    slot A                |           |           |           | 2 arrives  | 2 in use   | 0 arrives  | 0 in use
    slot B                |           |           |           |            | 1 arrives  | 1 in use   |

What waits for what, for block 1:

    out 1       waits for the compute queue as it was when block 1 began: its input is computed
    forward 2   waits for out 1: the input's memory may be used again only now
    in 1        waits for the compute queue as it was when backward 2 began: what used slot B before is done
    backward 1  waits for in 1, which mostly is done by then

A ticket is the only handle to what was moved. Its bytes are free when nothing refers to it any more, which autograd
decides: after backward, when a graph is dropped half-way, after an exception. So no order of microbatches is assumed,
and `retain_graph` may fetch a tensor twice.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from opensora_accel.offload.arena import Arena, aligned
from opensora_accel.offload.calls import Call, Kept, OffloadCounters, Saved, Ticket
from opensora_accel.offload.choose import Decision, Measurement
from opensora_accel.offload.device import Queue, Queues, Slots, queues_for
from opensora_accel.offload.host_memory import default_limit_bytes
from opensora_accel.offload.packing import TensorMeta, can_move, from_bytes, identity, to_bytes

logger = logging.getLogger(__name__)


class OffloadEngine:
    """Moves tensors to an arena in host memory and back. Models that share a device share its arena and slots.

    Args:
        make_queues: gives a device's queues, once for each device.
        memory_target_bytes: device memory that "auto" may fill; by default 90 % of the device's.
    """

    def __init__(
        self,
        make_queues: Callable[[torch.device], Queues] = queues_for,
        memory_target_bytes: int | None = None,
    ):
        self.enable = False
        self.arena: Arena | None = None
        self.memory_target_bytes = memory_target_bytes
        # What `offload="auto"` has chosen, newest last.
        self.decisions: list[Decision] = []
        self._make_queues = make_queues
        self._queues: dict[torch.device, Queues] = {}
        self._slots: dict[torch.device, Slots] = {}
        self._counters = OffloadCounters()
        self._last_call: weakref.ref[Call] | None = None
        self._tickets: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._ignored: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._warned: set[str] = set()
        self._num_users, self._closes_with_users = 0, False
        self._lock = threading.RLock()  # autograd has a thread for each device
        # Finalizers run between any two instructions. They only note here what `_take_back` then does.
        self._ended: deque[Call] = deque()
        self._returned: deque[tuple[int, Callable[[], None]]] = deque()

    # ---- set-up

    def setup_buffer(self, numel: int, dtype: torch.dtype) -> None:
        """Open-Sora's call: an arena of exactly `numel` elements of `dtype`; other dtypes may use it too."""
        self.setup_arena(numel * dtype.itemsize)

    def setup_arena(self, size_bytes: int | None = None, limit_bytes: int | None = None) -> None:
        """An arena of exactly `size_bytes`, or one that grows as it is used.

        It grows up to `limit_bytes`; by default to half of the host memory that is free now, shared by the ranks
        of this machine.

        Raises:
            ValueError: a negative size.
        """
        for name, value in (("size_bytes", size_bytes), ("limit_bytes", limit_bytes)):
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative; got {value}")
        if size_bytes is None and limit_bytes is None:
            limit_bytes = default_limit_bytes()
        # What an arena before this one holds can still be read: its tickets keep it alive.
        self.close()
        self.arena = Arena(size_bytes, limit_bytes, before_freeing=self._synchronize)
        self.enable, self._closes_with_users = True, False
        self._warned.clear()

    def join(self) -> None:
        """For a model whose blocks move: sets up an arena, if there is none. `leave` when they no longer do."""
        with self._lock:
            if not self.enable:
                self.setup_arena()
                self._closes_with_users = True
            self._num_users += 1

    def leave(self) -> None:
        """The last one closes the engine, unless its arena was set up by hand."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._closes_with_users:
                self.close()

    def close(self) -> None:
        """Stops moving, and lets slots and arena go as soon as the last ticket does."""
        self._take_back()
        with self._lock:
            self._synchronize()
            self.enable, self.arena = False, None
            self._slots.clear()

    def trim(self) -> None:
        """Gives back what nothing uses: the slots, and what an open arena has grown by. Both come again."""
        self._take_back()
        with self._lock:
            self._slots.clear()
            if self.arena is not None:
                self.arena.trim()

    @property
    def counters(self) -> OffloadCounters:
        self._take_back()
        return self._counters

    def reset_counters(self) -> None:
        """Counts anew; what is in use stays counted."""
        in_use = self.counters.in_use_bytes
        self._counters = OffloadCounters(in_use_bytes=in_use, peak_bytes=in_use)

    @property
    def slot_memory(self) -> list[Tensor]:
        """The slots of all devices, as uint8 tensors."""
        return [memory for slots in self._slots.values() for memory in slots.memory]

    @property
    def slot_bytes(self) -> int:
        """Device memory that the slots hold."""
        return sum(slots.size_bytes for slots in self._slots.values())

    def queues(self, device: torch.device) -> Queues:
        """The device's queues."""
        if device not in self._queues:
            self._queues[device] = self._make_queues(device)
        return self._queues[device]

    def is_open(self) -> bool:
        """Whether a call that begins now could move anything: nothing moves inside of other saved-tensor hooks."""
        return self.enable and torch._C._autograd._top_saved_tensors_default_hooks(False) is None

    def add_ignore_tensor(self, tensor: Tensor) -> None:
        """Never moves this tensor: it stays alive on the device anyhow."""
        self._ignored[tensor] = True

    # ---- single tensors

    def offload(self, tensor: Tensor) -> Ticket | None:
        """A copy on the host of a tensor, which compute waits for; None where it stays on the device."""
        with self._lock:
            call = Call()
            ticket = self._offload(tensor, call)
            self._wait_for_copies_out(call)
            return ticket

    def onload(self, ticket: Ticket) -> Tensor:
        """The tensor as it was when it was moved, strides included. May be called again."""
        with self._lock:
            return self._take(Saved(ticket, Call(device=ticket.device), 0))

    # ---- checkpointed calls

    @contextlib.contextmanager
    def call(self, marked: Sequence[Tensor] = (), measurement: Measurement | None = None) -> Iterator[Call]:
        """One checkpointed call: within it, what autograd saves of the marked tensors goes through the arena.

        Everything else is saved as always. So is all of it inside of another checkpoint, which recomputes it.

        Args:
            marked: tensors of one device; those of another stay.
            measurement: times the call.

        Raises:
            RuntimeError: the block changed a marked tensor in place.
        """
        if not self.is_open():
            self._warn_of_other_hooks(marked)
            yield Call()
            return
        with self._lock:
            block = 0 if measurement is None else measurement.next_block
            call = Call(self._last_call, is_open=True, measurement=measurement, block=block)
            call.note("forward")
            # Backward comes to the calls in reverse, so each knows the one before it. Only weakly: a graph
            # that is dropped takes its calls along.
            self._last_call = weakref.ref(call)
        # Autograd may give `pack` another Python object of a marked tensor; memory, shape and strides identify it.
        by_identity = {identity(tensor): tensor for tensor in marked}

        def pack(tensor: Tensor) -> Saved | Kept:
            """What autograd keeps of a tensor that it saves."""
            key = identity(tensor)
            saved = self.save(by_identity[key], call) if key in by_identity else None
            return saved or Kept(tensor, tensor._version)

        def unpack(packed: Saved | Kept) -> Tensor:
            return self.load(packed) if isinstance(packed, Saved) else packed.tensor_unchanged()

        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(pack, unpack) if marked else contextlib.nullcontext()
            ):
                yield call
            for ticket, source, _ in call.leaving:
                if source._version != ticket.version:  # the copy may hold either value
                    raise RuntimeError(
                        f"a checkpointed block changed a tensor of shape {list(source.shape)} in place that its "
                        "recomputation starts from; let it work on a copy (hidden = hidden + x, not hidden += x)"
                    )
        finally:
            by_identity.clear()  # autograd keeps `pack`, and with it all that it refers to, as long as the graph
            self._end(call)

    def save(self, tensor: Tensor, call: Call) -> Saved | None:
        """Starts the copy out of a tensor that an open call must find again; None where it stays."""
        with self._lock:
            ticket = self._offload(tensor, call) if call.is_open else None
            if ticket is None:
                return None
            saved = Saved(ticket, call, len(call.saved))
            call.saved.append(weakref.ref(saved))
            # `append` of a deque takes no lock, and a finalizer may run in the middle of any other method.
            weakref.finalize(saved, self._ended.append, call)
            return saved

    def keep(self, marked: Sequence[Tensor], why: str) -> None:
        """Counts tensors that were marked and stay on the device, and warns of it once."""
        for tensor in marked if self.enable else ():
            self._keep(tensor.nbytes)
            self._warn_once(why, f"a block's input stays on the device: {why}")

    def begin_backward(self, call: Call) -> None:
        """The call's recomputation starts: what backward needs after it is fetched meanwhile."""
        with self._lock:
            call.note("load")
            call.note("backward")
            self._take_back()
            previous = call.previous() if call.previous is not None else None
            # Nothing to fetch where the graph of that call is gone, or where it was fetched before.
            if previous is not None and not previous.fetched:
                self._counters.prefetched += self._fetch(previous, previous.alive(), in_advance=True)

    def load(self, saved: Saved) -> Tensor:
        """The tensor, in a slot. Compute waits for its copy in, which mostly is under way or done."""
        with self._lock:
            saved.call.note("load")
            return self._take(saved)

    # ---- how it is done

    def _offload(self, tensor: Tensor, call: Call) -> Ticket | None:
        """The ticket of a tensor: a new one, or that of an earlier move; None where it stays on the device."""
        if not self.enable or self.arena is None or tensor in self._ignored:
            return None
        self._take_back()
        # One fetch brings all of a call back, so it has one device.
        if not can_move(tensor) or call.device not in (None, tensor.device):
            self._keep(tensor.numel() * tensor.element_size())
            return None
        call.device = tensor.device
        # A tensor that every block is given, as the timestep is, moves once. Only autograd keeps its ticket alive.
        reference = self._tickets.get(tensor)
        known = None if reference is None else reference()
        # Changed in place since: another value, so another entry.
        if known is not None and known.version == tensor._version:
            self._counters.shared += 1
            return known
        meta = TensorMeta.of(tensor)
        size_bytes = meta.size_bytes
        allocation = self.arena.allocate(size_bytes) if size_bytes else None
        if allocation is None:
            if size_bytes:
                self._warn_once(
                    "full",
                    f"the offload arena ({self.arena.size_bytes} bytes) is full: {size_bytes} bytes stay on the "
                    "device; nothing fails, but setup_arena() with more would free them",
                )
            self._keep(size_bytes)
            return None
        host, release = allocation
        ticket = Ticket(host, meta, tensor.device, tensor._version)
        self._tickets[tensor] = weakref.ref(ticket)
        weakref.finalize(ticket, self._returned.append, (size_bytes, release))
        counters = self._counters
        counters.moved += 1
        counters.moved_bytes += size_bytes
        counters.in_use_bytes += size_bytes
        counters.peak_bytes = max(counters.peak_bytes, counters.in_use_bytes)
        if call.measurement is not None:
            call.measurement.moved_bytes[call.block] += size_bytes
        # Before the event below is recorded: a tensor with gaps is copied together on the compute queue.
        queues, data = self.queues(tensor.device), to_bytes(tensor, meta)
        # The block before has given the tensor's computation to the compute queue: the copy runs after that.
        queues.wait(Queue.OUT, queues.record(Queue.COMPUTE))
        _copy(queues, Queue.OUT, host, data, call.measurement)
        ticket.copied = queues.record(Queue.OUT)
        # Held until compute has waited for the copy: freed before, the memory would be used again under it.
        call.leaving.append((ticket, tensor, data))
        return ticket

    def _end(self, call: Call) -> None:
        # The forward is through: its inputs may go, and backward finds slots that are large enough.
        with self._lock:
            call.is_open = False
            call.note("forward end")
            self._wait_for_copies_out(call)
            alive = call.alive()
            if alive:
                device = alive[0].ticket.device
                slots = self._slots.setdefault(device, Slots(device))
                slots.reserve(sum(aligned(saved.ticket.meta.size_bytes) for saved in alive))

    def _wait_for_copies_out(self, call: Call) -> None:
        # After it the sources may be freed: no memory is used again under a running copy.
        if call.leaving:
            last = call.leaving[-1][0]
            self.queues(last.device).wait(Queue.COMPUTE, last.copied)  # and with it for all before it
        for ticket, _, _ in call.leaving:
            ticket.copied = None
        call.leaving.clear()

    def _fetch(self, call: Call, wanted: Sequence[Saved], *, in_advance: bool) -> bool:
        # In advance only where a slot is free: what is not needed yet may not cost memory.
        if not wanted:
            return False
        device = wanted[0].ticket.device
        queues, slots = self.queues(device), self._slots.get(device)
        # All that the call moved shares one slot, each tensor at an aligned place.
        sizes = [aligned(saved.ticket.meta.size_bytes) for saved in wanted]
        memory = None if slots is None else slots.take(sum(sizes))
        if memory is None:
            if in_advance:
                return False
            # It is needed now and no slot is free, as with two graphs at once: it gets memory of its own.
            self._counters.overflows += slots is not None
            memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        # Whatever computed in this memory before has been given to the compute queue by now.
        queues.wait(Queue.IN, queues.record(Queue.COMPUTE))
        call.fetched = {}
        for saved, piece in zip(wanted, memory.split(sizes), strict=True):
            ticket = saved.ticket
            if ticket.copied is not None:  # asked back before its call has ended
                queues.wait(Queue.IN, ticket.copied)
            # Pieces begin at aligned places, so a piece may be longer than its tensor.
            call.fetched[saved.index] = piece[: ticket.meta.size_bytes]
            _copy(queues, Queue.IN, call.fetched[saved.index], ticket.host, saved.call.measurement)
            self._counters.fetched += 1
            self._counters.fetched_bytes += ticket.meta.size_bytes
        call.arrived = queues.record(Queue.IN)
        return True

    def _take(self, saved: Saved) -> Tensor:
        call = saved.call
        if saved.index not in call.fetched:
            # What is asked for again, or was saved since, is not in a fetch that others wait for.
            assert call.arrived is None
            self._fetch(call, call.alive() or [saved], in_advance=False)
        self._wait_for_copies_in(call)
        return from_bytes(call.fetched.pop(saved.index), saved.ticket.meta)

    def _wait_for_copies_in(self, call: Call) -> None:
        if call.arrived is not None:
            assert call.device is not None
            self.queues(call.device).wait(Queue.COMPUTE, call.arrived)
            call.arrived = None

    def _take_back(self) -> None:
        # Frees the bytes of the tickets that are gone, after what still copies from them.
        with self._lock:
            # Read first: of every ticket in it, the calls that ended are in `_ended` by now.
            returned = [self._returned.popleft() for _ in range(len(self._returned))]
            while self._ended:
                # What was fetched for a backward that was aborted: slot and host bytes are free after the copy.
                call = self._ended.popleft()
                dead = [index for index in call.fetched if call.saved[index]() is None]
                if dead:
                    self._wait_for_copies_in(call)
                for index in dead:
                    del call.fetched[index]
            for size_bytes, release in returned:
                release()
                self._counters.in_use_bytes -= size_bytes

    def _synchronize(self) -> None:
        # The host takes memory back at once, under a copy or not.
        for queues in self._queues.values():
            queues.synchronize()

    def _keep(self, size_bytes: int) -> None:
        self._counters.kept += 1
        self._counters.kept_bytes += size_bytes

    def _warn_of_other_hooks(self, marked: Sequence[Tensor]) -> None:
        """Warns once where marked tensors stay because of other hooks."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if not self.enable or hooks is None or not marked:
            return
        # Another checkpoint recomputes all of this anyhow; every other hook keeps something that could have moved.
        if getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
            name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
            self._warn_once(
                "hooks",
                f"nothing is offloaded inside of other saved-tensor hooks ({name}); leave them (save_on_cpu, for "
                "one) or set offload=0",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", message)


def _copy(
    queues: Queues, queue: Queue, destination: Tensor, source: Tensor, measured: Measurement | None
) -> None:
    """Starts to copy uint8 [N] on a queue, timed where a measurement runs."""
    with contextlib.nullcontext() if measured is None else measured.copying(queue, source.numel()):
        queues.copy(queue, destination, source)
