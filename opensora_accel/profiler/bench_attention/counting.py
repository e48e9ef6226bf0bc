"""What one forward and backward sends, and what it keeps in between."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_accel.profiler.memory import LiveBytes

NAMESPACES = ("c10d", "_c10d_functional")
SENDS_NOTHING = ("recv_", "wait_tensor", "_wrap_tensor_autograd")


@dataclass
class Traffic:
    """Of one rank. Sizes that ranks tell each other (int64) are counted apart from data."""

    collectives: int = 0
    sends: int = 0
    barriers: int = 0
    size_exchanges: int = 0
    sent_bytes: int = 0
    uncounted: list[str] = field(default_factory=list)
    """Operations whose bytes this counter does not know."""


class SentBytes(TorchDispatchMode):
    """Counts every c10d call on this rank: what is in it that another rank gets."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _has_subclass(types):
            return NotImplemented
        definition = OPDEFS.get(func._schema.name)
        if definition is not None:
            # A custom operator's own calls are hidden from modes: its function is run here in its stead.
            with self:
                return definition._init_fn(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES:
            self._record(func.name().split("::")[1].split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, args: Sequence[Any]) -> None:
        if name in SENDS_NOTHING:
            return
        if name == "barrier":
            self.traffic.barriers += 1
            return
        counted = _sent(name, args)
        if counted is None:
            self.traffic.collectives += 1
            self.traffic.uncounted.append(name)
            return
        tensor, size_bytes = counted
        if tensor.dtype == torch.int64:
            self.traffic.size_exchanges += 1
        elif name == "send":
            self.traffic.sends += 1
            self.traffic.sent_bytes += size_bytes
        else:
            self.traffic.collectives += 1
            self.traffic.sent_bytes += size_bytes


def _sent(name: str, args: Sequence[Any]) -> tuple[Tensor, int] | None:
    """The tensor that a call was given, and how many of its bytes go to other ranks; None for an unknown call."""
    if name == "send":
        return args[0][0], args[0][0].nbytes
    group = _group(args)
    if group is None:
        return None
    others, num_ranks = group.size() - 1, group.size()
    if name in ("alltoall_base_", "all_to_all_single"):
        input_, splits = (args[1], args[4]) if name == "alltoall_base_" else (args[0], args[2])
        row_bytes = prod(input_.shape[1:]) * input_.element_size()
        stays = splits[group.rank()] * row_bytes if splits else input_.nbytes // num_ranks
        return input_, input_.nbytes - stays
    if name == "alltoall_":
        return args[1][0], sum(t.nbytes for to, t in enumerate(args[1]) if to != group.rank())
    if name in ("allgather_", "_allgather_base_", "all_gather_into_tensor"):
        input_ = args[0] if name == "all_gather_into_tensor" else args[1]
        input_ = input_[0] if name == "allgather_" else input_
        return input_, others * input_.nbytes
    if name in ("_reduce_scatter_base_", "reduce_scatter_tensor"):
        input_ = args[1] if name == "_reduce_scatter_base_" else args[0]
        return input_, input_.nbytes * others // num_ranks
    if name in ("allreduce_", "all_reduce", "all_reduce_"):
        input_ = args[0][0] if name == "allreduce_" else args[0]
        return input_, 2 * input_.nbytes * others // num_ranks
    return None


def _group(args: Sequence[Any]) -> dist.ProcessGroup | None:
    """c10d gives the group itself, boxed, functional collectives its name."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
        if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min", "product"):
            return _resolve_process_group(GroupName(argument))
    return None


class KeptBytes(LiveBytes):
    """Live storages, also those inside of tensor subclasses."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _has_subclass(types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def _has_subclass(types: Sequence[type]) -> bool:
    """A DTensor's own operations take it apart; the mode then sees what is done to the parts."""
    return any(cls is not Tensor for cls in types)


def bytes_kept(forward: Callable[..., Tensor], inputs: Sequence[Tensor]) -> int:
    """Bytes alive for backward once q, k, v and the output are forgotten by everybody but the graph."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with KeptBytes() as live:
        # As a projection makes them: nobody but the graph holds them once the forward has returned.
        output = forward(*(leaf.clone() for leaf in leaves))
        node = output.grad_fn
        assert node is not None, "the output needs no gradient"
        del output
        gc.collect()
        size_bytes = live.now_bytes
        del node
    return size_bytes
