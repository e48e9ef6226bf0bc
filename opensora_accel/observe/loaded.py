"""Whether what a run holds after a load is what lies in the file: by one number for each whole tensor.

A loader that looks for a shard at another place, leaves a tensor as it was or fills it with zeros says nothing. So a
number is made of each tensor of the file, whole, and of what the ranks hold. It is a sum over all elements, each with a
factor that depends on its place in the whole tensor, so that shards' numbers add up to it however it is cut. A weight
[4, 2] in two shards:

    file           rows 0 … 3     9 100
    rank 0         rows 0, 1      2 700
    rank 1         rows 2, 3      6 400        2 700 + 6 400 = 9 100: as in the file

Each rank reads its part of the files' tensors, so that a file is read once for all of them. Where one differs, each
rank reads its own shard again, which says whose is wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from opensora_accel.communications import gather_objects
from opensora_accel.deferred import region_of
from opensora_accel.observe.equality import INTEGERS, local_part
from opensora_accel.watchdog import named

# Odd, with many bits: places' factors follow from it.
_FACTOR = 0x9E3779B97F4A7C15 - 2**64
_ALL = 2**64


class Readable(Protocol):
    """A tensor of a file (`opensora_accel.weights.Stored`)."""

    def read(self, dtype: torch.dtype, region: tuple[slice, ...] = ()) -> Tensor:
        """The tensor, or a region of it."""
        ...


class Whole(NamedTuple):
    """A whole tensor in memory, which is read as one of a file is."""

    tensor: Tensor

    def read(self, dtype: torch.dtype, region: tuple[slice, ...] = ()) -> Tensor:
        return local_part(self.tensor)[region].to(dtype)


@torch.no_grad()
def sum_of(part: Tensor, region: Sequence[slice] = ()) -> int:
    """A number below 2^64 of the bits of a part of a tensor; those of parts add up, modulo 2^64, to that of the whole.

    Args:
        region: where the part lies in the whole tensor, by dim; by default it is all of it.
    """
    if part.is_complex():
        part = torch.view_as_real(part)
    bits = part.detach().contiguous()
    bits = bits.view(1) if bits.dim() == 0 else bits
    bits = bits.view(torch.int8 if part.dtype == torch.bool else INTEGERS[part.element_size()])
    if not bits.numel():
        return 0
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for dim, size in enumerate(bits.shape):
        others = [other for other in range(bits.dim()) if other != dim]
        along = bits.sum(others, dtype=torch.int64) if others else bits.to(torch.int64)
        # Numbers of 64 bits are read as two along the last dim.
        first = region[dim].start * (size // part.shape[dim]) if dim < len(region) else 0
        factors = (torch.arange(first, first + size, device=part.device) + ((dim + 1) << 48)) * _FACTOR
        # Mixed, so that what moves from one place to the next does not look like what moves on to the one after.
        factors = (factors ^ (factors >> 29)) * 2 + 1
        total = total + (along * factors).sum()
    return int(total) % _ALL


def sums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The numbers of whole tensors, by name."""
    return {name: sum_of(local_part(tensor)) for name, tensor in tensors.items()}


class _Held(NamedTuple):
    """What one rank holds of a tensor."""

    sum: int
    dtype: torch.dtype
    # The ranks that hold a whole one between them.
    ranks: tuple[int, ...]


