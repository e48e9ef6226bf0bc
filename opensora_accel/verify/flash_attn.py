"""A stand-in for `flash_attn`, which needs a GPU: the same names, layouts and masks, by torch's own attention."""

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
from torch.nn.functional import scaled_dot_product_attention


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
    """[B, S, H, D], of which keys and values may have fewer heads. ValueError for an option that is not known here."""
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
    """[total, H, D]: sequences behind each other, which begin and end at `cu_seqlens`."""
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
