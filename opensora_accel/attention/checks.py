"""What one call of a parallel attention must satisfy, on its own rank and among the ranks of its group.

Where sizes are not given the ranks exchange them anyhow: the whole signature of the call goes along, so that a rank's
bad input is a ValueError on every rank, before any data is sent. Where they are given nothing is exchanged, and each
rank checks itself (all of them, with OPENSORA_ACCEL_DEBUG=1).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.checks import debug_enabled
from opensora_accel.communications.sizes import Sizes, exchange_sizes

_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
_MAX_DIMS = 6
_NUM_FIELDS = 2 + _MAX_DIMS

Tensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class _Described:
    """A tensor's shape and dtype, without the tensor."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype or 'another dtype'} {self.shape}"

    def encode(self) -> tuple[int, ...]:
        index = _DTYPES.index(self.dtype) if self.dtype in _DTYPES else -1
        sizes = self.shape[:_MAX_DIMS]
        return index, len(self.shape), *sizes, *(-1,) * (_MAX_DIMS - len(sizes))

    @staticmethod
    def decode(fields: Sequence[int]) -> _Described | None:
        index, dims, *sizes = fields
        if dims < 0:
            return None
        return _Described(_DTYPES[index] if index >= 0 else None, tuple(sizes[: min(dims, _MAX_DIMS)]))


_ABSENT = (-1,) * _NUM_FIELDS


