"""What one call of a parallel attention is, found out once, where the call enters.

Every parallel attention needs to know how many queries and keys each rank holds. A caller that knows passes `splits`
and `kv_splits`; then nothing is exchanged, and each rank checks its own call. Otherwise each rank sends three
integers: its number of queries, its number of keys, and a digest of everything that must be equal on all ranks
(dtypes, heads, options).

    rank 0: 4 queries, 4 keys, digest 17     rank 1: 3 queries, 3 keys, digest 17     → splits (4, 3), kv_splits (4, 3)

A rank whose own call is wrong sends −1 as its digest. Where digests differ, or one is −1, all ranks have seen it:
they send each other the calls in words, and all raise the same ValueError before any data is sent. With
OPENSORA_ACCEL_DEBUG=1 the words are compared at every call, also where the sizes are given.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.attention.balance import TokenLayout, check_layout
from opensora_accel.attention.slices import AttentionSlices, Deal
from opensora_accel.communications import Sizes, compare_facts, debug_enabled, exchange_integers

# torch's own, whatever a program has bound to the name in torch.nn.functional.
torch_attention = torch._C._nn.scaled_dot_product_attention

# What is checked of a tensor.
Described = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class AttentionCall:
    """The facts of a call on which all ranks agree; the tensors go beside it."""

    # Every rank's number of queries.
    splits: Sizes
    # Every rank's number of keys.
    kv_splits: Sizes
    # Query i sees keys 0…i of the whole sequence.
    causal: bool = False
    # What scores are multiplied by; None is 1/√D.
    scale: float | None = None
    # Which tokens the ranks of a ring hold.
    layout: TokenLayout = "contiguous"
    # Which queries see which keys, and who holds them.
    slices: Deal | None = None


@dataclass(frozen=True)
class Text:
    """The text tokens of joint attention, whole on every rank.

    q: [B, T, H, D]; k, v: [B, T, H_kv, D]; mask: [B, T].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    # Whether text stands before the video.
    first: bool


def enter_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    groups: Sequence[dist.ProcessGroup],
    *,
    splits: Sequence[int] | None = None,
    kv_splits: Sequence[int] | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: TokenLayout = "contiguous",
    text: Text | None = None,
    slices: AttentionSlices | Deal | None = None,
) -> AttentionCall:
    """Checks a call of parallel attention, and learns the sizes that were not given.

    Args:
        q: [B, S_q/P, H, D]; k, v: [B, S_kv/P, H_kv, D]; mask: [B, S_kv/P].
        groups: from the innermost axis outwards; ranks are numbered with the last one outermost. None: one rank.
        splits, kv_splits: every rank's number of queries and of keys, or None.
        slices: which queries see which keys of all ranks together.

    Raises:
        ValueError: this rank's call is no attention. Where the ranks exchange anything, also if another rank's call is
            no attention, or differs from this one's.
        TypeError: slices of another kind.
    """
    if slices is not None and not isinstance(slices, (AttentionSlices, Deal)):
        raise TypeError(
            f"slices are AttentionSlices, or a deal of them; got {type(slices).__name__}; of a dense mask they are "
            "made by AttentionSlices.from_dense(mask)"
        )
    rank, num_ranks = 0, 1  # within all groups together: with axes of 2 and 3 ranks, rank = inner + 2 · outer
    for group in groups:
        rank += group.rank() * num_ranks
        num_ranks *= group.size()
    # One rank knows all sizes: its own.
    if num_ranks == 1:
        splits, kv_splits = splits or q.shape[1:2], kv_splits or k.shape[1:2]
    # Who gives the sizes vouches for them; then ranks talk in debug mode only.
    are_given = splits is not None and kv_splits is not None
    exchange = _exchange
    if torch.compiler.is_compiling() and not are_given:
        torch._dynamo.graph_break(
            msg="the ranks exchange their sizes here, which no graph can hold; to stay within one, pass splits= and "
            "kv_splits=, every rank's number of tokens (opensora_accel.communications.share_sizes)"
        )
        exchange = torch.compiler.disable(_exchange)  # not at import, as torch's compiler is loaded by it
    if num_ranks > 1 and (not are_given or (not torch.compiler.is_compiling() and debug_enabled())):
        # The call is checked within: an error here alone would leave the others waiting.
        held = exchange(q, k, v, mask, groups, causal, scale, layout, text, slices)
        for name, given, held_sizes in (("splits", splits, held[0]), ("kv_splits", kv_splits, held[1])):
            if given is not None and tuple(given) != held_sizes:
                raise ValueError(f"{name}={tuple(given)} were given, but the ranks hold {held_sizes} tokens")
        splits, kv_splits = held
    assert splits is not None and kv_splits is not None
    if slices is not None and torch.compiler.is_compiling():
        raise ValueError("attention by slices is not traced; call it within torch.compiler.disable")
    # A trace cannot hash its sizes.
    make = _make_call.__wrapped__ if torch.compiler.is_compiling() else _make_call
    tensors = _describe(q, k, v, mask, text)
    options = (causal, scale, layout, slices, text is not None and text.first)
    return make(tensors, rank, num_ranks, tuple(splits), tuple(kv_splits), *options)


