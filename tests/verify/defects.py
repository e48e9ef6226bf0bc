"""Defects that a step is given at run time, and what the verifier should call each.

A defect is put in where communication happens, so that no refactoring of the code under test moves it:

- `Collective`: within the step, one kind of collective does something else. It is dropped, scaled, sent in another
  order or over another group, in forward or in backward. Calls are seen by torch's dispatcher, whichever function
  of torch.distributed they come through.
- `Patch`: a public function is wrapped. Every reference to it meets the wrapper, because the code of the function is
  exchanged and not the name in one module.
- Neither, where the step itself is wrong: a small step file, such as a ring written by hand.

The single device runs without the defect.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_accel.observe.meshes import Run
from opensora_accel.parallel_states import get_parallel_group
from opensora_accel.verify.beside_one_device import Dtype, verify
from opensora_accel.verify.causes import Cause
from opensora_accel.verify.pool import RankPool
from opensora_accel.verify.report import Report
from opensora_accel.verify.results import Reference
from tests.verify.meshes import Meshes

_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd
_OPERATORS = {
    "all-reduce": ("allreduce_", "all_reduce", "all_reduce_"),
    "all-gather": ("_allgather_base_", "allgather_", "all_gather_into_tensor"),
    "reduce-scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor"),
    "all-to-all": ("alltoall_base_", "alltoall_", "all_to_all_single"),
    "message": ("send", "recv_"),
}
_KIND_OF = {name: kind for kind, names in _OPERATORS.items() for name in names}

FACTORS: dict[str, Callable[[int], float]] = {
    "1": lambda num_ranks: 1.0,
    "2": lambda num_ranks: 2.0,
    "1/2": lambda num_ranks: 0.5,
    "P": lambda num_ranks: float(num_ranks),
    "P²": lambda num_ranks: float(num_ranks**2),
    "P-1": lambda num_ranks: num_ranks - 1.0,
    "1/P": lambda num_ranks: 1 / num_ranks,
    "1/P²": lambda num_ranks: 1 / num_ranks**2,
    "1/(P-1)": lambda num_ranks: 1 / (num_ranks - 1),
}
"""By name, as functions cannot be sent to other processes without one."""


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Call:
    """One collective of the step, before it runs."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]):
        names = [argument.name for argument in func._schema.arguments]
        self.values = dict(zip(names, args, strict=False)) | kwargs
        self.kind = _KIND_OF.get(func._schema.name.split("::")[1])
        self.result: Any = None
        self._func = func

    @property
    def group(self) -> dist.ProcessGroup:
        given = self.values.get("process_group", self.values.get("group_name"))
        if isinstance(given, str):
            return _resolve_process_group(GroupName(given))
        return dist.ProcessGroup.unbox(given) if isinstance(given, torch.ScriptObject) else given

    @property
    def tensors(self) -> list[Tensor]:
        """What this rank gives, or a message that it receives."""
        names = ("tensors", "input_tensors", "input_tensor", "input")
        found = next(self.values[name] for name in names if name in self.values)
        found = found if isinstance(found, (list, tuple)) else [found]
        return [tensor for each in found for tensor in (each if isinstance(each, list) else [each])]

    @property
    def sent(self) -> list[Tensor]:
        """A chunk for every rank: of an all-to-all and of a reduce-scatter."""
        if len(self.tensors) == self.group.size():
            return self.tensors
        return self._chunks(self.tensors[0], "input_split_sizes")

    @sent.setter
    def sent(self, chunks: Sequence[Tensor]) -> None:
        name = "input_tensor" if "input_tensor" in self.values else "input"
        self.values[name] = torch.cat(list(chunks))

    @property
    def received(self) -> list[Tensor]:
        """What the call has filled: a chunk from every rank, or the sum."""
        if self.kind == "all-reduce":
            return list(self.values["tensors"]) if "tensors" in self.values else [self.result]
        if "output_tensors" in self.values:
            (outputs,) = self.values["output_tensors"]
            return outputs if isinstance(outputs, list) else [outputs]
        output = self.values.get("output", self.values.get("output_tensor", self.result))
        return [output] if self.kind == "reduce-scatter" else self._chunks(output, "output_split_sizes")

    def _chunks(self, tensor: Tensor, name: str) -> list[Tensor]:
        sizes = self.values.get(name) or tensor.size(0) // self.group.size()
        return list(tensor.split(sizes))

    def run(self) -> None:
        """Also waits, but for a message: its receiver may come to it only after this rank has gone on."""
        self.result = self._func(**self.values)
        if self._func.namespace == "_c10d_functional":
            torch.ops._c10d_functional.wait_tensor(self.result)
        elif self.kind != "message":
            *rest, work = self.result if isinstance(self.result, (list, tuple)) else [self.result]
            dist.Work.unbox(work).wait()
            # gloo copies a reduce-scatter's result again whenever it is waited for: the caller gets another work.
            self._done = _Done()
            self.result = (*rest, self._done.boxed()) if rest else self._done.boxed()


