"""Attention written out, for whatever no fused kernel takes: fp64 on a GPU, values wider than keys, meta tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from opensora_accel.attention.kernels.base import Grads, Problem, Scores, expand_heads, sum_groups


class PlainKernel:
    """The definition, in fp32 (fp64 where the inputs are). Holds one S_q × S_kv matrix a head.

    Autocast is off within: it leaves fused kernels alone, but would round the operands of these products to bf16.
    """

    name = "plain"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """[B, S, H, D] → output [B, S_q, H, D], log-sum-exp [B, H, S_q]."""
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = _widened(q, k, v)
            logits = _logits(q, expand_heads(k, q.size(2)), scores)
            lse = logits.logsumexp(-1)
            weights = (logits - lse.unsqueeze(-1)).exp_()  # [B, H, S_q, S_kv], rows sum to 1
            return torch.einsum("bhst,bthd->bshd", weights, expand_heads(v, q.size(2))), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        """grad, out: [B, S_q, H, D]; lse: [B, H, S_q] → gradients [B, S, H, D] of q, k and v."""
        with torch.autocast(q.device.type, enabled=False):
            grad, q, k, v, out = _widened(grad, q, k, v, out)
            num_heads, num_kv_heads = q.size(2), k.size(2)
            k, v = expand_heads(k, num_heads), expand_heads(v, num_heads)
            # With the log-sum-exp of all blocks these are this block's columns of the whole row's weights.
            weights = (_logits(q, k, scores) - lse.unsqueeze(-1)).exp_()
            grad_v = torch.einsum("bhst,bshd->bthd", weights, grad)
            # What softmax's backward takes away from every score of a row; out is the whole row's.
            row = (grad * out).sum(-1).transpose(1, 2).unsqueeze(-1)
            grad_logits = weights * (torch.einsum("bshd,bthd->bhst", grad, v) - row) * scores.scale
            grad_q = torch.einsum("bhst,bthd->bshd", grad_logits, k)
            grad_k = torch.einsum("bhst,bshd->bthd", grad_logits, q)
            return grad_q, sum_groups(grad_k, num_kv_heads), sum_groups(grad_v, num_kv_heads)


def _widened(*tensors: Tensor) -> list[Tensor]:
    """The tensors in fp32, or in fp64 where the first one is."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return [tensor.to(dtype) for tensor in tensors]


def _logits(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    """[B, H, S_q, S_kv], −inf where a key is not seen."""
    logits = torch.einsum("bshd,bthd->bhst", q * scores.scale, k)
    if scores.mask is not None:
        logits = logits.masked_fill(~scores.mask[:, None, None, :], float("-inf"))
    if scores.causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(future, float("-inf"))
    return logits
