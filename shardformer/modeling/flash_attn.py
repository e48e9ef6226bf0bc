"""Attention functions in the manner of flash-attn, redirected to sequence-parallel attention.

Models call `flash_attn_func(q, k, v, …)` on [B, S, H, D], `flash_attn_varlen_func` on packed tokens [B·S, H, D] with
`cu_seqlens_k`, or a function of their own with the lengths of the samples (`k_lens`). All of them say the same: how
many keys of a sample may be seen, counted from its first. Of two samples of 6 keys, the second of which has 4:

    k_lens = [6, 4]            cu_seqlens_k = [0, 6, 6, 10, 12]: of each sample what is seen, then its padding

Under sequence parallelism rank 0 of 2 has 3 keys of each sample, and these numbers still speak of whole samples. They
are read as such (`Lengths`), and become a mask over all keys. Numbers that could be either are refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from opensora_accel.flash_attn import changes_attention

# What sequence-parallel attention knows of, by the names that functions have for it.
_OPTIONS = {
    "dropout": ("dropout_p", "dropout"),
    "scale": ("softmax_scale", "scale"),
    "causal": ("causal", "is_causal"),
    "q_lens": ("q_lens",),
    "k_lens": ("k_lens", "kv_lens"),
    "cu_q": ("cu_seqlens_q",),
    "cu_k": ("cu_seqlens_k", "cu_seqlens_kv", "cu_seqlens"),
    "dtype": ("dtype",),
}


@dataclass(frozen=True)
class Lengths:
    """How many keys of each sample may be seen: a mask in the making."""

    visible: tuple[int, ...] | None
    # Keys of a sample with its padding, where the function got that too.
    total: int | None = None
    # How many queries each sample has, where the function got that: they must all be there.
    queries: tuple[int, ...] | None = None


def redirect_flash_attn(
    original: Callable[..., Any], running: Callable[[], Callable[..., Tensor] | None]
) -> Callable[..., Any]:
    """A function that calls `running()` where that is not None, and `original` elsewhere.

    Arguments may come by position or by name; q, k and v are the first three, [B, S, H, D] or packed [B·S, H, D]. One
    argument may hold all three: a list of them, or a tensor [B, S, 3, H, D] as in flash-attn's `…_qkvpacked_func`.

    Raises:
        ValueError: from the returned function, for an argument that sequence-parallel attention does not have.
    """
    signature = inspect.signature(original)
    rest = next((name for name, p in signature.parameters.items() if p.kind == p.VAR_KEYWORD), None)

    @functools.wraps(original)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        attend = running()
        # The function serves other models, and other modules of this one, as before.
        if attend is None:
            return original(*args, **kwargs)
        given = dict(signature.bind(*args, **kwargs).arguments)
        # What the function takes as **kwargs was given by name all the same.
        given |= given.pop(rest, {}) if rest else {}
        q, k, v = _projected(original.__name__, given)
        options = {name: _take(given, names, signature) for name, names in _OPTIONS.items()}
        for name, value in given.items():
            if changes_attention(name, value):
                shown = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"{original.__name__} got {name}={shown}, which sequence-parallel attention does not have; "
                    "leave it out, or keep this model on one device a sequence"
                )
        lengths, packed = _lengths(original.__name__, options), q.dim() == 3
        if packed and (lengths is None or lengths.visible is None):
            raise ValueError(f"{original.__name__} got packed tokens {tuple(q.shape)} without cu_seqlens_k")
        dtype, asked = options["dtype"], q.dtype
        if dtype is not None:  # as Wan's own code: what is not half already is cast for the kernel, and back
            half = (torch.float16, torch.bfloat16)
            q, k, v = (tensor if tensor.dtype in half else tensor.to(dtype) for tensor in (q, k, v))
        if packed:
            assert lengths is not None and lengths.visible is not None
            q, k, v = (tensor.unflatten(0, (len(lengths.visible), -1)) for tensor in (q, k, v))
        causal, dropout = bool(options["causal"]), options["dropout"] or 0.0
        out = attend(q, k, v, dropout, mask=lengths, causal=causal, scale=options["scale"]).to(asked)
        return out.flatten(0, 1) if packed else out

    return kernel


def _projected(name: str, given: dict[str, Any]) -> list[Tensor]:
    """q, k and v, taken out of the arguments."""
    first = given.pop(next(iter(given)))
    if isinstance(first, (list, tuple)) and len(first) == 3:
        return list(first)
    if "packed" not in name:
        return [first, *(given.pop(each) for each in list(given)[:2])]
    dim = first.dim() - 3  # [B, S, 3, H, D], or [B·S, 3, H, D]
    if "qkvpacked" not in name or first.size(dim) != 3:
        raise ValueError(
            f"{name} got a tensor {tuple(first.shape)}, and sequence-parallel attention takes q, k and v, or all three "
            "in one tensor [B, S, 3, H, D]; call the function of flash-attn that takes them apart"
        )
    return list(first.unbind(dim))


def _take(given: dict[str, Any], names: tuple[str, ...], signature: inspect.Signature) -> Any:
    """The value given under one of the names, or the function's own default for it."""
    for name in names:
        if name in given:
            return given.pop(name)
        if name in signature.parameters and signature.parameters[name].default is not inspect.Parameter.empty:
            return signature.parameters[name].default
    return None


def _lengths(name: str, options: dict[str, Any]) -> Lengths | None:
    if options["cu_q"] is not None and _numbers(options["cu_q"]) != _numbers(options["cu_k"]):
        raise ValueError(
            f"{name} got cu_seqlens_q that are not cu_seqlens_k; sequence-parallel attention takes samples whose "
            "queries and keys are the same tokens"
        )
    queries = None if options["q_lens"] is None else _numbers(options["q_lens"])
    if options["k_lens"] is not None:
        return Lengths(_numbers(options["k_lens"]), queries=queries)
    if options["cu_k"] is None:
        return None if queries is None else Lengths(None, queries=queries)
    segments = tuple(end - start for start, end in pairwise(_numbers(options["cu_k"])))
    if len(set(segments)) == 1:
        return Lengths(segments, segments[0], queries)
    # Two segments for a sample: what is seen of it, and the padding behind.
    pairs = list(zip(segments[::2], segments[1::2], strict=False))
    totals = {sum(pair) for pair in pairs}
    if len(segments) % 2 or len(totals) != 1:
        raise ValueError(
            f"{name} got cu_seqlens_k of samples of {segments} tokens; sequence-parallel attention takes samples of "
            "one length, or each as what is seen and its padding: pad the batch"
        )
    return Lengths(tuple(seen for seen, _padding in pairs), totals.pop(), queries)


def _numbers(values: Any) -> tuple[int, ...]:
    """Whole numbers of a list or tensor, none of None.

    A tensor on a GPU makes the host wait, as in the functions themselves.
    """
    numbers = values.tolist() if isinstance(values, Tensor) else values or ()
    return tuple(int(value) for value in numbers)
