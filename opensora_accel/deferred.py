"""Models that are built without memory, and get their values later, shard by shard.

    with opensora_accel.deferred_init(seed=0):
        model = WanTransformer3DModel(**config)      # 14 B parameters, and no bytes yet
    opensora_accel.load_weights(model, folder)       # or leave it out: then the values are drawn
    shardformer.shard(model, plan)                   # every rank makes what it holds

Within the context every operation on floating-point tensors runs on the meta device and is noted down: what it
reads, which memory it writes, and whether it draws random numbers. Later the operations that led to one parameter are
run again, with memory, and the rank keeps its shard of the result. A Linear of 4 inputs and 2 outputs notes

    0    empty(2, 4)           → memory a
    1    uniform_(a, −½, ½)    writes a, draws
    2    empty(2)              → memory b
    3    uniform_(b, −½, ½)    writes b, draws

and its bias is made by running 2 and 3 alone. The draws of one operation are seeded by the name of the first
parameter that it leads to ("blocks.0.norm.weight", its first draw) and the seed of the context. So values do not depend
on the order in which they are made, on the number of ranks, or on the Plan, and whoever runs all of it on one device
has the same bits. At most one parameter is whole at a time, beside what leads to it.

What a constructor computes from whole numbers, `arange`, numpy or its own arguments has values at once, and so have
buffers. A constructor that looks at values which are drawn cannot be deferred, and is refused.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from opensora_accel.dtensors import is_dtensor
from opensora_accel.wrapping import refuse_old_parameters

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

ModelT = TypeVar("ModelT", bound=nn.Module)
_ATTRIBUTE = "_deferred"
_aten = torch.ops.aten
# Factories whose result may be a parameter. Those of known values, `arange` or `tensor`, make it at once.
_FACTORIES = {
    _aten.empty, _aten.empty_strided, _aten.zeros, _aten.ones, _aten.full,
    _aten.rand, _aten.randn, _aten.randint, _aten.randperm, _aten.normal,
}  # fmt: skip
# What may be a parameter; None is the default dtype.
_FLOATS = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Operations that look at values.
_READS = {_aten._local_scalar_dense, _aten.is_nonzero, _aten.equal, _aten.nonzero, _aten.masked_select}


@dataclass(frozen=True)
class _View:
    """A tensor of the meta device: which memory it shows, and how."""

    memory: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The same view [shape] of real memory."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.stride
        )


@dataclass
class _Operation:
    run: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    results: list[_View]
    draws: bool
    # Memory that it needs as it was before.
    reads: set[int]
    # Makes a part of its only result without the rest, where that can be had.
    part: Callable[[tuple[slice, ...]], Tensor] | None = None


@dataclass(eq=False)
class _Recording(TorchDispatchMode):
    """The operations of one `deferred_init`, in their order."""

    seed: int
    operations: list[_Operation] = field(default_factory=list)
    # For each memory, the operations that wrote it.
    writers: dict[int, list[int]] = field(default_factory=dict)
    # Keeps memory (of no bytes) alive, so that no other gets its key.
    alive: list[Tensor] = field(default_factory=list)
    modules: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        super().__init__()

    def __deepcopy__(self, _memo: Any) -> _Recording:
        return self

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is of this recording, and waits for its values."""
        return tensor.is_meta and not is_dtensor(tensor) and _memory(tensor) in self.writers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet, schema = func.overloadpacket, func._schema
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [tensor for tensor in tensors if self.knows(tensor)]
        draws, generator = torch.Tag.nondeterministic_seeded in func.tags, kwargs.get("generator")
        written = _written(schema, args, kwargs)
        if not known:
            # Nothing here waits for values. Only what may become a parameter is put off; all else is made at once.
            makes_floats = kwargs.get("dtype") in _FLOATS
            if generator is not None or (not draws and not (packet in _FACTORIES and makes_floats)):
                return func(*args, **kwargs)
            if draws and written:
                raise _refusal(f"it draws random numbers ({func}) into a tensor that has values already")
        if generator is not None:
            raise _refusal(
                f"it draws by a generator of its own ({func}) into a tensor that waits for its values"
            )
        # Who looks at values, or takes them into a tensor that has values, gets them, if nothing in them is drawn.
        if packet in _READS or any(not self.knows(tensor) for tensor in written):
            real = {id(tensor): tensor for tensor in tensors}
            for tensor in known:
                if any(self.operations[at].draws for at in self._needed([_memory(tensor)])):
                    raise _refusal(f"it looks at values that are drawn ({func})")
                real[id(tensor)] = self.values([_view(tensor)], {})[0]
            return func(*tree_map_only(Tensor, lambda t: real[id(t)], args), **kwargs)

        def to_meta(tensor: Tensor) -> Tensor:
            return tensor if tensor.is_meta else tensor.to("meta")

        # On the meta device torch finds shapes, strides and errors by itself, without memory.
        on_meta = tree_map_only(Tensor, to_meta, (args, kwargs))
        device = {"device": torch.device("meta")} if any(a.name == "device" for a in schema.arguments) else {}
        result = func(*on_meta[0], **on_meta[1] | device)

        def note(tensor: Tensor) -> Any:
            return _view(tensor) if self.knows(tensor) else tensor.detach().clone()

        noted_args, noted_kwargs = tree_map_only(Tensor, note, (args, kwargs))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        reads = {_memory(tensor) for tensor in known}
        writes = {_memory(tensor) for tensor in written} | ({_memory(tensor) for tensor in results} - reads)
        if writes:
            if device:
                # Values are made on the host, so that draws do not depend on the GPU that the model goes to.
                noted_kwargs["device"] = torch.device("cpu")
            part = self._cast_part(known[0], results[0].dtype) if packet is _aten._to_copy else None
            self._add(
                _Operation(func, noted_args, noted_kwargs, list(map(_view, results)), draws, reads, part),
                writes,
            )
        # A result that is dropped would free its memory's key for another one.
        self.alive += results
        return result

    def _cast_part(self, tensor: Tensor, dtype: torch.dtype) -> Callable[[tuple[slice, ...]], Tensor] | None:
        """Makes a part of `tensor` in another dtype, where a part of it can be had as it is now."""
        last = self.operations[self.writers[_memory(tensor)][-1]]
        part = last.part
        if part is None or last.results[0] != _view(tensor):
            return None
        return lambda region: part(region).to(dtype)

    def _add(self, operation: _Operation, writes: Iterable[int]) -> None:
        for memory in writes:
            self.writers.setdefault(memory, []).append(len(self.operations))
        self.operations.append(operation)

    def _needed(self, memories: Iterable[int]) -> list[int]:
        """The operations that lead to these memories, in their order."""
        needed: set[int] = set()
        # Memory as it was before operation number `end`.
        left = [(memory, len(self.operations)) for memory in memories]
        seen = set(left)
        # From what is wanted back to all that it was made of, each as it was at that time.
        while left:
            memory, end = left.pop()
            for at in self.writers.get(memory, ()):
                if at < end:
                    needed.add(at)
                    new = {(read, at) for read in self.operations[at].reads} - seen
                    seen |= new
                    left += new
        return sorted(needed)

    def seeds(self, named: Iterable[tuple[str, _View]]) -> dict[int, int]:
        """The seed of every operation that draws: from the first name that it leads to, and its place there."""
        seeds: dict[int, int] = {}
        for name, view in named:
            draws = [
                at for at in self._needed([view.memory]) if self.operations[at].draws and at not in seeds
            ]
            for number, at in enumerate(draws):
                digest = hashlib.sha256(f"{self.seed}/{name}/{number}".encode()).digest()
                seeds[at] = int.from_bytes(digest[:8], "little") >> 1
        return seeds

    @torch.no_grad()
    def values(self, views: Sequence[_View], seeds: dict[int, int]) -> list[Tensor]:
        """The tensors [shape of each view] on the host, made by running again what led to them."""
        storages: dict[int, torch.UntypedStorage] = {}
        for at in self._needed([view.memory for view in views]):
            operation = self.operations[at]

            def real(leaf: Any) -> Any:
                return leaf.of(storages[leaf.memory]) if isinstance(leaf, _View) else leaf

            args, kwargs = tree_map(real, (operation.args, operation.kwargs))
            # Every draw starts from its own seed, and leaves the generator of the process as it was.
            with torch.random.fork_rng(devices=[], enabled=operation.draws):
                if operation.draws:
                    # Values are drawn on the host; torch.manual_seed would set the generators of all GPUs too.
                    torch.default_generator.manual_seed(seeds[at])
                result = operation.run(*args, **kwargs)
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for view, tensor in zip(operation.results, made, strict=True):
                # The first operation that returns a memory has made it. Later ones return it again, changed in place.
                storages.setdefault(view.memory, tensor.untyped_storage())
        return [view.of(storages[view.memory]) for view in views]

    def replace(self, tensor: Tensor, part: Callable[[tuple[slice, ...]], Tensor]) -> Tensor:
        """What takes the place of `tensor` of the meta device: its values come from `part(region)`."""
        replacement = torch.empty_like(tensor, device="meta")
        self.alive.append(replacement)
        self._add(
            _Operation(part, ((),), {}, [_view(replacement)], False, set(), part), [_memory(replacement)]
        )
        return (
            nn.Parameter(replacement, tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else replacement
        )

    def refresh(self) -> None:
        """Notes on each module what is still to be made, and gives values to all else that is not drawn."""
        for module in list(self.modules):
            deferred = vars(module).setdefault(_ATTRIBUTE, {})
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None and self.knows(tensor):
                    deferred[name] = (self, _view(tensor))
            # Buffers and plain attributes without drawn values, such as a rotary table, are filled at once.
            for holder in (module._buffers, vars(module)):
                for name, tensor in list(holder.items()):
                    if isinstance(tensor, Tensor) and self.knows(tensor):
                        self._fill(module, holder, name, tensor)

    def _fill(self, module: nn.Module, holder: Any, name: str, tensor: Tensor) -> None:
        """Gives a tensor that a module holds its values; refuses drawn ones outside of buffers."""
        if not any(self.operations[at].draws for at in self._needed([_memory(tensor)])):
            holder[name] = self.values([_view(tensor)], {})[0]
            vars(module)[_ATTRIBUTE].pop(name, None)
        elif holder is not module._buffers and not _is_remade(module, name):
            raise _refusal(
                f"{type(module).__name__}.{name} holds drawn values, and is neither parameter nor buffer"
            )


def _is_remade(module: nn.Module, name: str) -> bool:
    """Whether every forward makes a module's tensor anew, before it is read, as torch's older weight norm does."""
    return any(
        isinstance(hook, WeightNorm) and hook.name == name for hook in module._forward_pre_hooks.values()
    )


def _memory(tensor: Tensor) -> int:
    """The key of the memory of a tensor."""
    return tensor.untyped_storage()._cdata


def _view(tensor: Tensor) -> _View:
    """How a tensor shows its memory."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return _View(_memory(tensor), shape, stride, int(tensor.storage_offset()), tensor.dtype)


def _written(schema: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator changes in place."""
    written = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return written


def _refusal(what: str) -> ValueError:
    return ValueError(f"this model cannot be built by deferred_init: {what}; build it without")


@contextmanager
def deferred_init(seed: int = 0) -> Iterator[None]:
    """Within it, models are built without memory; `shardformer.shard` or `materialize` gives them their values.

    Args:
        seed: of the values that are drawn. The generators of the process are not touched.

    Raises:
        ValueError: a constructor looks at values that are drawn.
    """
    recording = _Recording(seed)
    try:
        with _recording(recording):
            yield
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if "meta" in str(error) and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(
                "deferred_init builds on the meta device; a constructor that needs values cannot be deferred"
            )
        raise


@contextmanager
def _recording(recording: _Recording) -> Iterator[None]:
    def registered(module: nn.Module, _name: str, _tensor: Any) -> None:
        recording.modules.add(module)

    # These hooks see every module that gets a parameter or a buffer, also those that a library builds.
    handles = [
        register_module_parameter_registration_hook(registered),
        register_module_buffer_registration_hook(registered),
    ]
    try:
        with recording:
            yield
    finally:
        for handle in handles:
            handle.remove()
    recording.refresh()


@contextmanager
def resume_recording(model: nn.Module) -> Iterator[None]:
    """What is done to a deferred model's parameters within it, as cutting them, is done again with their values.

    Raises:
        ValueError: the model's parts come from several `deferred_init`.
    """
    recordings = {id(each): each for _, _, (each, _) in _deferred_tensors(model)}
    if not recordings:
        yield
        return
    if len(recordings) > 1:
        raise ValueError("the parts of this model were built in several deferred_init; build them in one")
    with _recording(*recordings.values()):
        yield


def is_deferred(model: nn.Module) -> bool:
    """Whether parameters or buffers of the model still wait for their values."""
    return any(True for _ in _deferred_tensors(model))


def _deferred_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[_Recording, _View]]]:
    for path, module in model.named_modules():
        for name, source in vars(module).get(_ATTRIBUTE, {}).items():
            yield f"{path}.{name}" if path else name, module, source


