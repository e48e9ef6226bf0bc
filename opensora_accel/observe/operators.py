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

from opensora_accel import links
from opensora_accel.arguments import tensors_in
from opensora_accel.observe.call_site import NOWHERE, CallSite
from opensora_accel.observe.kinds import FORWARD

# Where torch keeps operators that communicate.
NAMESPACES = ("c10d", "_c10d_functional", "_dtensor", "symm_mem")

# Operators of these namespaces that send and take nothing.
_SILENT = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")

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
# Names of what a rank gives, in the schemas.
_INPUTS = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective, or one end of a message, on one rank. Ranks are global."""

    # all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, reduce, gather, scatter, send, recv, barrier,
    # or unknown for an operator that is not in the table: then its bytes are not known.
    kind: str
    operator: str
    # In the group's order.
    group: tuple[int, ...]
    # The other end of a send or recv, the root of a broadcast, reduce, gather or scatter.
    peer: int | None
    # What other ranks get from this one.
    sent_bytes: int
    input_bytes: int
    # In the input, or in what a recv fills.
    num_elements: int
    dtype: str
    # In an all-to-all, the bytes for every rank of the group.
    sent_to: tuple[int, ...] | None = None
    received_from: tuple[int, ...] | None = None
    phase: str = FORWARD
    where: CallSite = NOWHERE
    # Parameters whose gradients are known to be in the input.
    gradients: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return str(self.where)

    @property
    def is_point_to_point(self) -> bool:
        return self.kind in ("send", "recv")

    @property
    def is_by_fsdp(self) -> bool:
        return self.where.via.startswith("FSDP")

    @property
    def carries_numbers(self) -> bool:
        """Whole numbers are sizes that ranks send each other."""
        return not self.dtype.startswith("int")


def calls_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[CollectiveCall, tuple[Tensor, ...]]]:
    """The calls in one operator (`batch_p2p_ops` holds several), each with the tensors that this rank gives.

    Of a recv they are what it fills. An operator that is not in the table gives one call of the kind "unknown", whose
    sent bytes are not known (0).
    """
    name = func._schema.name.split("::")[1]
    if name in _SILENT:
        return
    values = arguments_of(func, args, kwargs)
    group = process_group_of(values)
    ranks = () if group is None else tuple(dist.get_process_group_ranks(group))

    def call(
        kind: str, tensors: Sequence[Tensor], sent_bytes: int, peer: int | None = None, **chunks: Any
    ) -> tuple[CollectiveCall, tuple[Tensor, ...]]:
        """One call, and the tensors that this rank gives to it."""
        input_bytes, num_elements = sum(t.nbytes for t in tensors), sum(t.numel() for t in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "none"
        root = None if peer is None else ranks[peer]
        sizes = (sent_bytes, input_bytes, num_elements)
        return CollectiveCall(kind, func._schema.name, ranks, root, *sizes, dtype, **chunks), tuple(tensors)

    # Sends and receives that are started together come as one operator.
    if name == "batch_p2p_ops":
        for each, peer, tensor in zip(values["op_list"], values["peer_list"], values["tensors"], strict=True):
            kind = _KIND_OF.get(each, "unknown")
            yield call(kind, [tensor], tensor.nbytes if kind == "send" else 0, peer)
        return
    kind = _KIND_OF.get(name, "unknown")
    if kind == "unknown" or group is None:
        yield call("unknown", tensors_in(values), 0)
        return
    tensors = tensors_in(next((values[each] for each in _INPUTS if each in values), ()))
    if kind == "all-to-all":
        if name == "alltoall_":
            sent_to = tuple(tensor.nbytes for tensor in tensors)
            received_from = tuple(tensor.nbytes for tensor in values["output_tensors"])
        else:
            splits = values.get("input_split_sizes", values.get("input_splits"))
            sent_to = _chunk_bytes(tensors[0], splits, len(ranks))
            output = values.get("output", tensors[0])
            received_from = _chunk_bytes(output, values.get("output_split_sizes"), len(ranks))
        # The piece for this rank itself stays here.
        sent_bytes = sum(sent_to) - sent_to[group.rank()]
        yield call(kind, tensors, sent_bytes, sent_to=sent_to, received_from=received_from)
        return
    if kind == "scatter" and not tensors:  # all but the root give nothing
        tensors = tensors_in(values["output_tensors"])
    # The other end of a send or recv, or the root of a broadcast, reduce, gather or scatter.
    peer = next((values[each] for each in ("root_rank", "dst", "src") if each in values), None)
    is_root, others, size_bytes = peer == group.rank(), len(ranks) - 1, sum(t.nbytes for t in tensors)
    # As the text at the top counts: an all-reduce is a reduce-scatter and then an all-gather.
    sent = {
        "send": size_bytes,
        "all-reduce": int(links.sent_bytes("all-reduce", size_bytes, len(ranks))),
        "all-gather": size_bytes * others,
        "reduce-scatter": int(links.sent_bytes("reduce-scatter", size_bytes, len(ranks))),
        "scatter": size_bytes * others // len(ranks) if is_root else 0,
        "broadcast": size_bytes * others if is_root else 0,
        "reduce": 0 if is_root else size_bytes,
        "gather": 0 if is_root else size_bytes,
    }
    yield call(kind, tensors, sent.get(kind, 0), peer)  # a recv and a barrier send nothing


def arguments_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an operator was given, by the names of its schema; what was left to its default is not there."""
    names = (argument.name for argument in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def process_group_of(values: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """The group over which an operator with these arguments, by name, sends."""
    # c10d gives the group itself, boxed; functional collectives give its name, or itself.
    group = values.get("process_group", values.get("group_name", values.get("group")))
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    return _resolve_process_group(GroupName(group)) if isinstance(group, str) else group


def transfer_operators() -> list[str]:
    """The operators of torch's C++ that start what somebody waits for; functional collectives call these."""
    in_cpp = [name for name in _KIND_OF if hasattr(torch.ops.c10d, name)]
    return [name for name in in_cpp if getattr(torch.ops.c10d, name).default._schema.returns]


def _chunk_bytes(tensor: Tensor, splits: Sequence[int] | None, num_ranks: int) -> tuple[int, ...]:
    """Bytes of [N, ...] for every rank: rows of dim 0 by `splits`, or equal chunks."""
    if not splits:
        return (tensor.nbytes // num_ranks,) * num_ranks
    row_bytes = prod(tensor.shape[1:]) * tensor.element_size()
    return tuple(rows * row_bytes for rows in splits)
