"""The public functions: each runs its kernel where one can run, and the plain operations elsewhere."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, get_args

import torch
from torch import Tensor, nn

from shardformer.modeling.kernels import plain
from shardformer.modeling.kernels.plain import Pairs, Rounds
from shardformer.modeling.norm_orders import FLOATS, Order

# A program holds whole rows.
_MOST_FEATURES = 16384
# Those of the last tile are numbered beyond the rows that there are.
_MOST_ROWS = 2**31 - 2**14


def modulated_norm(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    order: Order,
    eps: float | None,
    rounds: Rounds = "each",
) -> Tensor:
    """norm(x) · (1 + scale) + shift (adaLN), in one pass; without scale and shift the norm alone.

    Backward gives the gradients of all five tensors, and keeps nothing beside them. Those of broadcast ones are summed
    in fp32, in an order that hangs on the shapes alone.

    Args:
        x: [B, S, C] or any [..., C].
        scale, shift: [B, C], [B, 1, C], [B, S, C], or whatever broadcasts to x.
        weight, bias: [C], of the norm.
        order: of the norm, from `norm_orders.ORDERS`.
        eps: None is that of fp32.
        rounds: "each" rounds after each operation, as PyTorch does in norm(x) * (1 + scale) + shift. "end" computes
            (norm(x.float()) * (1 + scale) + shift).type_as(x).

    Returns:
        [..., C]; with "each" of the dtype that PyTorch promotes to, with "end" of that of x.

    Raises:
        ValueError: an operand that does not broadcast to x, or an unknown `rounds`.
    """
    _check_rounds(rounds)
    scale, shift = (_over_tokens(x, name, t) for name, t in (("scale", scale), ("shift", shift)))
    for name, each in (("weight", weight), ("bias", bias)):
        _check_features(x, name, each)
    if why_plain(x, scale, shift, weight, bias) is None:
        return _function("norm", "ModulatedNorm")(x, scale, shift, weight, bias, order, eps, rounds)
    return plain.modulated_norm(x, scale, shift, weight, bias, order, eps, rounds)


def gated_residual(x: Tensor, y: Tensor, gate: Tensor, *, rounds: Rounds = "each") -> Tensor:
    """x + y · gate, in one pass, with the gradients of all three.

    Args:
        x, y: [B, S, C] or any [..., C].
        gate: [B, C], [B, 1, C], [B, S, C], or whatever broadcasts to x.
        rounds: "each" rounds after each operation, as PyTorch does in x + y * gate. "end" computes
            (x.float() + y.float() * gate).type_as(x).

    Returns:
        [..., C]; with "each" of the dtype that PyTorch promotes to, with "end" of that of x.

    Raises:
        ValueError: y of another shape than x, a gate that does not broadcast to it, or an unknown `rounds`.
    """
    _check_rounds(rounds)
    if y.shape != x.shape:
        raise ValueError(f"y {list(y.shape)} must have the shape of x {list(x.shape)}; expand it first")
    wide_gate = _over_tokens(x, "gate", gate)
    assert wide_gate is not None
    if why_plain(x, y, wide_gate) is None:
        return _function("gate", "GatedResidual")(x, y, wide_gate, rounds)
    return plain.gated_residual(x, y, wide_gate, rounds)


def norm_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    order: Order,
    eps: float | None,
    head_dim: int,
    pairs: Pairs = "neighbours",
    rounds: Rounds = "end",
) -> Tensor:
    """The norm of queries or keys and their rotary embedding, in one pass, with the gradients of all five tensors.

    The norm is over the last dimension of x: all heads for [B, S, H · D], one head for [B, S, H, D] or [B, H, S, D].

    Args:
        x: [..., C], where C is a multiple of head_dim (D).
        cos, sin: [..., D] that broadcast to [..., C / D, D], such as [1, S, 1, D]; or [..., C] that broadcast to x.
            They hold a value for each feature, so each value of a pair twice.
        weight, bias: [C], of the norm.
        order: of the norm, from `norm_orders.ORDERS`.
        eps: None is that of fp32.
        pairs: which features are turned together: "neighbours" (0, 1), (2, 3), …, or "halves" (0, D/2), ….
        rounds: "end" turns in fp32 and rounds once; "each" rounds products and sum, as PyTorch promotes them.

    Returns:
        [..., C] of the dtype that the norm returns.

    Raises:
        ValueError: sizes that do not fit, cos and sin of two dtypes, or an unknown `pairs` or `rounds`.
    """
    _check_rounds(rounds)
    if pairs not in get_args(Pairs):
        raise ValueError(f"pairs={pairs!r} is unknown; use one of {', '.join(get_args(Pairs))}")
    num_features = x.shape[-1]
    if head_dim % 2 or num_features % head_dim:
        raise ValueError(f"head_dim ({head_dim}) must be even and divide the features of x ({num_features})")
    for name, each in (("weight", weight), ("bias", bias)):
        _check_features(x, name, each)
    if cos.dtype != sin.dtype:
        raise ValueError(f"cos and sin must have one dtype; they are {cos.dtype} and {sin.dtype}")
    heads = (*x.shape[:-1], num_features // head_dim, head_dim)
    tables = []
    for name, table in (("cos", cos), ("sin", sin)):
        # A table for all features is read head by head, as one for a single head is.
        by_head = table.unflatten(-1, (-1, head_dim)) if table.shape[-1] == num_features else table
        if by_head.shape[-1] != head_dim or not _broadcasts(by_head, heads):
            raise ValueError(
                f"{name} {list(table.shape)} must broadcast to {list(heads)} or {list(x.shape)}; "
                "give it a dimension of size 1 for the heads"
            )
        tables.append(by_head)
    if why_plain(x, *tables, weight, bias) is None:
        return _function("rotary", "NormRotary")(x, *tables, weight, bias, order, eps, pairs, rounds)
    return plain.norm_rotary(x, tables[0], tables[1], weight, bias, order, eps, pairs, rounds)


def explain_kernel(x: Tensor, *others: Tensor | None) -> str:
    """Which version a call with x [..., C] and further operands runs, and why, in words."""
    reason = why_plain(x, *others)
    return "Triton kernel" if reason is None else f"plain PyTorch: {reason}"


def why_plain(x: Tensor, *others: Tensor | None) -> str | None:
    """Why no kernel takes these operands; None if one does.

    x: [..., C]; the others broadcast to it.
    """
    tensors = [x, *(t for t in others if t is not None)]
    for tensor in tensors:
        watched = why_single_operations(tensor)
        if watched is not None:
            return watched
        if tensor.dtype not in (*FLOATS, torch.float64):
            return f"no kernel is for {tensor.dtype}"
        if tensor.dim() == 0:
            return "an operand has no dimension"
        if tensor.device != x.device:
            return f"operands are on {x.device} and on {tensor.device}"
    if x.shape[-1] > _MOST_FEATURES:
        return f"{x.shape[-1]} features are more than the {_MOST_FEATURES} that one program holds"
    if x.numel() >= _MOST_ROWS * x.shape[-1] > 0:
        return f"rows are numbered up to {_MOST_ROWS:,}"
    return _why_unavailable(x.device.type)


def why_single_operations(x: object) -> str | None:
    """What acts on the single operations of a call, so that it has to get them; None if nothing but autograd does."""
    if type(x) not in (Tensor, nn.Parameter):
        return f"{type(x).__name__} is not a plain tensor"
    assert isinstance(x, Tensor)
    if x.is_meta:
        return "a tensor on meta has no values"
    if torch.compiler.is_compiling():
        return "torch.compile fuses the single operations itself"
    if torch.jit.is_tracing():
        return "a tracer records single operations"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast chooses the dtype of single operations"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func acts on single operations"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation acts on single operations"
    return None


@cache
def _why_unavailable(device: str) -> str | None:
    """Looked up once: whether Triton is interpreted is settled when the kernels are defined."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}); pip install 'opensora-accel[kernels]'"
    is_interpreted = not isinstance(_kernels("norm")._forward, triton.runtime.JITFunction)
    if device == "cuda" or (device == "cpu" and is_interpreted):
        return None
    hint = (
        "; TRITON_INTERPRET=1, set before Triton is imported, would interpret them" if device == "cpu" else ""
    )
    return f"the kernels are for CUDA, not for {device}{hint}"