def unlike_file(held: Mapping[str, Tensor], stored: Mapping[str, Readable | int] | None) -> str:
    """What the ranks hold that is not as stored: the first tensor, and on which rank; "" where all is. The same on all
    ranks, which call it together.

    Args:
        held: by name, whole tensors or DTensors. A rank may hold some of them only.
        stored: what they have to be, by name, as tensors of files or as the numbers that `sums_of` gave; None on ranks
            that do not know.

    Communication: two object all-gathers of a number for each tensor; where one differs, a third.

    Raises:
        ValueError, OSError: on all ranks, where none knows what was stored, or one cannot read it.
    """
    mine = {name: _held(tensor) for name, tensor in held.items()}
    everyone = gather_objects((mine, None if stored is None else [*stored]))
    readers = [rank for rank, (_, names) in enumerate(everyone) if names is not None]
    if not readers:
        raise ValueError("no rank knows what was stored; pass it on one of them")
    names = [name for name in dict.fromkeys(n for _, of_rank in everyone for n in of_rank or ())]
    dtypes = {name: each.dtype for of_rank, _ in reversed(everyone) for name, each in of_rank.items()}
    lost = [name for name in names if name not in dtypes]
    if lost:
        others = f"; {len(lost) - 1} more like it" if len(lost) > 1 else ""
        return f"{lost[0]} is stored, and no rank holds it{others}"
    expected = _expected(names, stored, dtypes, readers, everyone)
    wrong: dict[str, list[tuple[int, ...]]] = {}
    for rank, (of_rank, _) in enumerate(everyone):
        for name, each in of_rank.items():
            parts = [everyone[other][0].get(name) for other in each.ranks]
            total = sum(part.sum for part in parts if part is not None) % _ALL
            if name in expected and total != expected[name] and each.ranks[0] == rank:
                wrong.setdefault(name, []).append(each.ranks)
    first = next((name for name in names if name in wrong), None)
    if first is None:
        return ""
    ranks = _whose(held, stored, first) or sorted({rank for each in wrong[first] for rank in each})
    others = f"; {len(wrong) - 1} more tensors are not" if len(wrong) > 1 else ""
    return f"{first} on {named(ranks, 'rank')} is not what was stored{others}"


def _held(tensor: Tensor) -> _Held:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not isinstance(tensor, DTensor):
        return _Held(sum_of(tensor), tensor.dtype, (rank,))
    mesh, placements = tensor.device_mesh, tensor.placements
    place: list[Any] = list(mesh.get_coordinate() or ())
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():
            place[dim] = slice(None)
    ranks = tuple(mesh.mesh[tuple(place)].flatten().tolist())
    region = region_of(tensor.shape, mesh, placements)
    return _Held(sum_of(tensor.to_local(), region), tensor.dtype, ranks)


def _expected(
    names: Sequence[str],
    stored: Mapping[str, Readable | int] | None,
    dtypes: Mapping[str, torch.dtype],
    readers: Sequence[int],
    everyone: Sequence[Any],
) -> dict[str, int]:
    """The numbers of what is stored; each of those who know it reads a part. Communication: an object all-gather."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine, error = dict[str, int](), ""
    for name in names:
        knowing = [reader for reader in readers if name in everyone[reader][1]]
        # By the name: of weights and biases in turn, one of two ranks would read all weights.
        if knowing[zlib.crc32(name.encode()) % len(knowing)] != rank or stored is None:
            continue
        each = stored[name]
        try:
            mine[name] = each % _ALL if isinstance(each, int) else sum_of(each.read(dtypes[name]))
        except Exception as failure:  # noqa: BLE001 - whatever a file's library raises, all ranks have to know
            error = error or f"rank {rank} cannot read {name} again: {type(failure).__name__}: {failure}"
    read = gather_objects((mine, error))
    for _, failed in read:
        if failed:
            raise OSError(failed)
    return {name: number for of_rank, _ in read for name, number in of_rank.items()}


def _whose(held: Mapping[str, Tensor], stored: Mapping[str, Readable | int] | None, name: str) -> list[int]:
    """The ranks whose own part is wrong, where that can be read again. Communication: an object all-gather."""
    is_wrong = False
    source = None if stored is None else stored.get(name)
    if source is not None and not isinstance(source, int) and name in held:
        tensor = held[name]
        region: tuple[slice, ...] = ()
        if isinstance(tensor, DTensor):
            region = region_of(tensor.shape, tensor.device_mesh, tensor.placements)
        own = local_part(tensor)
        is_wrong = sum_of(own, region) != sum_of(source.read(tensor.dtype, region), region)
    return [rank for rank, wrong in enumerate(gather_objects(is_wrong)) if wrong]
