"""What one call of a parallel attention must satisfy, on its own rank and among the ranks of its group.

Where sizes are not given the ranks exchange them anyhow: the whole signature of the call goes along, so that a rank's
bad input is a ValueError on every rank, before any data is sent. Where they are given (by all ranks, or by none), or
promised to be known (`cached_sizes`), nothing is exchanged, and each rank checks itself; all of them with
OPENSORA_ACCEL_DEBUG=1, but not in a compiled graph.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.attention.balance import LAYOUTS
from opensora_accel.communications.checks import debug_enabled
from opensora_accel.communications.sizes import Sizes, exchange_sizes, sizes_are_cached

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
    options: Mapping[str, float | None]

    @classmethod
    def of(cls, tensors: Tensors, options: Mapping[str, float | None]) -> Signature:
        described = {
            name: None if tensor is None else _Described(tensor.dtype, tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
        return cls(described, options)

    def encode(self) -> tuple[int, ...]:
        fields = itertools.chain.from_iterable(
            _ABSENT if tensor is None else tensor.encode() for tensor in self.tensors.values()
        )
        return *fields, *(number for value in self.options.values() for number in _encode_option(value))

    def decode(self, fields: Sequence[int]) -> Signature:
        """Another rank's, whose call has the same names."""
        tensors = {
            name: _Described.decode(fields[i * _NUM_FIELDS : (i + 1) * _NUM_FIELDS])
            for i, name in enumerate(self.tensors)
        }
        rest = fields[len(tensors) * _NUM_FIELDS :]
        values = map(_decode_option, rest[::2], rest[1::2])
        return Signature(tensors, dict(zip(self.options, values, strict=True)))

    def num_tokens(self, name: str) -> int:
        tensor = self.tensors[name]
        assert tensor is not None
        return tensor.shape[1]


def _encode_option(value: float | None) -> tuple[int, int]:
    """Whether there is one, and its bits."""
    bits: int = struct.unpack("<q", struct.pack("<d", float(value or 0)))[0]
    return int(value is not None), bits


def _decode_option(is_given: int, bits: int) -> float | None:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value if is_given else None


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
    mine = Signature.of(tensors, options)
    if torch.compiler.is_compiling():
        if splits is not None and kv_splits is not None:
            return _agree_alone(mine, groups, splits, kv_splits)
        torch._dynamo.graph_break(msg=_SIZES_UNKNOWN)
        return torch.compiler.disable(_agree)(mine, groups, tensors["q"], splits, kv_splits)
    return _agree(mine, groups, tensors["q"], splits, kv_splits)


def _agree(
    mine: Signature,
    groups: Sequence[dist.ProcessGroup],
    q: Tensor | None,
    splits: Sequence[int] | None,
    kv_splits: Sequence[int] | None,
) -> tuple[Sizes, Sizes]:
    assert q is not None
    if _place(groups)[1] == 1 or (splits is not None and kv_splits is not None and not debug_enabled()):
        return _agree_alone(mine, groups, splits, kv_splits)
    if sizes_are_cached() and not debug_enabled():
        _check_one(mine, "")
        own = mine.num_tokens("q"), mine.num_tokens("k")
        found = tuple(zip(*_exchange(own, groups, q.device), strict=True))
    else:
        everyone = [mine.decode(fields) for fields in _exchange(mine.encode(), groups, q.device)]
        for number, signature in enumerate(everyone):
            _check_one(signature, f"rank {number}: ")
            _check_pair(everyone[0], signature, number)
        found = tuple(tuple(each.num_tokens(name) for each in everyone) for name in ("q", "k"))
    for name, given, held in (("splits", splits, found[0]), ("kv_splits", kv_splits, found[1])):
        if given is not None and tuple(given) != held:
            raise ValueError(f"{name}={tuple(given)} were given, but the ranks hold {held} tokens")
    return _agree_alone(mine, groups, found[0], found[1])


def _place(groups: Sequence[dist.ProcessGroup]) -> tuple[int, int]:
    """This rank's number, and how many there are."""
    rank, num_ranks = 0, 1
    for group in groups:
        rank += group.rank() * num_ranks
        num_ranks *= group.size()
    return rank, num_ranks


def _agree_alone(
    mine: Signature,
    groups: Sequence[dist.ProcessGroup],
    splits: Sequence[int] | None,
    kv_splits: Sequence[int] | None,
) -> tuple[Sizes, Sizes]:
    """What a rank can check by itself, given the sizes of all (or being the only one)."""
    _check_one(mine, "")
    rank, num_ranks = _place(groups)
    sizes = (
        _given(splits, "splits", rank, mine.num_tokens("q"), num_ranks),
        _given(kv_splits, "kv_splits", rank, mine.num_tokens("k"), num_ranks),
    )
    if mine.options["causal"] and sum(sizes[0]) != sum(sizes[1]):
        raise ValueError(
            f"causal attention needs as many queries as keys; got {sum(sizes[0])} and {sum(sizes[1])}; "
            "pass a mask instead"
        )
    return sizes


def _given(given: Sequence[int] | None, name: str, rank: int, local: int, num_ranks: int) -> Sizes:
    if given is None:
        return (local,)
    given = tuple(given)
    if len(given) != num_ranks or min(given) < 0:
        raise ValueError(f"{name}={given} must be one size, at least 0, for each of the {num_ranks} ranks")
    if given[rank] != local:
        raise ValueError(f"{name}={given} give rank {rank} {given[rank]} tokens, but its tensor has {local}")
    return given


def _exchange(
    mine: tuple[int, ...], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> list[tuple[int, ...]]:
    """Every rank's numbers: one all-gather for each axis."""
    known, length = mine, len(mine)
    for group in groups:
        if group.size() > 1:
            by_field = exchange_sizes(known, group, device)
            known = tuple(itertools.chain.from_iterable(zip(*by_field, strict=True)))
    return [known[start : start + length] for start in range(0, len(known), length)]


def check_alone(tensors: Tensors, options: Mapping[str, float | None]) -> None:
    """Raises ValueError unless the call is one attention on this rank alone."""
    _agree_alone(Signature.of(tensors, options), [], None, None)


def _check_one(call: Signature, where: str) -> None:
    """Raises ValueError unless shapes, dtypes and masks are those of one attention."""
    tensors, scale = call.tensors, call.options.get("scale")
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"{where}scale must be a number above 0; got {scale} (None is 1/√D)")
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
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"{where}{names} need a head dim of at least 1; got {q.shape}, {v.shape}")
    if not (q.dtype == k.dtype == v.dtype and q.dtype is not None and q.dtype.is_floating_point):
        raise ValueError(
            f"{where}{names} must share one floating-point dtype; got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != k.shape[:2]):
        raise ValueError(
            f"{where}{prefix}mask must be a bool key mask [B, S_kv] = {k.shape[:2]}, true where a key may be seen; "
            f"got {mask}"
        )


def _shown(name: str, option: float | None) -> str:
    if name == "layout" and option is not None:
        return LAYOUTS[int(option)] if option >= 0 else "unknown"
    return str(option if name == "scale" or option is None else bool(option))


_MAY_DIFFER = ("q", "k", "v", "mask")
"""Tensors whose number of tokens is the rank's own."""


def _check_pair(first: Signature, other: Signature, rank: int) -> None:
    for name, option in first.options.items():
        if other.options[name] != option:
            raise ValueError(
                f"the ranks disagree: {name} is {_shown(name, option)} on rank 0 and "
                f"{_shown(name, other.options[name])} on rank {rank}"
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
