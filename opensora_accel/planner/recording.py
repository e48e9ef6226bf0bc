"""Records a rank's step operator by operator: what each is bound by, what it waits for, and which storages live.

Works on tensors without values and on real ones. Of a block whose MLP has a hidden layer h, with Ulysses over 2 ranks:

    number   operation     stream     after   live bytes change by
    7        addmm         compute            + h
    8        gelu          compute            + gelu(h), − h where nobody keeps it
    9        all-to-all    exchange   8       + what arrives
    10       attention     compute    9

An operation waits for what other streams do in three cases: it reads what a collective fills; a collective that its
caller waits for at once has been started; or a copy of the offload engine stands between, whose queues say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from opensora_accel.arguments import tensors_in
from opensora_accel.observe import (
    BACKWARD,
    ELSEWHERE,
    NAMESPACES,
    OUTSIDE,
    DeviceBytes,
    FlopCounter,
    MeshShape,
    Owners,
    Place,
    Places,
    SharedAttention,
    arena_memory,
    calls_of,
    find_call_site,
    follow_modules,
    group_of,
)
from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER, Queue, Queues
from opensora_accel.planner.operators import (
    COPY_IN,
    filled_by,
    is_waited_for,
    kernel_of,
    name_of,
    reads_and_writes,
    shard_bytes,
    starts_kernel,
    stream_of,
    traffic,
    workspace_bytes,
)
from opensora_accel.planner.trace import Operation, Phase, Stream
from opensora_accel.wrapping import replaced
from shardformer.policy import find_policy, has_policy


@dataclass(frozen=True)
class Change:
    """Live bytes change while operation number `operation` runs, or after it and before the next one."""

    operation: int
    storage: int
    size_bytes: int


@dataclass(frozen=True)
class Mark:
    """Where an operation stands in the step, by names of blocks."""

    phase: Phase
    # In which block the step is; "" outside of all.
    block: str
    # For an operation outside of the blocks the one block whose tensors it works on, and its bytes by block where it
    # works on several (those outside of the blocks are "").
    owner: str = ""
    parts: dict[str, int] | None = None


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient is complete after operation number `operation`."""

    operation: int
    block: str
    size_bytes: int


@dataclass(eq=False)
class Storage:
    """One storage: whose it is, and in which place of the step it was made."""

    kind: str
    # Name of the block that it belongs to; "" while nobody is known to hold it.
    block: str = ""
    is_owned: bool = False
    # A parameter that the step does not train.
    is_frozen: bool = False
    # FSDP2 has made it while it reduced gradients: this rank's shards of them.
    is_reduced: bool = False
    # The class of the operator that made it.
    made_by: str = "made before"