def dropped(call: Call) -> None:
    """A rank keeps what is its own and gets zeros for the rest."""
    call.run()
    for rank, chunk in enumerate(call.received):
        if rank != call.group.rank():
            chunk.zero_()


def scaled(call: Call, by: str) -> None:
    call.run()
    for chunk in call.received:
        chunk.mul_(FACTORS[by](call.group.size()))


def received_in_reverse(call: Call) -> None:
    call.run()
    chunks = [chunk.clone() for chunk in call.received]
    for chunk, other in zip(call.received, chunks[::-1], strict=True):
        chunk.copy_(other)


def sent_in_reverse(call: Call) -> None:
    call.sent = call.sent[::-1]
    call.run()


def not_summed(call: Call) -> None:
    """A rank gets its own part of what should be added up."""
    own = call.sent[call.group.rank()] if call.kind == "reduce-scatter" else call.tensors[0]
    own = own.clone()
    call.run()
    call.received[0].copy_(own)


def twice(call: Call) -> None:
    """An all-reduce of what is reduced."""
    call.run()
    call.run()


def over(call: Call, group: str) -> None:
    other = dist.group.WORLD if group == "world" else get_parallel_group(group)
    name = "process_group" if "process_group" in call.values else "group_name"
    assert other is not None
    call.values[name] = other.boxed() if name == "process_group" else other.group_name
    call.run()


def mirrored(call: Call) -> None:
    """A message goes to the rank as far behind as it should go ahead, and comes from as far ahead."""
    name = "dst" if "dst" in call.values else "src"
    call.values[name] = (2 * call.group.rank() - call.values[name]) % call.group.size()
    call.run()


def lost(call: Call) -> None:
    """A message that is sent arrives as zeros."""
    if "dst" in call.values:
        call.values["tensors"] = [torch.zeros_like(tensor) for tensor in call.tensors]
    call.run()


class _Altered(TorchDispatchMode):
    """Within it, collectives over several ranks that carry numbers are changed. Sizes and flags are not numbers."""

    def __init__(self, collective: Collective):
        super().__init__()
        self._collective, self._num_calls = collective, 0
        self._had_backward = False
        self._kept: list[Call] = []  # until they have been received, messages must live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor takes its operation apart first
        kwargs = kwargs or {}
        in_backward = torch._C._current_graph_task_id() != -1
        self._had_backward |= in_backward
        if func.namespace not in ("c10d", "_c10d_functional"):
            if func.namespace in ("aten", "prim", "prims") or not func.has_kernel_for_dispatch_key(
                _COMPOSITE
            ):
                return func(*args, **kwargs)
            with self:  # an operator of the toolkit's own hides what it calls
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        call = Call(func, args, kwargs)
        phase = "backward" if in_backward else "after" if self._had_backward else "forward"
        if not self._is_meant(call, phase):
            return func(*args, **kwargs)
        self._num_calls += 1
        if self._collective.is_first_only and self._num_calls > 1:
            return func(*args, **kwargs)
        self._kept.append(call)
        self._collective.change(call)
        return call.result

    def _is_meant(self, call: Call, phase: str) -> bool:
        wanted = self._collective
        if call.kind != wanted.kind or phase not in (wanted.phase or phase) or call.group.size() == 1:
            return False
        if not all(tensor.is_floating_point() for tensor in call.tensors):
            return False
        return not wanted.group or _ranks(call.group) == _ranks(get_parallel_group(wanted.group))


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


