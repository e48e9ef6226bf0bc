"""What an operator starts on a device: a kernel, with what it computes, reads and writes, or a collective.

addmm of [76, 48] and [48, 64]   gemm        (1, 76, 64, 48), 2·76·64·48 operations, and each matrix's bytes once
gelu of [76, 64]                 memory      76·64 numbers read, and as many written
view, empty, detach              nothing
all_gather_into_tensor by FSDP2  collective  on the stream "gather"
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from opensora_accel.arguments import tensors_in
from opensora_accel.observe import CollectiveCall, arguments_of
from opensora_accel.planner.trace import Operation, OperationKind, Stream

# They start no kernel, beside views.
_WITHOUT_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "detach_", "alias"),
    *("_unsafe_view", "_reshape_alias", "lift", "lift_fresh", "set_", "resize_", "_local_scalar_dense"),
    *("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"),
    *("_fused_sdp_choice", "record_stream", "item", "is_same_size"),
}
# They read some rows of their first argument.
_READ_ROWS = {"embedding", "index", "index_select", "gather"}
# They do not read what they write over.
_ONLY_WRITE = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}
# FSDP2 brings this rank's shards to their place in what is gathered.
COPY_IN = "all_gather_copy_in"
_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention")


# ---- kernels


def name_of(func: Any) -> str:
    return str(func._schema.name.split("::")[1])


def starts_kernel(func: Any) -> bool:
    return not func.is_view and name_of(func) not in _WITHOUT_KERNEL


def kernel_of(
    func: Any,
    args: Sequence[Any],
    kwargs: Any,
    outputs: Any,
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
) -> Operation:
    """The kernel of an operator that reads and writes these tensors."""
    name, flops, shape = name_of(func), 0, tuple[int, ...]()
    kind: OperationKind = "memory"
    formula = flop_registry.get(func._overloadpacket)
    # Of samples one behind the other torch reads the lengths, which here have no values.
    is_packed = "cum_seq_q" in arguments_of(func, args, kwargs)
    if formula is not None and not is_packed:
        flops = int(formula(*args, **kwargs, out_val=outputs))
    if any(part in name for part in _ATTENTION):
        values = arguments_of(func, args, kwargs)
        # After the gradient of the output, where there is one.
        q, k = [tensor for tensor in reads if tensor.dim() >= 3][1 if "backward" in name else 0 :][:2]
        kind, shape = "attention", _attention_shape(q, k, values.get("max_q"), values.get("max_k"))
        if is_packed:
            # Two products forward, and five backward.
            flops = (10 if "backward" in name else 4) * math.prod(shape)
        if values.get("is_causal"):
            # A triangle, of which the kernel leaves out what is not seen: torch's formula counts the square.
            flops = flops * (shape[2] + 1) // (2 * shape[2])
    elif name == "einsum":
        kind, shape = "gemm", _einsum_shape(*args[:2])
        flops = 2 * math.prod(shape)
    elif flops:
        kind, shape = "gemm", _gemm_shape(name, args, outputs)
    dtype = next((t.dtype for t in (*writes, *reads) if t.is_floating_point()), torch.float32)
    return Operation(
        f"{func.namespace}.{name}",
        kind,
        "compute",
        flops=flops,
        num_bytes=_num_bytes(name, args, reads, writes),
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
    )


def workspace_bytes(func: Any, args: Sequence[Any]) -> int:
    """What a kernel takes of device memory while it runs, and gives back: that of attention's backward on CUDA.

    FlashAttention adds up dq in fp32, in rows padded to 32 numbers, and keeps a number for each row of the output: 16
    heads of 128 over 32,768 tokens take 4 · 32,768 · 16 · 129 bytes = 258 MiB. So does cuDNN.

    Sources: flash-attention, csrc/flash_attn/flash_api.cpp, `mha_bwd`: dq_accum and softmax_d; torch has a copy.
    cudnn-frontend, node/scaled_dot_product_flash_attention.h, the composite backward: dQ_accum and softmax_sum.
    """
    name = name_of(func)
    if "for_cpu" in name or not any(f"{kernel}_attention_backward" in name for kernel in ("flash", "cudnn")):
        return 0
    q = args[1]
    head_dim = q.shape[-1]
    return 4 * (q.numel() // head_dim) * (-(-head_dim // 32) * 32 + 1)


def _attention_shape(q: Tensor, k: Tensor, longest_q: int | None, longest_k: int | None) -> tuple[int, ...]:
    """(B, H, S_q, S_k, D) of [B, H, S, D], or of samples one behind the other, [B · S, H, D] of equal lengths."""
    if q.dim() == 4 or longest_q is None or longest_k is None:
        return q.size(0), q.size(1), q.size(2), k.size(2), q.size(3)
    return q.size(0) // longest_q, q.size(1), longest_q, longest_k, q.size(2)


def _gemm_shape(name: str, args: Sequence[Any], outputs: Any) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a product, or of the product that a convolution is."""
    if "convolution" in name:
        out, weight = (args[0], args[2]) if "backward" in name else (outputs, args[1])
        return 1, out.numel() // out.size(1), out.size(1), weight.numel() // weight.size(0)
    one, other = [arg for arg in args if isinstance(arg, Tensor)][-2:]
    return one.size(0) if one.dim() == 3 else 1, one.size(-2), other.size(-1), one.size(-1)