@dataclass(frozen=True)
class Signature:
    """The facts of one rank's call."""

    tensors: Mapping[str, _Described | None]
    options: Mapping[str, float]

    @classmethod
    def of(cls, tensors: Tensors, options: Mapping[str, float | None]) -> Signature:
        described = {
            name: None if tensor is None else _Described(tensor.dtype, tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
        return cls(described, {name: -1.0 if value is None else value for name, value in options.items()})

    def encode(self) -> tuple[int, ...]:
        fields = itertools.chain.from_iterable(
            _ABSENT if tensor is None else tensor.encode() for tensor in self.tensors.values()
        )
        return *fields, *(_bits(float(value)) for value in self.options.values())

    def decode(self, fields: Sequence[int]) -> Signature:
        """Another rank's, whose call has the same names."""
        tensors = {
            name: _Described.decode(fields[i * _NUM_FIELDS : (i + 1) * _NUM_FIELDS])
            for i, name in enumerate(self.tensors)
        }
        values = map(_from_bits, fields[len(tensors) * _NUM_FIELDS :])
        return Signature(tensors, dict(zip(self.options, values, strict=True)))

    def num_tokens(self, name: str) -> int:
        tensor = self.tensors[name]
        assert tensor is not None
        return tensor.shape[1]


def _bits(value: float) -> int:
    number: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return number


def _from_bits(number: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", number))[0]
    return value


_SIZES_UNKNOWN = (
    "the ranks exchange their sizes here, which no graph can hold; to stay within one, pass splits= and kv_splits=, "
    "every rank's number of tokens (opensora_accel.communications.share_sizes for the shares of tensor_split)"
)


def agreed_splits(
    tensors: Tensors,
    options: Mapping[str, float | None],
    groups: Sequence[dist.ProcessGroup],
    splits: Sequence[int] | None,
    kv_splits: Sequence[int] | None,
) -> tuple[Sizes, Sizes]:
    """Every rank's number of queries and of keys; ValueError, on every rank, where the calls are not one attention.

    `tensors`: q, k, v and mask by name, and those of the text with text_ before it. `groups` from the innermost axis
    outwards; ranks are numbered with the last one outermost.
    """
    if torch.compiler.is_compiling():
        if splits is not None and kv_splits is not None:
            return tuple(splits), tuple(kv_splits)  # shapes are checked by what they are traced into
        torch._dynamo.graph_break(msg=_SIZES_UNKNOWN)
        agree = torch.compiler.disable(_agree)
        return agree(tensors, options, groups, splits, kv_splits)
    return _agree(tensors, options, groups, splits, kv_splits)


def _agree(
    tensors: Tensors,
    options: Mapping[str, float | None],
    groups: Sequence[dist.ProcessGroup],
    splits: Sequence[int] | None,
    kv_splits: Sequence[int] | None,
) -> tuple[Sizes, Sizes]:
    mine = Signature.of(tensors, options)
    device = tensors["q"].device  # type: ignore[union-attr]
    num_ranks, rank = 1, 0
    for group in groups:
        rank += group.rank() * num_ranks
        num_ranks *= group.size()
    if num_ranks > 1 and (splits is None or kv_splits is None or debug_enabled()):
        everyone = _exchange(mine, groups, device)
        for number, signature in enumerate(everyone):
            _check_one(signature, f"rank {number}: ")
            _check_pair(everyone[0], signature, number)
        found = tuple(tuple(each.num_tokens(name) for each in everyone) for name in ("q", "k"))
    else:
        _check_one(mine, "")
        found = ((mine.num_tokens("q"),), (mine.num_tokens("k"),)) if num_ranks == 1 else ((), ())
    sizes = (
        _given(splits, "splits", found[0], rank, mine.num_tokens("q"), num_ranks),
        _given(kv_splits, "kv_splits", found[1], rank, mine.num_tokens("k"), num_ranks),
    )
    if mine.options["causal"] and sum(sizes[0]) != sum(sizes[1]):
        raise ValueError(
            f"causal attention needs as many queries as keys; got {sum(sizes[0])} and {sum(sizes[1])}; "
            "pass a mask instead"
        )
    return sizes


def _given(given: Sequence[int] | None, name: str, found: Sizes, rank: int, local: int, num: int) -> Sizes:
    if given is None:
        return found
    given = tuple(int(size) for size in given)
    if len(given) != num or min(given) < 0:
        raise ValueError(f"{name}={given} must be one size, at least 0, for each of the {num} ranks")
    if given[rank] != local:
        raise ValueError(f"{name}={given} give rank {rank} {given[rank]} tokens, but its tensor has {local}")
    if found and given != found:
        raise ValueError(f"{name}={given} were given, but the ranks hold {found} tokens")
    return given


def _exchange(mine: Signature, groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[Signature]:
    """Every rank's signature: one all-gather of some thirty integers for each axis."""
    known: tuple[int, ...] = mine.encode()
    length = len(known)
    for group in groups:
        if group.size() > 1:
            by_field = exchange_sizes(known, group, device)
            known = tuple(itertools.chain.from_iterable(zip(*by_field, strict=True)))
    return [mine.decode(known[start : start + length]) for start in range(0, len(known), length)]


def _check_one(call: Signature, where: str) -> None:
    """Raises ValueError unless shapes, dtypes and masks are those of one attention."""
    tensors = call.tensors
    _check_attention(tensors["q"], tensors["k"], tensors["v"], tensors["mask"], where, "")
    if "text_q" not in tensors:
        return
    _check_attention(
        tensors["text_q"], tensors["text_k"], tensors["text_v"], tensors["text_mask"], where, "text_"
    )
    for name in ("q", "k", "v"):
        video, text = tensors[name], tensors[f"text_{name}"]
        assert video is not None and text is not None
        if (video.shape[0], *video.shape[2:], video.dtype) != (text.shape[0], *text.shape[2:], text.dtype):
            raise ValueError(
                f"{where}{name} and text_{name} must agree in all but tokens; got {video} and {text}"
            )


def _check_attention(
    q: _Described | None,
    k: _Described | None,
    v: _Described | None,
    mask: _Described | None,
    where: str,
    prefix: str,
) -> None:
    assert q is not None and k is not None and v is not None
    names = f"{prefix}q, {prefix}k and {prefix}v"
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        raise ValueError(f"{where}{names} must be [B, S, H, D]; got {q.shape}, {k.shape}, {v.shape}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{where}{prefix}k and {prefix}v must agree in batch, tokens and heads; got {k.shape}, {v.shape}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{where}{prefix}q and {prefix}k must agree in batch and head dim; got {q.shape}, {k.shape}"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{where}query heads ({q.shape[2]}) must be a multiple of key heads ({k.shape[2]}); repeat the key heads"
        )
    if q.shape[3] == 0:
        raise ValueError(f"{where}{names} need a head dim of at least 1; got {q.shape}")
    if not (q.dtype == k.dtype == v.dtype and q.dtype is not None and q.dtype.is_floating_point):
        raise ValueError(
            f"{where}{names} must share one floating-point dtype; got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != k.shape[:2]):
        raise ValueError(
            f"{where}{prefix}mask must be a bool key mask [B, S_kv] = {k.shape[:2]}, true where a key may be seen; "
            f"got {mask}"
        )


_MAY_DIFFER = ("q", "k", "v", "mask")
"""Tensors whose number of tokens is the rank's own."""


def _check_pair(first: Signature, other: Signature, rank: int) -> None:
    for name, option in first.options.items():
        if other.options[name] != option:
            raise ValueError(
                f"the ranks disagree: {name} is {option:g} on rank 0 and {other.options[name]:g} on rank {rank}"
            )
    for name in first.tensors:
        pair = first.tensors[name], other.tensors[name]
        if _must_agree(name, pair[0]) != _must_agree(name, pair[1]):
            raise ValueError(
                f"the ranks disagree: {name} is {pair[0]} on rank 0 and {pair[1]} on rank {rank}; "
                + (
                    "only the number of tokens may differ"
                    if name in _MAY_DIFFER
                    else "it must be the same on all"
                )
            )


def _must_agree(name: str, tensor: _Described | None) -> object:
    if tensor is None or name not in _MAY_DIFFER:
        return tensor
    return tensor.dtype, tensor.shape[0], tensor.shape[2:]