class StepRecorder(DeviceBytes):
    """Within it live bytes are counted; while `recording`, each kernel, collective and copy is an `Operation`.

    Args:
        shape: of the mesh, by which groups are named.
    """

    sees_parts = True

    def __init__(self, shape: MeshShape):
        super().__init__()
        self._copies_shards = shape.plan is not None and shape.plan.cpu_offload
        FlopCounter()  # registers the formulas of this package's operators
        self.operations: list[Operation] = []
        # One for each operation.
        self.marks: list[Mark] = []
        self.changes: list[Change] = []
        # Bytes of block inputs on the host change after an operation.
        self.host_changes: list[tuple[int, int]] = []
        self.storages: list[Storage] = []
        self.groups: dict[tuple[int, ...], None] = {}
        # Storages that live when the recording begins, and their bytes.
        self.at_start: dict[int, int] = {}
        # In the order in which they were complete.
        self.gradients: list[Gradient] = []
        self._with_gradient: set[int] = set()
        # All-reduces of DDP's buckets, and the operations that copy averaged gradients out of them.
        self.buckets: list[int] = []
        self.unpackings: list[int] = []
        self._shape = shape
        # Attention by slices, if there is any: of the step's, the one with the most pairs.
        self.attention: SharedAttention | None = None
        self._places: Places | None = None
        self._owners: Owners | None = None
        # Modules that the step is in, the innermost last: region, path and phase.
        self._modules: list[tuple[str, str, str]] = []
        self._index_of: dict[str, int] = {}
        self._serials: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self._pending: dict[str, set[int]] = {}
        self._last: dict[str, int] = {}
        # For each two streams the operation of the second that the first has waited for.
        self._waited: dict[tuple[str, str], int] = {}
        self._has_backward = self._is_hidden = self._is_reducing = False
        # Parameters that FSDP2's hooks have gone through since the last operation.
        self._hooked = 0
        self._kernel_stream: Stream = "compute"
        self._last_reduce: int | None = None
        self._bucket_memory: set[int] = set()
        self._reduced_bytes = 0
        self._host_bytes = 0

    # ---- what is recorded, and when

    @contextmanager
    def recording(self, places: Places, owners: Owners, blocks: Sequence[str]) -> Iterator[None]:
        """Within it operations are recorded; `places` calls `moved` where the step comes to another one."""
        self._owners = owners
        for memory in arena_memory():  # on the host, and known for that only once it is there
            self.ignore(memory)
        self.look_up()
        self._places = places
        self._index_of = {name: index for index, name in enumerate(blocks)}
        self.look_up()
        self.at_start = {self._serials[address]: size for address, size in self._sizes.items() if size}
        self._host_bytes = _bytes_on_host()
        with ExitStack() as entered:
            policy = find_policy(owners.model) if has_policy(owners.model) else None
            entered.enter_context(follow_modules(owners.model, policy, self._begin_module, self._end_module))
            group = _fsdp_param_group.FSDPParamGroup
            entered.enter_context(replaced(group, "post_backward", self._post_backward()))
            for name in ("pre_forward", "pre_backward"):
                entered.enter_context(replaced(group, name, self._counting(getattr(group, name))))
            for name, parameter in owners.model.named_parameters():
                block = next((each for each in blocks if name.startswith(f"{each}.")), "")
                if parameter.requires_grad and not isinstance(parameter, DTensor):
                    hook = parameter.register_post_accumulate_grad_hook(
                        partial(self._gradient_is_there, block)
                    )
                    entered.callback(hook.remove)
            yield
        self.look_up()
        self._places = None

    @property
    def is_recording(self) -> bool:
        return self._places is not None and not self._is_hidden

    def moved(self, _before: Place, _now: Place) -> None:
        """The step is at another place: whose the storages are is looked up."""
        if self._places is not None:
            self.look_up()

    def _begin_module(self, region: str, path: str, phase: str) -> None:
        module = region, path, phase
        if module not in self._modules:
            if region == "block" and phase == BACKWARD:
                # A recomputation that stopped early has ended nothing.
                self._modules.clear()
            self._modules.append(module)

    def _end_module(self, region: str, path: str, phase: str) -> None:
        module = region, path, phase
        if module in self._modules:
            del self._modules[self._modules.index(module) :]

    def look_up(self) -> None:
        """Tells of every live storage that has an owner whose it is; the first answer counts for all of its life."""
        assert self._owners is not None
        for address, owned in self._owners.by_address().items():
            serial = self._serials.get(address)
            if serial is None or self.storages[serial].is_owned:
                continue
            storage = self.storages[serial]
            block = "" if owned.owner.block == ELSEWHERE else owned.owner.block
            storage.kind, storage.block, storage.is_owned = owned.owner.kind, block, True
            storage.is_frozen = owned.owner.is_frozen
        if self._places is not None:
            self._note_host()

    def queues(self, _device: torch.device) -> Queues:
        """What an offload engine runs its copies on: they are recorded, and so is what waits for what."""
        return _RecordedQueues(self)

    # ---- operators

    def inside(self, func: Any, args: Any, kwargs: Any) -> None:
        """Notes who has what of attention by slices, which then is seen as its tiles and messages."""
        found = SharedAttention.of(func, args, kwargs)
        if found and (self.attention is None or found.deal.mask.area > self.attention.deal.mask.area):
            self.attention = found

    def after(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Appends what the operator has started, and counts what it has made."""
        if self.is_recording:
            if func.namespace in NAMESPACES:
                self._add_calls(func, args, kwargs, outputs)
            else:
                self._add_kernel(func, args, kwargs, outputs)
        for tensor in tensors_in(outputs):
            self._count(tensor.untyped_storage())
        if size_bytes := workspace_bytes(func, args):
            self._count(torch.empty(size_bytes, dtype=torch.uint8).untyped_storage())

    def add(self, operation: Operation, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> int:
        """Appends an operation with what it waits for and where it stands; its number."""
        number, stream = len(self.operations), operation.stream
        after = self._pending.pop(stream, set())
        for tensor in (*reads, *writes):
            writer = self._writers.get(_address(tensor))
            if writer is not None and self.operations[writer].stream != stream:
                after.add(writer)
        if operation.kind == "collective" and "compute" in self._last:
            # The library's stream waits for all that was given to the stream of its caller.
            after.add(self._last["compute"])
        mark = self._where()
        # Who waits for the last operation of a stream waits for those before it, and nobody waits twice.
        latest = {self.operations[each].stream: each for each in sorted(after)}
        latest.pop(stream, None)
        new = {other: each for other, each in latest.items() if each > self._waited.get((stream, other), -1)}
        self._waited |= {(stream, other): each for other, each in new.items()}
        waits = tuple(sorted(new.values()))
        outside = mark.block == "" and mark.phase in ("backward", "optimizer")
        if outside and operation.kind not in ("collective", "copy_out", "copy_in"):
            mark = self._with_owner(mark, (*reads, *writes))
        block = self._index_of.get(mark.block or mark.owner)
        self.marks.append(mark)
        # What is sent may be ready in one module, and be started in another one.
        is_kernel = operation.kind in ("gemm", "attention", "memory") and mark.phase != "optimizer"
        region = self._modules[-1][0] if self._modules and is_kernel else ""
        self.operations.append(
            replace(operation, after=waits, phase=mark.phase, block=block, region=region, hooked=self._hooked)
        )
        self._hooked = 0
        self._last[stream] = number
        for tensor in writes:
            address = _address(tensor)
            if operation.kind in ("collective", "copy_in") or stream != "compute":
                self._writers[address] = number
            else:
                self._writers.pop(address, None)
        return number

    def wait(self, stream: str, operation: int | None) -> None:
        """The next operation on a stream starts when this one has ended."""
        if operation is not None:
            self._pending.setdefault(stream, set()).add(operation)

    def last_on(self, stream: str) -> int | None:
        return self._last.get(stream)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Within it nothing is recorded, and live bytes are counted all the same."""
        before, self._is_hidden = self._is_hidden, True
        try:
            yield
        finally:
            self._is_hidden = before

    def _where(self) -> Mark:
        assert self._places is not None
        place = self._places.now
        if torch._C._current_graph_task_id() != -1:
            self._has_backward = True
        block = place.block if place.block in self._index_of else ""
        if place.phase in ("forward", "recompute", "backward"):
            return Mark(place.phase, block)  # type: ignore[arg-type]
        return Mark("optimizer" if self._has_backward else "forward", block)

    def _with_owner(self, mark: Mark, tensors: Sequence[Tensor]) -> Mark:
        """Whose tensors an operation works on, as the optimizer's do: one block's, or those of several."""
        parts: dict[str, int] = {}
        is_of_model = False
        for tensor in tensors:
            serial = self._serials.get(_address(tensor))
            if serial is not None:
                storage = self.storages[serial]
                is_of_model |= storage.is_owned and not storage.block
                parts[storage.block] = parts.get(storage.block, 0) + traffic(tensor)
        named = [block for block in parts if block]
        if len(named) == 1 and not is_of_model:
            return replace(mark, owner=named[0])
        return replace(mark, parts=parts) if named else mark

    def _add_kernel(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        if not starts_kernel(func):
            return
        reads, writes = reads_and_writes(func, args, kwargs, outputs)
        tensors = (*reads, *writes)
        # On fake tensors whole numbers are real, and on the host: counts of tokens, positions.
        on_host = all(type(tensor) is Tensor and not tensor.is_floating_point() for tensor in tensors)
        if (on_host and _is_fake()) or not any(tensor.numel() for tensor in tensors):
            return
        if self._copies_shards and name_of(func) == COPY_IN:
            copy = Operation("copy in", "copy_in", "copy_in", num_bytes=shard_bytes(args))
            self.wait("compute", self.add(copy))
        operation = kernel_of(func, args, kwargs, outputs, reads, writes)
        number = self.add(replace(operation, stream=self._kernel_stream), reads, writes)
        if any(_address(tensor) in self._bucket_memory for tensor in reads):
            self.unpackings.append(number)

    def _add_calls(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        caller, filled = find_call_site().via, filled_by(func, args, kwargs, outputs)
        number: int | None = None
        for call, tensors in calls_of(func, args, kwargs):
            if call.kind == "barrier":
                continue
            self.groups[call.group] = None
            for tensor in (*tensors, *filled):
                self._belongs_to_communication(tensor)
            last = self.operations[-1] if self.operations else None
            if call.kind == "recv" and last and last.collective == "send":
                # The other end of what the neighbours send at the same time.
                self.operations[-1] = replace(last, received_bytes=max(last.received_bytes, call.input_bytes))
                self._writers[_address(tensors[0])] = len(self.operations) - 1
                continue
            operation = Operation(
                call.kind,
                "collective",
                stream_of(call, caller),
                num_bytes=call.sent_bytes,
                received_bytes=call.input_bytes if call.kind == "recv" else 0,
                dtype=call.dtype,
                collective=call.kind,
                group=call.group,
                axis=str(group_of(call.group, self._shape)),
                peer=call.peer,
            )
            received = tensors if call.kind == "recv" else ()
            number = self.add(operation, tensors, received if call.is_point_to_point else filled)
            if self._is_reducing:
                self._kernel_stream = "reduce"
                shares = len(call.group) if call.kind == "reduce-scatter" else 0
                self._reduced_bytes += call.input_bytes // shares if shares else 0
            if caller.startswith("DDP") and call.kind == "all-reduce" and call.carries_numbers:
                self.buckets.append(number)
                self._bucket_memory |= {_address(tensor) for tensor in tensors}
        if (
            number is not None
            and self.operations[number].stream == "exchange"
            and is_waited_for(func, args, kwargs)
        ):
            self.wait("compute", number)

    # ---- gradients

    def _gradient_is_there(self, block: str, parameter: Tensor) -> None:
        """Notes that the gradient of a parameter is complete."""
        assert parameter.grad is not None
        if id(parameter) in self._with_gradient:
            # In a step with several passes the last one counts: before it nothing is averaged.
            self.gradients.clear()
            self._with_gradient.clear()
        self._with_gradient.add(id(parameter))
        self.gradients.append(Gradient(len(self.operations) - 1, block, parameter.grad.nbytes))

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A hook of FSDP2 that says how many parameters it goes through."""

        def hook(group: Any, *given: Any, **named: Any) -> Any:
            if self.is_recording:
                self._hooked += len(group.fsdp_params)
            return original(group, *given, **named)

        return hook

    def _post_backward(self) -> Callable[..., None]:
        original = self._counting(_fsdp_param_group.FSDPParamGroup.post_backward)

        def post_backward(group: Any, *unused: Any) -> None:
            # Among several groups of a module's parameters the last comes first, and compute waits there until what was
            # reduced before is through: its memory is used again.
            if getattr(group, "_param_group_index", 0) == getattr(group, "_num_param_groups", 1) - 1:
                self.wait("compute", self._last_reduce)
                self._last_reduce = None
            # What follows the first collective runs on its stream.
            self._is_reducing = True
            try:
                original(group, *unused)
            finally:
                self._is_reducing, self._kernel_stream = False, "compute"
                self._last_reduce = self._last.get("reduce")
                if self._copies_shards and self._reduced_bytes and self.is_recording:
                    self.wait("copy_out", self._last_reduce)
                    self.add(Operation("copy out", "copy_out", "copy_out", num_bytes=self._reduced_bytes))
                self._reduced_bytes = 0

        return post_backward

    # ---- memory

    def _belongs_to_communication(self, tensor: Tensor) -> None:
        serial = self._serials.get(_address(tensor))
        if serial is not None and self.storages[serial].kind == "other":
            self.storages[serial].kind = "communication"

    def is_made(self, address: int, kind: str, size_bytes: int) -> None:
        """What an operation on one block's tensors makes, as the optimizer does, is that block's too."""
        self._serials[address] = len(self.storages)
        owner = self.marks[-1].owner if self._places is not None and self.marks else ""
        storage = Storage(kind, owner, is_reduced=self._is_reducing)
        if self.is_recording and self.operations:
            storage.made_by = self.operations[-1].operator_class
        self.storages.append(storage)

    def _place(self) -> Place:
        return OUTSIDE if self._places is None else self._places.now

    def _forget(self, address: int) -> None:
        super()._forget(address)
        self._serials.pop(address, None)
        self._writers.pop(address, None)

    def _set(self, address: int, size_bytes: int) -> None:
        change = size_bytes - self._sizes.get(address, 0)
        if change and self._places is not None:
            self.changes.append(Change(len(self.operations) - 1, self._serials[address], change))
        super()._set(address, size_bytes)

    def _note_host(self) -> None:
        now_bytes = _bytes_on_host()
        if now_bytes != self._host_bytes:
            self.host_changes.append((len(self.operations) - 1, now_bytes - self._host_bytes))
            self._host_bytes = now_bytes


_STREAM_OF: dict[Queue, Stream] = {Queue.COMPUTE: "compute", Queue.OUT: "copy_out", Queue.IN: "copy_in"}


class _RecordedQueues(Queues):
    """The queues of an offload engine, as streams of a recorded step. An event is the number of an operation."""

    overlaps = True

    def __init__(self, recorder: StepRecorder):
        self._recorder = recorder

    def copy(self, queue: Queue, destination: Tensor, source: Tensor) -> None:
        """Starts copying N bytes, uint8 [N]."""
        name = "copy_out" if queue is Queue.OUT else "copy_in"
        if self._recorder.is_recording:
            operation = Operation(name.replace("_", " "), name, name, num_bytes=source.nbytes)  # type: ignore[arg-type]
            self._recorder.add(operation)
        with self._recorder.hidden():
            destination.copy_(source)

    def record(self, queue: Queue) -> int | None:
        return self._recorder.last_on(_STREAM_OF[queue]) if self._recorder.is_recording else None

    def wait(self, queue: Queue, event: int | None) -> None:
        if self._recorder.is_recording:
            self._recorder.wait(_STREAM_OF[queue], event)


def _bytes_on_host() -> int:
    """Block inputs that wait there. The engine's own count, for which it takes back what is not needed any more."""
    return GLOBAL_ACTIVATION_MANAGER.engine.counters.in_use_bytes


def _address(tensor: Tensor) -> int:
    """The key of the storage of a tensor."""
    return tensor.untyped_storage()._cdata


def _is_fake() -> bool:
    return type(torch.empty(0, device="cpu")) is not Tensor
