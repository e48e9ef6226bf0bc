"""What only runs beside an accelerator, or under a launcher, made to run on CPU ranks for a proof.

diffusers' `enable_parallelism` divides by the number of accelerators, and its ring needs a kernel that returns the
log-sum-exp, of which it has none for a CPU (0.42.1). Here a CPU counts as one accelerator, and torch's CPU flash
kernel stands in the place of the CUDA one: same layouts, same saved tensors, so that all around it is diffusers' own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from opensora_accel.verify.run import Run


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
            for name, function in _KERNELS.items():
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
    """`_native_flash_attention_forward_op` with the CPU's kernel: [B, S, H, D], log-sum-exp [B, S, H]."""
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
    """`_native_flash_attention_backward_op` with the CPU's kernel; `replaced` are the ring's tensors of this step."""
    names = ("query", "key", "value", "out", "lse")
    saved = dict(zip(names, ctx.saved_tensors, strict=True)) | replaced
    q, k, v, out, lse = (saved[name].transpose(1, 2).contiguous() for name in names)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out.transpose(1, 2).contiguous(),
        q,
        k,
        v,
        out,
        lse,
        ctx.dropout_p,
        ctx.is_causal,
        scale=ctx.scale,
    )
    return tuple(gradient.transpose(1, 2).contiguous() for gradient in gradients)


_KERNELS = {
    "_native_flash_attention_forward_op": cpu_flash_forward,
    "_native_flash_attention_backward_op": cpu_flash_backward,
}