def _holder(module: nn.Module, key: str) -> Any:
    return module._parameters if key in module._parameters else module._buffers


@torch.no_grad()
def materialize(
    model: ModelT,
    device: torch.device | str | None = None,
    *,
    buffer_device: torch.device | str | None = None,
) -> ModelT:
    """The same model with its values: of each parameter the shard that this rank holds, whole where it is not sharded.

    `shardformer.shard` calls it. Parameters become other objects: build the optimizer afterwards. A tensor that got
    other values in the meantime keeps them.

    Args:
        device: of parameters and buffers; by default that of their mesh for shards, and the host for whole tensors.
        buffer_device: of the buffers, where it is another one: FSDP2 keeps parameters alone in host memory.

    Returns:
        The model. One that is not deferred is left alone.

    Communication: none; every rank makes what it holds.
    """
    deferred = list(_deferred_tensors(model))
    if not deferred:
        return model
    # All names are looked at before any value is made: the first that a draw leads to decides its seed.
    seeds = {
        id(recording): recording.seeds(
            (name, view) for name, _, (each, view) in deferred if each is recording
        )
        for recording in {id(each): each for _, _, (each, _) in deferred}.values()
    }
    made: dict[int, Tensor] = {}  # tied parameters stay one
    replaced = []
    for name, module, (recording, view) in deferred:
        key = name.rpartition(".")[2]
        holder = _holder(module, key)
        tensor = holder.get(key)
        if tensor is not None and tensor.is_meta:
            # By object: a parameter that two modules hold is made once and stays shared.
            if id(tensor) not in made:
                value = _shard_of(tensor, recording, view, seeds[id(recording)], device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
            holder[key] = made[id(tensor)]
            replaced.append(tensor)
    refuse_old_parameters(replaced, model)
    for _, module, _ in deferred:
        vars(module).pop(_ATTRIBUTE, None)
    # Buffers that nothing was drawn for, rotary tables say, were filled on the host when they were built.
    if (buffer_device := buffer_device or device) is not None:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not is_dtensor(buffer):
                    module._buffers[name] = buffer.to(buffer_device)
    return model


def _shard_of(
    tensor: Tensor,
    recording: _Recording,
    view: _View,
    seeds: dict[int, int],
    device: torch.device | str | None,
) -> Tensor:
    """What takes the place of a tensor of the meta device, of its shape, dtype and placements."""
    if view.shape != tensor.shape:
        raise ValueError(
            f"a tensor of {list(view.shape)} became one of {list(tensor.shape)} while it had no values; call "
            "opensora_accel.materialize(model) before what changes it"
        )
    if not is_dtensor(tensor):
        (whole,) = recording.values([view], seeds)
        return whole.to(device or "cpu", tensor.dtype)
    mesh = tensor.device_mesh
    region = region_of(tensor.shape, mesh, tensor.placements)
    last = recording.operations[recording.writers[view.memory][-1]]
    if any(part.start == part.stop for part in region):
        local = torch.empty([part.stop - part.start for part in region])  # this rank holds none of it
    # A file of weights can be read in part, and then no more of it than this region is.
    elif last.part is not None:
        local = last.part(region)
    else:
        local = recording.values([view], seeds)[0][region]
    # A copy, or the part would keep the whole alive.
    local = local.to(device or mesh.device_type, tensor.dtype, copy=True).contiguous()
    # Not by from_local, which moves it to the device of the mesh: shards that FSDP2 offloads stay on the host.
    return type(tensor)(local, tensor._spec, requires_grad=False)


def region_of(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement], rank: int | None = None
) -> tuple[slice, ...]:
    """The part of a sharded tensor of this whole shape that a rank of its mesh holds, by default this one."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    coordinate: list[int] = (mesh.mesh == (mesh.get_rank() if rank is None else rank)).nonzero()[0].tolist()
    local_shape, offsets = _compute_local_shape_and_global_offset(shape, mesh.shape, coordinate, placements)
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, local_shape, strict=True))


def replace_later(
    model: nn.Module, parts: Mapping[str, Callable[[torch.dtype, tuple[slice, ...]], Tensor]]
) -> None:
    """Gives parameters and buffers that wait for their values another source.

    Args:
        parts: by name, a function of a dtype and of the region that is wanted, () for all of it; it gives the values.
    """
    made: dict[int, Tensor] = {}  # tied parameters stay one
    for name, module, (recording, _) in list(_deferred_tensors(model)):
        if name not in parts:
            continue
        key = name.rpartition(".")[2]
        holder = _holder(module, key)
        tensor = holder[key]
        if id(tensor) not in made:
            made[id(tensor)] = recording.replace(tensor, partial(parts[name], tensor.dtype))
        holder[key] = made[id(tensor)]
        vars(module)[_ATTRIBUTE][key] = recording, _view(made[id(tensor)])


def deferred_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The whole shape of every parameter and buffer that waits for its values, by name."""
    return {name: view.shape for name, _, (_, view) in _deferred_tensors(model)}
