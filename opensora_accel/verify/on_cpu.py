"""What only runs beside an accelerator, or under a launcher, made to run on CPU ranks for a proof.

diffusers' `enable_parallelism` divides by the number of accelerators, and its ring needs a kernel that returns the
log-sum-exp, of which it has none for a CPU (0.42.1). Here a CPU counts as one accelerator, and torch's CPU flash
kernel stands in the place of the CUDA one: same layouts, same saved tensors, so that all around it is diffusers' own.
`flash_attn`, where it is not installed, is torch's own attention.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from opensora_accel.verify.meshes import Run


@contextlib.contextmanager
def accelerator_stand_ins() -> Iterator[None]:
    """Within it, code that needs an accelerator finds one where there is none."""
    if torch.accelerator.is_available():
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.accelerator, "device_count", return_value=1))
        dispatch = sys.modules.get("diffusers.models.attention_dispatch")
        if hasattr(dispatch, "_native_flash_attention_forward_op"):
            for name, function in (
                ("_native_flash_attention_forward_op", cpu_flash_forward),
                ("_native_flash_attention_backward_op", cpu_flash_backward),
            ):
                stack.enter_context(mock.patch.object(dispatch, name, function))
        yield


@contextlib.contextmanager
def without_loss_scaling() -> Iterator[None]:
    """Within it every GradScaler is one that is not enabled: fp64 has nothing to scale, and torch no kernel for it."""

    def ignore(scaler: torch.amp.GradScaler, enabled: bool) -> None:
        vars(scaler)["_enabled"] = enabled  # as it was, afterwards

    never = property(lambda scaler: False, ignore)
    with mock.patch.object(torch.amp.GradScaler, "_enabled", never, create=True):
        yield


@contextlib.contextmanager
def launcher_environment(run: Run) -> Iterator[None]:
    """Within it, the environment that torchrun gives a rank: accelerate and others look nowhere else.

    accelerate remembers for the life of a process what it found; it is made to forget, as the next mesh is another.
    """
    place = {
        "RANK": run.rank,
        "LOCAL_RANK": run.rank,
        "WORLD_SIZE": run.world_size,
        "LOCAL_WORLD_SIZE": run.world_size,
    }
    rest = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in place.items()} | rest):
        try:
            yield
        finally:
            state = sys.modules.get("accelerate.state")
            if state is not None:
                state.AcceleratorState._reset_state(reset_partial_state=True)


def cpu_flash_forward(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Any:
    """`_native_flash_attention_forward_op` with the CPU's kernel.

    Args:
        query, key, value: [B, S, H, D].

    Returns:
        [B, S, H, D], and with `return_lse` the log-sum-exp [B, S, H].
    """
    assert attn_mask is None and not enable_gqa
    q, k, v = (t.transpose(1, 2).contiguous() for t in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, is_causal, scale=scale
    )
    out, lse = out.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.dropout_p, ctx.is_causal, ctx.scale = dropout_p, is_causal, scale
    return (out, lse) if return_lse else out


def cpu_flash_backward(ctx: Any, grad_out: Tensor, *args: Any, **replaced: Tensor) -> tuple[Tensor, ...]:
    """`_native_flash_attention_backward_op` with the CPU's kernel; `replaced` are the ring's tensors of this step.

    All are [B, S, H, D] but the log-sum-exp [B, S, H].
    """
    names = ("query", "key", "value", "out", "lse")
    saved = dict(zip(names, ctx.saved_tensors, strict=True)) | replaced
    of_forward = [saved[name].transpose(1, 2).contiguous() for name in names]
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out.transpose(1, 2).contiguous(), *of_forward, ctx.dropout_p, ctx.is_causal, scale=ctx.scale
    )
    return tuple(gradient.transpose(1, 2).contiguous() for gradient in gradients)


@contextlib.contextmanager
def flash_attn_stand_in() -> Iterator[None]:
    """Within it `import flash_attn` works where the package is not installed; what was imported by then stays."""
    names = ("flash_attn", "flash_attn.flash_attn_interface")
    if names[0] in sys.modules or importlib.util.find_spec(names[0]) is not None:
        yield
        return
    for name in names:
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for function in (flash_attn_func, flash_attn_varlen_func):
            setattr(module, function.__name__, function)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **options: Any,
) -> Tensor:
    """`flash_attn.flash_attn_func` on a CPU: [B, S, H, D]; keys and values may have fewer heads.

    Raises:
        ValueError: an option that has no stand-in.
    """
    _refuse(dropout_p=dropout_p, **options)
    mask = _mask(q.size(1), k.size(1), causal, window_size)
    is_grouped = q.size(2) != k.size(2)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=is_grouped)
    return out.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **options: Any,
) -> Tensor:
    """`flash_attn.flash_attn_varlen_func` on a CPU: [total, H, D], sequences that begin and end at `cu_seqlens`."""
    outs = []
    for of_q, of_k in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        one = [each[start:end][None] for each, (start, end) in ((q, of_q), (k, of_k), (v, of_k))]
        out = flash_attn_func(
            one[0], one[1], one[2], dropout_p, softmax_scale, causal, window_size, **options
        )
        outs.append(out[0])
    return torch.cat(outs)


def _mask(queries: int, keys: int, causal: bool, window: tuple[int, int]) -> Tensor | None:
    """Which keys each query sees; the last query and the last key are of one place."""
    left, right = window
    right = 0 if causal else right
    if left < 0 and right < 0:
        return None
    at = torch.arange(queries)[:, None] + keys - queries
    distance = torch.arange(keys)[None] - at
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def _refuse(**options: Any) -> None:
    known = {"dropout_p", "deterministic", "return_attn_probs", "softcap", "alibi_slopes", "block_table"}
    for name, value in options.items():
        if name not in known or (value and name != "deterministic"):
            raise ValueError(
                f"{name}={value!r} of flash_attn has no stand-in on a CPU; leave it out of the step, or let the model "
                "attend by torch's scaled_dot_product_attention"
            )
