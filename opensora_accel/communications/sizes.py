"""Who holds how much of a dimension."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.checks import debug_enabled
from opensora_accel.communications.renamed import all_gather_single
from opensora_accel.communications.waiting import report_failure


def share_sizes(total: int, num_ranks: int) -> tuple[int, ...]:
    """Every rank's share of `total`, by the rule of `torch.tensor_split`."""
    base, extra = divmod(total, num_ranks)
    return tuple(base + (rank < extra) for rank in range(num_ranks))


Sizes = tuple[int, ...]

_size_cache: ContextVar[dict[tuple[dist.ProcessGroup, Sizes], tuple[Sizes, ...]] | None] = ContextVar(
    "size_cache", default=None
)


@contextlib.contextmanager
def cached_sizes() -> Iterator[None]:
    """Within it, the sizes behind one local size are exchanged once, then remembered.

    It is a promise by the caller: one local size always stands for one layout. Without the promise a cache is
    wrong, because rank 0 of 2 holds 3 tokens of 6 and also 3 of 5; so outside of this context sizes are exchanged
    at every call that is not given `splits`. With OPENSORA_ACCEL_DEBUG=1 a broken promise raises ValueError.
    """
    token = _size_cache.set({})
    try:
        yield
    finally:
        _size_cache.reset(token)


def sizes_are_cached() -> bool:
    """Whether a caller has promised that local sizes tell everything (`cached_sizes`)."""
    return _size_cache.get() is not None


def exchange_sizes(local_sizes: Sizes, group: dist.ProcessGroup, device: torch.device) -> tuple[Sizes, ...]:
    """For each local size, every rank's: one all-gather of as many integers."""
    cache = _size_cache.get()
    known = None if cache is None else cache.get((group, local_sizes))
    if debug_enabled() and cache is not None:
        _check_promise(known, local_sizes, group)
    if known is not None:
        return known
    # A host tensor where the group can carry one: reading a device tensor would wait for the device.
    if torch.device("cpu") in group._device_types:
        device = torch.device("cpu")
    sizes = torch.empty(group.size() * len(local_sizes), dtype=torch.int64, device=device)
    all_gather_single(sizes, torch.tensor(local_sizes, device=device), group)
    found = tuple(tuple(column) for column in sizes.view(group.size(), -1).t().tolist())
    if cache is not None:
        cache[group, local_sizes] = found
    return found


def _check_promise(known: tuple[Sizes, ...] | None, local_sizes: Sizes, group: dist.ProcessGroup) -> None:
    """Raises on every rank when any of them remembers sizes that are no longer the sizes."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (local_sizes, known), group=group)
    found = tuple(zip(*(sizes for sizes, _ in everyone), strict=True))
    for rank, (sizes, remembered) in enumerate(everyone):
        if remembered is not None and remembered != found:
            raise ValueError(
                f"cached_sizes() was promised one layout per local size, but on rank {rank} the local size {sizes} "
                f"stood for {remembered} and now for {found}; pass splits=, or leave the context between layouts"
            )


def _check_splits(splits: Sequence[int], group: dist.ProcessGroup, dim: int) -> Sizes:
    splits = tuple(int(size) for size in splits)
    if len(splits) != group.size():
        raise ValueError(f"splits={splits} has {len(splits)} entries, but the group has {group.size()} ranks")
    if min(splits) < 0:
        raise ValueError(f"splits={splits} for dim {dim} has a negative size")
    return splits


def splits_of_total(total: int, splits: Sequence[int] | None, group: dist.ProcessGroup, dim: int) -> Sizes:
    """Shares of a dimension whose full size is at hand."""
    if splits is None:
        return share_sizes(total, group.size())
    checked = _check_splits(splits, group, dim)
    if sum(checked) != total:
        raise ValueError(f"splits={checked} add up to {sum(checked)}, but dim {dim} has size {total}")
    return checked


def splits_of_local(
    input_: Tensor, splits: Sequence[int] | None, group: dist.ProcessGroup, dim: int
) -> Sizes:
    """Shares of a dimension of which only this rank's part is at hand."""
    return splits_of_locals([input_], [splits], group, dim)[0]


def splits_of_locals(
    tensors: Sequence[Tensor], splits: Sequence[Sequence[int] | None], group: dist.ProcessGroup, dim: int
) -> list[Sizes]:
    """`splits_of_local` of several tensors, with one exchange for all those whose splits are not given."""
    unknown = [index for index, given in enumerate(splits) if given is None]
    found: dict[int, Sizes] = {}
    if unknown:
        sizes = tuple(tensors[index].size(dim) for index in unknown)
        found = dict(zip(unknown, exchange_sizes(sizes, group, tensors[0].device), strict=True))
    for index, (tensor, given) in enumerate(zip(tensors, splits, strict=True)):
        if given is not None:
            found[index] = _check_local(tensor.size(dim), _check_splits(given, group, dim), group, dim)
    return [found[index] for index in range(len(tensors))]


def _check_local(local_size: int, splits: Sizes, group: dist.ProcessGroup, dim: int) -> Sizes:
    if splits[group.rank()] != local_size:
        message = (
            f"splits={splits} give rank {group.rank()} a size of {splits[group.rank()]} in dim {dim}, "
            f"but its tensor has {local_size}"
        )
        # The other ranks' tensors may be of the right size: they would wait for this one.
        report_failure(message)
        raise ValueError(message)
    return splits
