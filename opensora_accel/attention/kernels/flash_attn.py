"""The flash-attn library, versions 2 (2.7 and newer) and 3, where it is installed.

Source: arXiv:2307.08691, arXiv:2407.08608. Both are called through the functions below their autograd, which take the
log-sum-exp as an argument.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from opensora_accel.attention.kernels.base import Grads, Problem, Scores


@lru_cache
def _load(module: str) -> Any:
    """The module, or the error that importing it gave."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch fails in its own ways
        return error


class _FlashAttnKernel:
    """What the two versions share: [B, S, H, D] as it is, grouped heads, fp16 and bf16, no key mask."""

    name = ""
    _module = ""

    def refuses(self, problem: Problem) -> str | None:
        if problem.device.type != "cuda":
            return f"it runs on CUDA, the tensors are on {problem.device.type}"
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"it takes fp16 or bf16, not {problem.dtype}"
        if problem.masked:
            return "it takes no key mask"
        if problem.head_dim != problem.value_dim or problem.head_dim % 8 or problem.head_dim > 256:
            return f"it needs equal head dims, a multiple of 8 up to 256, not {problem.head_dim}, {problem.value_dim}"
        return self._unusable(problem)

    def _unusable(self, problem: Problem) -> str | None:
        module = _load(self._module)
        return f"{self._module} cannot be imported ({module})" if isinstance(module, Exception) else None


class FlashAttn2Kernel(_FlashAttnKernel):
    name = "flash-attn 2"
    _module = "flash_attn.flash_attn_interface"

    def _unusable(self, problem: Problem) -> str | None:
        if torch.cuda.get_device_capability(problem.device) < (8, 0):
            return "it needs an Ampere GPU or a newer one"
        unusable = super()._unusable(problem)
        if unusable is None:
            # From 2.7 on the functions below autograd are operators of torch, with these arguments.
            version = importlib.import_module("flash_attn").__version__
            if tuple(int(part) for part in version.split(".")[:2]) < (2, 7):
                return f"flash-attn {version} has another interface; install 2.7 or newer"
        return unusable

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """[B, S, H, D] → output [B, S_q, H, D], log-sum-exp [B, H, S_q]."""
        out, lse, *_ = _load(self._module)._flash_attn_forward(
            q, k, v, **_options(scores), return_softmax=False
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        """grad, out: [B, S_q, H, D]; lse: [B, H, S_q] → gradients [B, S, H, D] of q, k and v."""
        # The kernel writes into what it is given.
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        deterministic = torch.are_deterministic_algorithms_enabled()
        _load(self._module)._flash_attn_backward(
            *(grad, q, k, v, out, lse.contiguous(), *grads),
            **_options(scores),
            deterministic=deterministic,
        )
        return grads


def _options(scores: Scores) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": scores.scale,
        "causal": scores.causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


class FlashAttn3Kernel(_FlashAttnKernel):
    name = "flash-attn 3"
    _module = "flash_attn_interface"

    def _unusable(self, problem: Problem) -> str | None:
        if torch.cuda.get_device_capability(problem.device)[0] != 9:
            return "it runs on Hopper"
        return super()._unusable(problem)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """[B, S, H, D] → output [B, S_q, H, D], log-sum-exp [B, H, S_q]."""
        out, lse, *_ = _load(self._module)._flash_attn_forward(
            q, k, v, softmax_scale=scores.scale, causal=scores.causal
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        """grad, out: [B, S_q, H, D]; lse: [B, H, S_q] → gradients [B, S, H, D] of q, k and v."""
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _load(self._module)._flash_attn_backward(
            *(grad, q, k, v, out, lse.contiguous()),
            dq=grads[0],
            dk=grads[1],
            dv=grads[2],
            softmax_scale=scores.scale,
            is_causal=scores.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grads