@dataclass(frozen=True)
class Collective:
    """`change(call)` in place of every call of one kind."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, all-to-all or message."""
    change: Callable[[Call], None]
    phase: str = ""
    """forward, backward or after (the last backward); in all of them by default."""
    group: str = ""
    """The name of the only group that is meant."""
    is_first_only: bool = False

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with _Altered(self):
            yield


_wrappers: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Patch:
    """`wrapper(original, *args, **kwargs)` in place of a public function, or of a method of a class."""

    place: str
    """`package.module:function` or `package.module:Class.method`."""
    wrapper: Callable[..., Any]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        module, _, path = self.place.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for each in outer:
            owner = getattr(owner, each)
        if outer:
            original = getattr(owner, name)

            def method(*args: Any, **kwargs: Any) -> Any:
                return self.wrapper(original, *args, **kwargs)

            with mock.patch.object(owner, name, method):
                yield
            return
        function = inspect.unwrap(getattr(owner, name))
        code, key = function.__code__, f"{self.place} {len(_wrappers)}"
        _wrappers[key] = partial(self.wrapper, _copy(function))
        function.__code__ = _call_of(key)
        try:
            yield
        finally:
            function.__code__ = code


def _copy(function: Any) -> FunctionType:
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _call_of(key: str) -> Any:
    """Code that calls the wrapper. It has no free variables, as the function that it is for has none."""
    here = f"__import__({__name__!r}, fromlist=['x'])"
    return eval(f"lambda *args, **kwargs: {here}._wrappers[{key!r}](*args, **kwargs)").__code__


def in_place_of(replacement: Callable[..., Any], _original: Any, *args: Any, **kwargs: Any) -> Any:
    """`partial(in_place_of, replacement)` is a wrapper that calls `replacement` alone."""
    return replacement(*args, **kwargs)


def with_arguments(original: Any, *args: Any, _named: dict[str, Any], **kwargs: Any) -> Any:
    """A wrapper that calls the original with some arguments changed; a callable makes them from what was given."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    for name, value in _named.items():
        bound.arguments[name] = value(bound.arguments[name]) if callable(value) else value
    return original(*bound.args, **bound.kwargs)


def change_gradient(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor, whose gradient will be `change(gradient)`."""
    tensor = tensor.view_as(tensor)
    if tensor.requires_grad:
        tensor.register_hook(change)
    return tensor


@dataclass(frozen=True)
class Defective:
    """The step with its defects on the ranks, and as it is on the single device."""

    step: Any
    changes: tuple[Collective | Patch, ...]

    def __call__(self, *args: Any) -> Any:
        run = args[-1]
        assert isinstance(run, Run)
        if run.is_reference:
            return self.step(*args)
        # Imported only now, it would keep what is patched.
        importlib.import_module("shardformer")
        importlib.import_module("opensora_accel.training.build")
        with contextlib.ExitStack() as stack:
            for change in self.changes:
                stack.enter_context(change.applied())
            return self.step(*args)


@dataclass(frozen=True)
class Mutant:
    """One defect, where it is tried, and its right name: kind, axes, and the factor where there is one."""

    name: str
    changes: tuple[Collective | Patch, ...]
    step: Any
    meshes: Meshes
    kind: str
    axes: tuple[str, ...]
    factor: str = ""
    timeout_s: float = field(default=30, kw_only=True)
    reference: Reference | None = field(default=None, kw_only=True)
    """By default one batch for a step that builds its model itself, and else a batch for each data rank."""
    data_axes: tuple[str, ...] | None = field(default=None, kw_only=True)
    dtype: Dtype = field(default="fp64", kw_only=True)
    plain_model_fn: Any = field(default=None, kw_only=True)

    def verify(self, pool: RankPool) -> Report:
        model_fn = getattr(self.step, "model", None)
        return verify(
            Defective(self.step, self.changes),
            model_fn,
            self.meshes,
            data_axes=self.data_axes,
            dtype=self.dtype,
            plain_model_fn=self.plain_model_fn,
            reference=self.reference or ("whole" if model_fn is None else "turns"),
            timeout_s=self.timeout_s,
            pool=pool,
        )

    def is_named_by(self, finding: Cause) -> bool:
        named = finding.kind, sorted(finding.axes), finding.factor
        return named == (self.kind, sorted(self.axes), self.factor)

    def __str__(self) -> str:
        return f"{self.name}: {' '.join(filter(None, [self.kind, self.factor, *self.axes]))}"