@lru_cache(maxsize=1024)
def _make_call(
    tensors: tuple[Described | None, ...],
    rank: int,
    num_ranks: int,
    splits: Sizes,
    kv_splits: Sizes,
    causal: bool,
    scale: float | None,
    layout: TokenLayout,
    slices: AttentionSlices | Deal | None,
    text_first: bool,
) -> AttentionCall:
    """The call on tensors of these shapes and dtypes, checked: once, as every layer and step calls with the same.

    Args:
        rank: this one, of the ranks that the splits are of.
    """
    _check(tensors, scale, layout)
    of_q, of_k = tensors[:2]
    assert of_q is not None and of_k is not None
    for name, sizes, local in (("splits", splits, of_q[0][1]), ("kv_splits", kv_splits, of_k[0][1])):
        if len(sizes) != num_ranks or min(sizes) < 0:
            raise ValueError(
                f"{name}={sizes} must be one size, at least 0, for each of the {num_ranks} ranks"
            )
        if sizes[rank] != local:
            raise ValueError(
                f"{name}={sizes} give rank {rank} {sizes[rank]} tokens, but its tensor has {local}"
            )
    if causal and sum(splits) != sum(kv_splits):
        raise ValueError(
            f"causal attention needs as many queries as keys; got {sum(splits)} and {sum(kv_splits)}; "
            "pass a mask instead"
        )
    if slices is None:
        return AttentionCall(splits, kv_splits, causal, scale, layout)
    if causal or layout != "contiguous":
        raise ValueError(
            f"slices say by themselves what is seen, and a deal who holds it; leave causal={causal} and "
            f"layout={layout!r} out, or pass slices=deal(AttentionSlices.causal(S), P)"
        )
    of_text = [each[0][1] for each in tensors[4:6] if each is not None] or [0, 0]
    dealt = _dealt(slices, splits, kv_splits, (of_text[0], of_text[1]), text_first)
    return AttentionCall(splits, kv_splits, scale=scale, slices=dealt)


def _dealt(
    slices: AttentionSlices | Deal,
    splits: Sizes,
    kv_splits: Sizes,
    of_text: tuple[int, int],
    text_first: bool,
) -> Deal:
    """The slices, and who holds what of them: each rank a run, in order, where nothing else is said.

    Args:
        of_text: queries and keys that all ranks hold.

    Raises:
        ValueError: they are of other numbers of queries and keys.
    """
    mask = slices.mask if isinstance(slices, Deal) else slices
    held = sum(splits) + of_text[0], sum(kv_splits) + of_text[1]
    if (mask.num_queries, mask.num_keys) != held:
        raise ValueError(
            f"the slices are of {mask.num_queries} queries and {mask.num_keys} keys, and the ranks hold {held[0]} "
            f"and {held[1]}{', with text' if any(of_text) else ''}; make them for this sequence"
        )
    if not isinstance(slices, Deal):
        return Deal.in_order(slices, splits, kv_splits, of_text if text_first else (0, 0))
    if (slices.splits, slices.kv_splits) != (splits, kv_splits):
        raise ValueError(
            f"tokens are dealt out as {slices.splits} queries and {slices.kv_splits} keys, and the ranks hold {splits} "
            f"and {kv_splits}; bring the sequence into the deal's order() and cut it into its splits"
        )
    return slices


def autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the dtype that torch.autocast gives to an attention kernel.

    Norms leave q and k in fp32 under autocast, while v is bf16. The cast is at the entry of every attention,
    so that ranks with and without work of their own send one dtype.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]


def _exchange(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    groups: Sequence[dist.ProcessGroup],
    causal: bool,
    scale: float | None,
    layout: str,
    text: Text | None,
    slices: AttentionSlices | Deal | None,
) -> tuple[Sizes, Sizes]:
    """Every rank's number of queries and of keys; the tensors are checked here."""
    # An error is not raised yet: the others would wait in the exchange for this rank.
    problem, digest = "", -1
    facts = _facts(q, k, v, mask, causal, scale, layout, text)
    if slices is not None:
        facts["slices"] = slices.digest, repr(slices)
    try:
        _check(_describe(q, k, v, mask, text), scale, layout)
        digest = zlib.crc32(repr([compared for compared, _ in facts.values()]).encode())
    except ValueError as error:
        problem = str(error)
    rows: list[Sizes] = [(q.size(1), k.size(1), digest) if q.dim() > 1 < k.dim() else (0, 0, -1)]
    for group in groups:
        # Each group passes on what it gathered within the ones before, so that the last gather has every rank's row.
        numbers = exchange_integers([number for row in rows for number in row], group)
        rows = [of_rank[start : start + 3] for of_rank in numbers for start in range(0, len(of_rank), 3)]
    # Every rank has the same rows here, so all of them explain, or none does.
    if -1 in (digests := {row[2] for row in rows}) or len(digests) > 1 or debug_enabled():
        compare_facts(facts, groups, problem, _rule)
    return tuple(row[0] for row in rows), tuple(row[1] for row in rows)


