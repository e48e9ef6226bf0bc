"""flash-attn's functions, described once: their arguments, and the same functions on a CPU.

Models call `flash_attn_func` on [B, S, H, D], or `flash_attn_varlen_func` on packed tokens [T, H, D], in which
sample i has the tokens from `cu_seqlens[i]` to `cu_seqlens[i + 1]`. With `causal`, the last query and the last key are
of one place: 3 queries see of 5 keys the first 3, 4 and 5. torch's flash kernel for CPUs computes the same.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# Arguments that say how a kernel runs, or that follow from others.
_FREE = (
    "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv", "max_seqlen", "deterministic", "version", "fa_version",
    "attn_mode", "split_attn",
)  # fmt: skip
# Values that ask for nothing: no window, no slopes, no cap.
_NOTHING = (None, False, 0, 0.0, -1, (-1, -1), [-1, -1])


def changes_attention(name: str, value: Any) -> bool:
    """Whether an argument beside q, k, v, scale, causal and lengths changes what attention computes."""
    return name not in _FREE and (isinstance(value, Tensor) or value not in _NOTHING)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_attn_probs: bool = False,
    **options: Any,
) -> Any:
    """`flash_attn.flash_attn_func` on a CPU.

    Args:
        q, k, v: [B, S, H, D]; keys and values may have fewer heads and another S.

    Returns:
        [B, S, H, D]; with `return_attn_probs` also the log-sum-exp [B, H, S] and None.

    Raises:
        ValueError: an option that has no stand-in.
    """
    for name, value in (options | {"dropout_p": dropout_p}).items():
        if changes_attention(name, value):
            raise ValueError(
                f"{name}={value!r} of flash_attn has no stand-in on a CPU; leave it out of the step, or let the model "
                "attend by torch's scaled_dot_product_attention"
            )
    # torch's own causal mask is aligned at the first query and key: the same where there are as many.
    is_square_causal = causal and q.size(1) == k.size(1) and tuple(window_size) == (-1, -1)
    bias = None if is_square_causal else _bias(q, k.size(1), causal, window_size)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(each.transpose(1, 2) for each in (q, k, v)),
        is_causal=is_square_causal,
        attn_mask=bias,
        scale=softmax_scale,
    )
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


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
    return_attn_probs: bool = False,
    **options: Any,
) -> Any:
    """`flash_attn.flash_attn_varlen_func` on a CPU: one call of `flash_attn_func` for each of B samples.

    Args:
        q: [N_q, H, D], the samples' tokens one after another.
        k, v: [N_kv, H_kv, D].
        cu_seqlens_q, cu_seqlens_k: [B + 1], where each sample begins, and at the end N_q and N_kv.
        max_seqlen_q, max_seqlen_k: not needed here.

    Returns:
        [N_q, H, D]; with `return_attn_probs` also the log-sum-exp [H, N_q] and None.

    Raises:
        ValueError: an option that has no stand-in.
    """
    outs, lses = [], []
    for of_q, of_k in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        one = [each[start:end][None] for each, (start, end) in ((q, of_q), (k, of_k), (v, of_k))]
        (out,), (lse,), _ = flash_attn_func(
            one[0], one[1], one[2], dropout_p, softmax_scale, causal, window_size, True, **options
        )
        outs.append(out)
        lses.append(lse)
    whole = torch.cat(outs)
    return (whole, torch.cat(lses, dim=-1), None) if return_attn_probs else whole


def _bias(q: Tensor, num_keys: int, causal: bool, window: tuple[int, int]) -> Tensor | None:
    """[S, keys]: minus infinity where a query does not see a key."""
    left, right = window[0], 0 if causal else window[1]
    if left < 0 and right < 0:
        return None
    num_queries = q.size(1)
    # at: each query's place among the keys
    at = torch.arange(num_queries)[:, None] + num_keys - num_queries
    distance = torch.arange(num_keys)[None] - at
    hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return torch.zeros(num_queries, num_keys, dtype=q.dtype).masked_fill(hidden, -torch.inf)


@contextlib.contextmanager
def flash_attn_stand_in() -> Iterator[None]:
    """Within it `import flash_attn` works where the package is not installed; what was imported by then stays."""
    names = ("flash_attn", "flash_attn.flash_attn_interface")
    if names[0] in sys.modules or importlib.util.find_spec(names[0]) is not None:
        yield
        return
    # With a spec, as `importlib.util.find_spec` asks whether the package is there.
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
