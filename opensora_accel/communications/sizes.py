"""Who holds how much of a dimension.

Of 7 tokens on P = 3 ranks, rank 0 holds 3 and ranks 1 and 2 hold 2: the shares of `torch.tensor_split`, (3, 2, 2). A
rank that sees only its own 3 tokens cannot tell 7 from 8 or 9 in all, so every rank's size must be passed as
`splits=` or is exchanged: one integer a rank, on the host where the group has a host backend. A cache keyed by the
own size would be wrong for that reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.missing_ranks import report_failure
from opensora_accel.communications.transport import all_gather
from opensora_accel.parallel_states import host_group

Sizes = tuple[int, ...]


def share_sizes(total: int, num_ranks: int) -> Sizes:
    """Every rank's share of `total`, by the rule of `torch.tensor_split`."""
    base, extra = divmod(total, num_ranks)  # the first `extra` ranks have one more
    return (base + 1,) * extra + (base,) * (num_ranks - extra)


def exchange_integers(values: Sequence[int], group: dist.ProcessGroup) -> list[Sizes]:
    """The integers of every rank, in order of ranks; each passes as many. One all-gather."""
    # On the host, because to read a device tensor is to wait for the device.
    group = host_group(group)
    gathered = torch.empty(group.size() * len(values), dtype=torch.int64)
    all_gather(gathered, torch.tensor(values), group)
    return [tuple(row) for row in gathered.view(group.size(), -1).tolist()]


def splits_of_total(total: int, splits: Sequence[int] | None, group: dist.ProcessGroup, dim: int) -> Sizes:
    """Every rank's share of a dim of which this rank holds all; those of `share_sizes` by default.

    Raises:
        ValueError: the splits do not add up to `total`.
    """
    if splits is None:
        return share_sizes(total, group.size())
    sizes = _check_splits(splits, group, dim)
    if sum(sizes) != total:
        raise ValueError(f"splits={sizes} add up to {sum(sizes)}, but dim {dim} has size {total}")
    return sizes


def splits_of_locals(
    tensors: Sequence[Tensor], splits: Sequence[Sequence[int] | None], group: dist.ProcessGroup, dim: int
) -> list[Sizes]:
    """For each tensor, every rank's size of a dim of which this rank holds a part.

    Sizes that are not given are exchanged, all in one collective.

    Args:
        tensors: each [..., N/P at dim, ...].
        splits: for each tensor, every rank's size, or None.

    Raises:
        ValueError: the splits give this rank another size than its tensor has. Other ranks may be in the collective
        by then, and get the error. Or sizes are missing within torch.compile, where ranks cannot exchange them.
    """
    unknown = [index for index, given in enumerate(splits) if given is None]
    if unknown and torch.compiler.is_compiling():
        raise ValueError(
            "within torch.compile the ranks cannot exchange their sizes; pass splits= (and kv_splits=), every rank's "
            "number of tokens: opensora_accel.communications.share_sizes(total, num_ranks) for tensor_split's shares"
        )
    found: dict[int, Sizes] = {}
    if unknown:
        # All unknown sizes travel in one collective.
        own = [tensors[index].size(dim) for index in unknown]
        by_tensor = zip(*exchange_integers(own, group), strict=True)
        found = dict(zip(unknown, by_tensor, strict=True))
    for index, (tensor, given) in enumerate(zip(tensors, splits, strict=True)):
        if given is None:
            continue
        found[index] = _check_splits(given, group, dim)
        promised = found[index][group.rank()]
        if promised != tensor.size(dim):
            message = (
                f"splits={found[index]} give rank {group.rank()} a size of {promised} in dim {dim}, "
                f"but its tensor has {tensor.size(dim)}"
            )
            # The other ranks' tensors may be of the right size: they would wait for this one.
            report_failure(message)
            raise ValueError(message)
    return [found[index] for index in range(len(tensors))]


def _check_splits(splits: Sequence[int], group: dist.ProcessGroup, dim: int) -> Sizes:
    sizes = tuple(splits)
    if len(sizes) != group.size():
        raise ValueError(f"splits={sizes} has {len(sizes)} entries, but the group has {group.size()} ranks")
    if min(sizes) < 0:
        raise ValueError(f"splits={sizes} for dim {dim} has a negative size")
    return sizes