_TENSORS = ("q", "k", "v", "mask", "text_q", "text_k", "text_v", "text_mask")


def _rule(name: str) -> str:
    if name not in _TENSORS:
        return ""
    return (
        "; it must be the same on all"
        if name.startswith("text_")
        else "; only the number of tokens may differ"
    )


def _facts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    layout: str,
    text: Text | None,
) -> dict[str, tuple[Any, str]]:
    """What must be equal on all ranks of tensors and options: what is compared, and how it is shown."""
    tensors: tuple[Tensor | None, ...] = (q, k, v, mask)
    options = {"causal": causal, "scale": scale, "layout": layout}
    if text is not None:
        tensors += (text.q, text.k, text.v, text.mask)
        options["text_first"] = text.first
    facts: dict[str, tuple[Any, str]] = {name: (value, str(value)) for name, value in options.items()}
    # A mask that only some ranks pass is shown too, as None against its dtype and shape.
    for name, tensor in zip(_TENSORS, tensors, strict=False):
        if tensor is None:
            facts[name] = None, "None"
            continue
        sizes = list(tensor.shape)
        if not name.startswith("text"):
            sizes[1:2] = []  # each rank has its own number of tokens
        facts[name] = (tensor.dtype, sizes), f"{tensor.dtype} {tuple(tensor.shape)}"
    return facts


def _describe(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, text: Text | None
) -> tuple[Described | None, ...]:
    """The shapes and dtypes of q, k, v and the mask, and of the text's."""
    of_video = (q.shape, q.dtype), (k.shape, k.dtype), (v.shape, v.dtype), _of_mask(mask)
    return of_video if text is None else of_video + _describe(text.q, text.k, text.v, text.mask, None)


def _of_mask(mask: Tensor | None) -> Described | None:
    return None if mask is None else (mask.shape, mask.dtype)


def _check(tensors: Sequence[Described | None], scale: float | None, layout: str) -> None:
    """Raises ValueError unless shapes, dtypes and masks of tensors, and of text behind them, are one attention's."""
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"scale must be a number above 0; got {scale} (None is 1/√D)")
    check_layout(layout)
    _check_tensors(tensors[:4], "")
    if len(tensors) == 4:
        return
    _check_tensors(tensors[4:], "text_")
    for name, video, words in zip("qkv", tensors, tensors[4:], strict=False):
        assert video is not None and words is not None
        (of_video, dtype), (of_words, words_dtype) = video, words
        if (of_video[0], of_video[2:], dtype) != (of_words[0], of_words[2:], words_dtype):
            raise ValueError(
                f"{name} and text_{name} must agree in all but tokens; "
                f"got {dtype} {tuple(of_video)} and {words_dtype} {tuple(of_words)}"
            )


def _check_tensors(tensors: Sequence[Described | None], prefix: str) -> None:
    """Raises ValueError unless q, k and v are [B, S, H, D] that fit, and the mask is a bool [B, S_kv]."""
    q, k, v, mask = tensors
    assert q is not None and k is not None and v is not None
    names = f"{prefix}q, {prefix}k and {prefix}v"
    of_q, of_k, of_v = tuple(q[0]), tuple(k[0]), tuple(v[0])
    if not len(of_q) == len(of_k) == len(of_v) == 4:
        raise ValueError(f"{names} must be [B, S, H, D]; got {of_q}, {of_k}, {of_v}")
    if of_k[:3] != of_v[:3]:
        raise ValueError(f"{prefix}k and {prefix}v must agree in batch, tokens and heads; got {of_k}, {of_v}")
    if of_q[0] != of_k[0] or of_q[3] != of_k[3]:
        raise ValueError(f"{prefix}q and {prefix}k must agree in batch and head dim; got {of_q}, {of_k}")
    if of_k[2] == 0 or of_q[2] % of_k[2]:
        raise ValueError(
            f"query heads ({of_q[2]}) must be a multiple of key heads ({of_k[2]}); repeat the key heads"
        )
    if of_q[3] == 0 or of_v[3] == 0:
        raise ValueError(f"{names} need a head dim of at least 1; got {of_q}, {of_v}")
    if not (q[1] == k[1] == v[1] and q[1].is_floating_point):
        raise ValueError(f"{names} must share one floating-point dtype; got {q[1]}, {k[1]}, {v[1]}")
    if mask is not None and (mask[1] != torch.bool or tuple(mask[0]) != of_k[:2]):
        raise ValueError(
            f"{prefix}mask must be a bool key mask [B, S_kv] = {of_k[:2]}, true where a key may be seen; "
            f"got {mask[1]} {tuple(mask[0])}"
        )
