"""torch's fused kernel for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from opensora_accel.attention.kernels.base import Grads, Problem, Scores, dense_rows, key_bias

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlashKernel:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: any mask, grouped heads, fp64 too.

    bf16 and fp16 are computed in fp32. The kernel's own low precision rounds the output of every block, which alone
    raises the mean error of merged blocks to 1.1–1.4 times that of one call (16 blocks, torch 2.13, 2026-11); its
    price is 2.3 times the forward's time where the CPU multiplies bf16 itself (AMX), nothing elsewhere.
    """

    name = "aten flash (CPU)"

    def refuses(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return f"it runs on the CPU, the tensors are on {problem.device.type}"
        if problem.head_dim != problem.value_dim:
            return f"it needs values as wide as keys, they are {problem.value_dim} and {problem.head_dim}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """[B, S, H, D] → output [B, S_q, H, D], log-sum-exp [B, H, S_q]."""
        q, k, v = (_heads_first(tensor) for tensor in (q, k, v))
        out, lse = _forward(q, k, v, 0.0, scores.causal, attn_mask=_bias(scores, q), scale=scores.scale)
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        """grad, out: [B, S_q, H, D]; lse: [B, H, S_q] → gradients [B, S, H, D] of q, k and v."""
        grad, q, k, v, out = (_heads_first(tensor) for tensor in (grad, q, k, v, out))
        options = {"attn_mask": _bias(scores, q), "scale": scores.scale}
        grads = _backward(grad, q, k, v, out, lse, 0.0, scores.causal, **options)
        grad_q, grad_k, grad_v = (tensor.transpose(1, 2) for tensor in grads)
        return grad_q, grad_k, grad_v


def _heads_first(tensor: Tensor) -> Tensor:
    """[B, S, H, D] → [B, H, S, D], in fp32 unless it is fp64."""
    tensor = dense_rows(tensor).transpose(1, 2)  # [B, H, S, D], a view: the other dims may have any strides
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _bias(scores: Scores, q: Tensor) -> Tensor | None:
    """The key mask as a bias [B, 1, 1, S_kv] in the dtype of q; None without a mask."""
    return None if scores.mask is None else key_bias(scores.mask, q.dtype)[:, None, None, :]