def _einsum_shape(equation: str, operands: Sequence[Tensor]) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of the product of two operands; of another number of them, all that is multiplied as m.

    Of "bshd,bthd->bhst" batch are b and h, m is s, n is t and k is d.
    """
    given, _, kept = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for labels, operand in zip(given.split(","), operands, strict=True):
        # What the dots stand for, one after the other from the last.
        before, dots, after = labels.partition("...")
        missing = range(operand.dim() - len(before) - len(after), 0, -1) if dots else ()
        sizes |= dict(zip((*before, *(f"...{i}" for i in missing), *after), operand.shape, strict=True))
    if len(operands) != 2:
        return 1, math.prod(sizes.values()), 1, 1
    one, other = given.split(",")

    def product(in_one: bool, in_other: bool, is_kept: bool | None = None) -> int:
        return math.prod(
            size
            for label, size in sizes.items()
            if (label[0] in one, label[0] in other) == (in_one, in_other)
            and is_kept in (None, label[0] in kept or not kept)
        )

    return product(True, True, True), product(True, False), product(False, True), product(True, True, False)


def _num_bytes(name: str, args: Sequence[Any], reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
    if name == COPY_IN:
        return 2 * shard_bytes(args)
    written = sum(map(traffic, writes))
    if name in _READ_ROWS:
        return 2 * written
    return written if name.endswith("_like") else written + sum(map(traffic, reads))


def shard_bytes(args: Sequence[Any]) -> int:
    """Bytes of the shards that FSDP2's copy-in is given."""
    return sum(tensor.nbytes for tensor in args[0])


def traffic(tensor: Tensor) -> int:
    """Bytes of a tensor in memory: what is expanded is there once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0


@cache
def _written_arguments(func: Any) -> frozenset[str]:
    return frozenset(
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def reads_and_writes(
    func: Any, args: Sequence[Any], kwargs: Any, outputs: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an operator reads, and those that it writes."""
    values = arguments_of(func, args, kwargs)
    written = _written_arguments(func)
    only_writes = name_of(func) in _ONLY_WRITE or any(argument.is_out for argument in func._schema.arguments)
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for name, value in values.items():
        tensors = tensors_in(value)
        if name in written:
            writes += tensors
        if name not in written or not only_writes:
            reads += tensors
    return reads, writes if written else tensors_in(outputs)


# ---- collectives


def filled_by(func: Any, args: Sequence[Any], kwargs: Any, outputs: Any) -> list[Tensor]:
    """Tensors that a collective fills: what it is given as outputs, or works on in place, and what it returns."""
    values = arguments_of(func, args, kwargs)
    given = [value for name, value in values.items() if name.startswith("output")]
    if not given:
        given = [values[name] for name in ("tensors", "tensor") if name in values]
    return tensors_in((given, outputs))


def is_waited_for(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether the caller of a collective waits for it at once."""
    has_choice = any(argument.name == "async_op" for argument in func._schema.arguments)
    return (
        func.namespace == "c10d" and has_choice and not arguments_of(func, args, kwargs).get("async_op", True)
    )


def stream_of(call: CollectiveCall, caller: str) -> Stream:
    """Where a collective runs beside others.

    Args:
        caller: `CallSite.via`.
    """
    if call.is_point_to_point:
        return "ring"
    if caller.startswith("FSDP2"):
        return "gather" if call.kind == "all-gather" else "reduce"
    return "reduce" if caller.startswith("DDP") else "exchange"
