"""What a call of torch.distributed sends: read from its operator's schema, for every kind of call.

Bytes are those that other ranks get from this one, in the algorithms that send the least. With P = 3 and a tensor of
12 bytes on every rank: an all-gather sends it to 2 ranks, 24 bytes; a reduce-scatter sends 2 of its 3 chunks, 8 bytes;
an all-reduce is one after the other, 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor", "symm_mem")
"""Where torch keeps operators that communicate."""

_SILENT = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")
"""Operators of these namespaces that send and take nothing."""

_OPERATORS = {
    "all-reduce": (
        *("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_"),
        *("all_reduce_coalesced", "all_reduce_coalesced_"),
    ),
    "all-gather": (
        *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
        *("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"),
    ),
    "reduce-scatter": (
        *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"),
    ),
    "all-to-all": ("alltoall_base_", "alltoall_", "all_to_all_single", "shard_dim_alltoall"),
    "broadcast": ("broadcast_", "broadcast"),
    "reduce": ("reduce_",),
    "gather": ("gather_",),
    "scatter": ("scatter_",),
    "send": ("send", "isend"),
    "recv": ("recv_", "irecv", "recv_any_source_"),
    "barrier": ("barrier", "monitored_barrier_"),
}
_KIND_OF = {name: kind for kind, names in _OPERATORS.items() for name in names}
_INPUTS = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")
"""Names of what a rank gives, in the schemas."""


@dataclass(frozen=True)
class Traffic:
    """One call, on this rank. Ranks are global."""

    kind: str
    group: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    """What this rank gives; of a recv, what it fills."""
    sent_bytes: int
    peer: int | None = None
    sent_to: tuple[int, ...] | None = None
    received_from: tuple[int, ...] | None = None

    @property
    def input_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def traffic_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Traffic]:
    """The calls in one operator (`batch_p2p_ops` holds several), none where it communicates nothing.

    An operator that is not in the table gives one call of the kind "unknown", whose sent bytes are not known (0).
    """
    name = func._schema.name.split("::")[1]
    if name in _SILENT:
        return []
    names = [argument.name for argument in func._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    group = _group(values)
    ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
    if name == "batch_p2p_ops":
        rows = zip(values["op_list"], values["peer_list"], values["tensors"], strict=True)
        return [_message(_KIND_OF.get(name, "unknown"), ranks, tensor, peer) for name, peer, tensor in rows]
    kind = _KIND_OF.get(name, "unknown")
    if kind == "unknown" or group is None:
        return [Traffic("unknown", ranks, tuple(tensors_in([*values.values()])), 0)]
    if kind == "all-to-all":
        return [_all_to_all(name, values, group, ranks)]
    tensors = tuple(tensors_in(_inputs(values)))
    if kind == "scatter" and not tensors:  # all but the root give nothing
        tensors = tuple(tensors_in(values["output_tensors"]))
    # The other end of a send or recv, or the root of a broadcast, reduce, gather or scatter.
    root = next((values[each] for each in ("root_rank", "dst", "src") if each in values), None)
    size_bytes = sum(tensor.nbytes for tensor in tensors)
    sent_bytes = _sent_bytes(kind, size_bytes, len(ranks), is_root=root == group.rank())
    return [Traffic(kind, ranks, tensors, sent_bytes, None if root is None else ranks[root])]


def _group(values: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """c10d gives the group itself, boxed; functional collectives give its name, or itself."""
    given = values.get("process_group", values.get("group_name", values.get("group")))
    if isinstance(given, torch.ScriptObject):
        return dist.ProcessGroup.unbox(given)
    if isinstance(given, str):
        return _resolve_process_group(GroupName(given))
    return given


def _inputs(values: Mapping[str, Any]) -> Any:
    return next((values[name] for name in _INPUTS if name in values), ())


def tensors_in(given: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples, of any shape."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for item in given:
            yield from tensors_in(item)


def _message(kind: str, ranks: tuple[int, ...], tensor: Tensor, peer: int) -> Traffic:
    return Traffic(kind, ranks, (tensor,), tensor.nbytes if kind == "send" else 0, ranks[peer])


def _sent_bytes(kind: str, size_bytes: int, num_ranks: int, *, is_root: bool) -> int:
    sent = {
        "send": size_bytes,
        "all-reduce": 2 * size_bytes * (num_ranks - 1) // num_ranks,
        "all-gather": size_bytes * (num_ranks - 1),
        "reduce-scatter": size_bytes * (num_ranks - 1) // num_ranks,
        "scatter": size_bytes * (num_ranks - 1) // num_ranks if is_root else 0,
        "broadcast": size_bytes * (num_ranks - 1) if is_root else 0,
        "reduce": 0 if is_root else size_bytes,
        "gather": 0 if is_root else size_bytes,
    }
    return sent.get(kind, 0)  # recv, barrier


def _all_to_all(
    name: str, values: Mapping[str, Any], group: dist.ProcessGroup, ranks: tuple[int, ...]
) -> Traffic:
    tensors = tuple(tensors_in(_inputs(values)))
    if name == "alltoall_":
        sent_to = tuple(tensor.nbytes for tensor in tensors)
        received_from = tuple(tensor.nbytes for tensor in values["output_tensors"])
    else:
        splits = values.get("input_split_sizes", values.get("input_splits"))
        sent_to = _chunk_bytes(tensors[0], splits, len(ranks))
        output = values.get("output", tensors[0])
        received_from = _chunk_bytes(output, values.get("output_split_sizes"), len(ranks))
    sent_bytes = sum(sent_to) - sent_to[group.rank()]
    return Traffic("all-to-all", ranks, tensors, sent_bytes, None, sent_to, received_from)


def _chunk_bytes(tensor: Tensor, splits: Sequence[int] | None, num_ranks: int) -> tuple[int, ...]:
    """Bytes for every rank: rows of dim 0 by `splits`, or equal chunks."""
    if not splits:
        return (tensor.nbytes // num_ranks,) * num_ranks
    row_bytes = prod(tensor.shape[1:]) * tensor.element_size()
    return tuple(rows * row_bytes for rows in splits)
