"""Every collective that a rank calls, with its group, its bytes and the line that called it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_accel.verify.communication.collectives import NAMESPACES, Traffic, traffic_of
from opensora_accel.verify.communication.derived import Derived
from opensora_accel.verify.communication.frames import Where, find_source

_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd
_OPAQUE = (*NAMESPACES, "aten", "prim", "prims")
"""Namespaces whose operators are looked at as they are; others are run in parts, where they have any."""

FORWARD, RECOMPUTE, BACKWARD, AFTER = "forward", "recompute", "backward", "after backward"
"""Phases. Recompute: within backward, a forward that runs again. After: when a backward has run; gradients that are
averaged by hand stand there, and the forward of a second microbatch."""


@dataclass(frozen=True)
class Call:
    """One collective, or one end of a message, on one rank."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, reduce, gather, scatter, send, recv, barrier,
    or unknown for an operator that is not in the table: then its bytes are not known."""
    operator: str
    group: tuple[int, ...]
    """Global ranks, in the group's order."""
    peer: int | None
    """Global rank: the other end of a send or recv, the root of a broadcast, reduce, gather or scatter."""
    sent_bytes: int
    """What other ranks get from this one."""
    input_bytes: int
    num_elements: int
    """Of the input; of a recv, of what is filled."""
    dtype: str
    phase: str
    where: Where
    sent_to: tuple[int, ...] | None = None
    """Of an all-to-all: bytes for every rank of the group."""
    received_from: tuple[int, ...] | None = None
    gradients: tuple[str, ...] = ()
    """Parameters whose gradients are known to be in the input."""

    @property
    def source(self) -> str:
        return str(self.where)

    @property
    def is_point_to_point(self) -> bool:
        return self.kind in ("send", "recv")

    @property
    def is_by_fsdp(self) -> bool:
        return self.where.via.startswith("FSDP")


class Recorder(TorchDispatchMode):
    """Within it, each call of torch.distributed on this rank becomes a `Call` in `calls`, in order.

    Also in backward, in recomputation, and inside of FSDP2, DDP (its reducer's all-reduce comes from C++ and passes
    the dispatcher: torch 2.13), DTensor and functional collectives. A custom operator hides what it calls: its
    Python function is run in its stead. What is sent past the dispatcher is not seen: a backend called by itself, or
    kernels that communicate.

    Args:
        parameters: by name; calls that carry their gradients then name them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.num_backwards = 0
        self._was_in_backward = False
        self._derived = Derived(parameters or {})

    @property
    def with_gradient(self) -> frozenset[str]:
        """Parameters that had a gradient when a backward was done, also if the step has cleared it."""
        return frozenset(self._derived.seen)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind not in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor takes its operation apart; this mode then sees what is done to the parts
        kwargs = kwargs or {}
        in_backward = torch._C._current_graph_task_id() != -1
        self.num_backwards += in_backward and not self._was_in_backward
        if self._was_in_backward and not in_backward:
            self._derived.note_gradients()
        self._was_in_backward = in_backward
        if func.namespace not in _OPAQUE and func.has_kernel_for_dispatch_key(_COMPOSITE):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if func.namespace in NAMESPACES:
            self._add(func._schema.name, traffic_of(func, args, kwargs), in_backward)
        result = func(*args, **kwargs)
        if self.num_backwards:
            self._derived.follow(func, args, result, in_backward)
        return result

    def _add(self, operator: str, calls: Iterable[Traffic], in_backward: bool) -> None:
        for call in calls:
            where = find_source()
            self.calls.append(
                Call(
                    kind=call.kind,
                    operator=operator,
                    group=call.group,
                    peer=call.peer,
                    sent_bytes=call.sent_bytes,
                    input_bytes=call.input_bytes,
                    num_elements=sum(tensor.numel() for tensor in call.tensors),
                    dtype=str(call.tensors[0].dtype).removeprefix("torch.") if call.tensors else "none",
                    phase=self._phase(in_backward, where),
                    where=where,
                    sent_to=call.sent_to,
                    received_from=call.received_from,
                    gradients=self._derived.names(call.tensors),
                )
            )

    def _phase(self, in_backward: bool, where: Where) -> str:
        if in_backward:
            return RECOMPUTE if where.is_recomputed else BACKWARD
        return AFTER if self.num_backwards else FORWARD
