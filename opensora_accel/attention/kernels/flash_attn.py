"""The flash-attn library, versions 2 and 3, where it is installed.

Source: arXiv:2307.08691, arXiv:2407.08608. Both are called through the functions below their autograd, which take the
log-sum-exp as an argument. These are nobody's public interface, and have changed with the releases:

    flash-attn 2.6       functions; the window is a pair; forward returns eight tensors
    2.7 and 2.8          operators of torch; the window is two numbers; forward returns four
    3, with flash-attn 2.7.4    functions without defaults; sink_token_length
    3, with 2.8                 functions without defaults; qv and attention_chunk
    3, since November 2025      operators with defaults; backward says is_causal

So they are called by the names of their parameters: those that we know get our values, and any other one that has no
default makes the release unknown.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from opensora_accel.attention.kernels.base import Grads, Problem, Scores, dense_rows, is_deterministic

# Parameters of what is not asked for: packed samples, caches, 8-bit numbers. They are None.
_ABSENT = """
alibi_slopes rng_state k_new v_new qv out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k sequed_q
sequed_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale
k_descale v_descale
"""
# What their parameters are given that have no default and that we have nothing to say about.
_NEUTRAL: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "return_softmax": False,
    **dict.fromkeys(_ABSENT.split()),
}


@dataclass(frozen=True)
class _Function:
    """One of their functions, and its parameters: whether each has a default."""

    call: Callable[..., Any]
    parameters: dict[str, bool]

    @classmethod
    def of(cls, call: Callable[..., Any]) -> _Function:
        # An operator made by `torch.library.custom_op` takes anything by its Python signature.
        if (operator := getattr(call, "_opoverload", None)) is not None:
            return cls(call, {a.name: a.has_default_value() for a in operator._schema.arguments})
        parameters = inspect.signature(call).parameters.values()
        return cls(call, {p.name: p.default is not p.empty for p in parameters})

    def unknown(self, ours: set[str]) -> str | None:
        """What is wrong with its parameters, if we have values for `ours`."""
        if missing := sorted(ours - set(self.parameters)):
            return f"has no parameter {missing[0]}"
        known = ours | set(_NEUTRAL)
        unknown = [
            name for name, has_default in self.parameters.items() if name not in known and not has_default
        ]
        return f"wants {unknown[0]}" if unknown else None

    def __call__(self, **ours: Any) -> Any:
        """Runs it on tensors [B, S, H, D] and options, all by name."""
        unsaid = [
            name for name, has_default in self.parameters.items() if not has_default and name not in ours
        ]
        return self.call(**{name: _NEUTRAL[name] for name in unsaid}, **ours)


@dataclass(frozen=True)
class _Release:
    """What was found of a version: both functions and how to call them, or why they are of no use."""

    name: str
    problem: str | None = None
    forward: Any = None
    backward: Any = None
    # Version 3 has called it both `causal` and `is_causal` in backward.
    backward_causal: str = "causal"


_FORWARD = {"q", "k", "v", "softmax_scale", "causal"}
_BACKWARD = {"dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "softmax_scale", "deterministic"}


@lru_cache
def _find(module: str, distributions: tuple[str, ...], remedy: str) -> _Release:
    """The release that `import module` gives, asked for its version and for its signatures."""
    try:
        library = importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch fails in its own ways
        return _Release("", f"{module} cannot be imported ({error})")
    name = _version(module, distributions)
    try:
        forward, backward = (
            _Function.of(getattr(library, f"_flash_attn_{half}")) for half in ("forward", "backward")
        )
    except AttributeError:
        return _Release(name, f"{name} has no functions below its autograd; {remedy}")
    causal = "is_causal" if "is_causal" in backward.parameters else "causal"
    for half, function, ours in (
        ("forward", forward, _FORWARD),
        ("backward", backward, {*_BACKWARD, causal}),
    ):
        if wrong := function.unknown(ours):
            return _Release(name, f"{name} has another interface: its {half} {wrong}; {remedy}")
    is_operator = hasattr(forward.call, "_opoverload")
    window = "a pair" if "window_size" in forward.parameters else "two numbers"
    described = f"{name}, {'operators' if is_operator else 'functions'}, the window as {window}"
    return _Release(described, None, forward, backward, causal)


def _version(module: str, distributions: tuple[str, ...]) -> str:
    """The name and version of the package that holds the module."""
    version = getattr(importlib.import_module(module.partition(".")[0]), "__version__", None)
    for distribution in distributions:
        try:
            version = version or importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{distributions[0]} {version or 'of an unknown version'}"


class FlashAttnKernel:
    """What the two versions share: [B, S, H, D] as it is, grouped heads, fp16 and bf16, no key mask."""

    name = ""
    _module = ""
    _distributions: tuple[str, ...] = ()
    _remedy = ""

    def refuses(self, problem: Problem) -> str | None:
        if problem.device.type != "cuda":
            return f"it runs on CUDA, the tensors are on {problem.device.type}"
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"it takes fp16 or bf16, not {problem.dtype}"
        if problem.masked:
            return "it takes no key mask"
        if problem.head_dim != problem.value_dim or problem.head_dim % 8 or problem.head_dim > 256:
            return f"it needs equal head dims, a multiple of 8 up to 256, not {problem.head_dim}, {problem.value_dim}"
        return self._unfit_gpu(torch.cuda.get_device_capability(problem.device)) or self._release().problem

    def release(self) -> str:
        """Which release was found, and its interface."""
        return self._release().name

    def _unfit_gpu(self, capability: tuple[int, int]) -> str | None:
        raise NotImplementedError

    def _release(self) -> _Release:
        return _find(self._module, self._distributions, self._remedy)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """[B, S, H, D] → output [B, S_q, H, D], log-sum-exp [B, H, S_q]."""
        # Releases before the operators of torch see to dense rows themselves.
        q, k, v = map(dense_rows, (q, k, v))
        outputs = self._release().forward(q=q, k=k, v=v, softmax_scale=scores.scale, causal=scores.causal)
        # 2.6 returns its inputs too: out, q, k, v, out_padded, lse, scores, rng_state. Later: out, lse, …
        return outputs[0], outputs[5 if len(outputs) == 8 else 1]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        """grad, out: [B, S_q, H, D]; lse: [B, H, S_q] → gradients [B, S, H, D] of q, k and v."""
        grad, q, k, v, out = map(dense_rows, (grad, q, k, v, out))
        # The kernel writes into what it is given, and reads log-sum-exps through their pointer.
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        release = self._release()
        release.backward(
            **{"dout": grad, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse.contiguous()},
            **dict(zip(("dq", "dk", "dv"), grads, strict=True)),
            **{"softmax_scale": scores.scale, release.backward_causal: scores.causal},
            deterministic=is_deterministic(),
        )
        return grads


class FlashAttn2Kernel(FlashAttnKernel):
    """Known releases: 2.6, 2.7 and 2.8."""

    name = "flash-attn 2"
    _module = "flash_attn.flash_attn_interface"
    _distributions = ("flash-attn", "flash_attn")
    _remedy = "install flash-attn 2.6, 2.7 or 2.8"

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
