"""The flash-attn library, versions 2 and 3, where it is installed.

Source: arXiv:2307.08691, arXiv:2407.08608. Both are called through the functions below their autograd, which take the
log-sum-exp as an argument and have changed with the releases (`releases.py`):

    flash-attn 2.6       functions; the window is a pair; forward returns eight tensors
    2.7 and 2.8          operators of torch; the window is two numbers; forward returns four
    3, with flash-attn 2.7.4    functions without defaults; sink_token_length
    3, with 2.8                 functions without defaults; qv and attention_chunk
    3, since November 2025      operators with defaults; backward says is_causal
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opensora_accel.attention.kernels.base import Grads, Problem, Scores, dense_rows, is_deterministic
from opensora_accel.attention.kernels.releases import Release, find_release, unfit_operands

_FORWARD = frozenset({"q", "k", "v", "softmax_scale", "causal"})
_BACKWARD = _FORWARD | {"dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic"}
# Where samples have different lengths.
_LENGTHS = frozenset({"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"})


def outputs_of(release: Release, **given: Any) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, as its forward lays them out."""
    outputs = release.forward(**given)
    # 2.6 returns its inputs too: out, q, k, v, out_padded, lse, scores, rng_state. Later: out, lse, …
    return outputs[0], outputs[5 if len(outputs) == 8 else 1]


def gradients_of(release: Release, operands: dict[str, Any], scale: float, causal: bool) -> Grads:
    """The gradients of q, k and v by its backward, which writes into what it is given."""
    grads = torch.empty_like(operands["q"]), torch.empty_like(operands["k"]), torch.empty_like(operands["v"])
    release.backward(
        **operands,
        **dict(zip(("dq", "dk", "dv"), grads, strict=True)),
        **{"softmax_scale": scale, "causal": causal, "deterministic": is_deterministic()},
    )
    return grads


class FlashAttnKernel:
    """What the two versions share: [B, S, H, D] as it is, grouped heads, fp16 and bf16, no key mask."""

    name = ""
    _module = ""
    _distributions: tuple[str, ...] = ()
    _remedy = ""
    _varlen_functions = "_flash_attn"

    def refuses(self, problem: Problem) -> str | None:
        if unfit := unfit_operands(problem, 256):
            return unfit
        return self._unfit_gpu(torch.cuda.get_device_capability(problem.device)) or self._release().problem

    def release(self) -> str:
        """Which release was found, and its interface."""
        return self._release().name

    def varlen_release(self) -> Release:
        """The functions for samples of different lengths, [rows, H, D] one behind the other; lse is [H, rows]."""
        return self._found(self._varlen_functions, _LENGTHS)

    def _unfit_gpu(self, capability: tuple[int, int]) -> str | None:
        raise NotImplementedError

    def _release(self) -> Release:
        return self._found("_flash_attn", frozenset())

    def _found(self, functions: str, lengths: frozenset[str]) -> Release:
        library = self._module, self._distributions, self._remedy
        return find_release(*library, functions, _FORWARD | lengths, _BACKWARD | lengths)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """[B, S, H, D] → output [B, S_q, H, D], log-sum-exp [B, H, S_q]."""
        # Releases before the operators of torch see to dense rows themselves.
        q, k, v = map(dense_rows, (q, k, v))
        return outputs_of(self._release(), q=q, k=k, v=v, softmax_scale=scores.scale, causal=scores.causal)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        """grad, out: [B, S_q, H, D]; lse: [B, H, S_q] → gradients [B, S, H, D] of q, k and v."""
        grad, q, k, v, out = map(dense_rows, (grad, q, k, v, out))
        # The kernel reads log-sum-exps through their pointer.
        operands = {"dout": grad, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse.contiguous()}
        return gradients_of(self._release(), operands, scores.scale, scores.causal)


class FlashAttn2Kernel(FlashAttnKernel):
    """Known releases: 2.6, 2.7 and 2.8."""

    name = "flash-attn 2"
    _module = "flash_attn.flash_attn_interface"
    _distributions = ("flash-attn", "flash_attn")
    _remedy = "install flash-attn 2.6, 2.7 or 2.8"
    _varlen_functions = "_flash_attn_varlen"

    def _unfit_gpu(self, capability: tuple[int, int]) -> str | None:
        return "it needs an Ampere GPU or a newer one" if capability < (8, 0) else None


class FlashAttn3Kernel(FlashAttnKernel):
    """Known releases: those of flash-attn 2.7.4 and 2.8, and the operators of torch since."""

    name = "flash-attn 3"
    _module = "flash_attn_interface"
    _distributions = ("flash-attn-3", "flash_attn_3")
    _remedy = "install hopper/ of flash-attention v2.8.3 or newer"

    def _unfit_gpu(self, capability: tuple[int, int]) -> str | None:
        return None if capability[0] == 9 else "it runs on Hopper"