@cache
def _kernels(name: str) -> Any:
    """A module of kernels, which imports Triton."""
    return importlib.import_module(f"shardformer.modeling.kernels.{name}")


@cache
def _function(module: str, name: str) -> Any:
    return getattr(_kernels(module), name).apply


def _check_rounds(rounds: str) -> None:
    if rounds not in get_args(Rounds):
        raise ValueError(f"rounds={rounds!r} is unknown; use one of {', '.join(get_args(Rounds))}")


def _check_features(x: Tensor, name: str, operand: Tensor | None) -> None:
    if operand is not None and operand.shape != x.shape[-1:]:
        raise ValueError(f"{name} {list(operand.shape)} must have the features of x {list(x.shape)}")


def _over_tokens(x: Tensor, name: str, operand: Tensor | None) -> Tensor | None:
    """[B, C] as [B, 1, C]; what broadcasts to x [B, ..., C] as it is."""
    if operand is not None and operand.dim() == 2 and x.dim() > 2:
        operand = operand.reshape(operand.shape[0], *[1] * (x.dim() - 2), operand.shape[1])
    if operand is not None and not _broadcasts(operand, x.shape):
        raise ValueError(f"{name} {list(operand.shape)} must broadcast to x {list(x.shape)}")
    return operand


def _broadcasts(operand: Tensor, shape: tuple[int, ...]) -> bool:
    return operand.dim() <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(reversed(operand.shape), reversed(shape), strict=False)
    )
