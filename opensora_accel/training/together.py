"""What all ranks must know before the next collective: rank 0's answer on every rank, or every rank's own.

An error that one rank alone raises leaves the others waiting. So rank 0's is sent, and raised on all of them.
Without torch.distributed there is one rank, and nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def is_first_rank() -> bool:
    """Before torch.distributed has started, too."""
    return os.environ.get("RANK", "0") == "0"


def from_first_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What `function` gives on rank 0 of the group, on all of its ranks; what it raises there, all of them raise.

    Only ValueError and OSError keep their type on the other ranks; any other error is a RuntimeError there.

    Communication: one object broadcast.
    """
    if not dist.is_initialized():
        return function()
    first = dist.get_global_rank(group, 0) if group is not None else 0
    box: list[Any] = [None, None]
    if dist.get_rank() == first:
        try:
            box[0] = function()
        except Exception as error:
            known = isinstance(error, (ValueError, OSError))
            box[1] = error if known else RuntimeError(f"rank 0: {type(error).__name__}: {error}")
            dist.broadcast_object_list(box, src=first, group=group)
            raise
    dist.broadcast_object_list(box, src=first, group=group)
    if box[1] is not None:
        raise box[1]
    result: T = box[0]
    return result


def from_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `value`, in the order of the ranks.

    Communication: one object all-gather.
    """
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
