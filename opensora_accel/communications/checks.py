"""What is checked before a collective, so that all ranks fail together instead of hanging."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


def debug_enabled() -> bool:
    return os.environ.get("OPENSORA_ACCEL_DEBUG", "0") not in ("", "0")


_compares_inputs = True


def inputs_are_compared() -> bool:
    """Whether a sharded model looks if the ranks that share a sample have the same one."""
    return _compares_inputs


@contextlib.contextmanager
def without_comparing_inputs() -> Iterator[None]:
    """For the verifier, which compares more than inputs, and has to see the whole of a wrong step."""
    global _compares_inputs
    before, _compares_inputs = _compares_inputs, False
    try:
        yield
    finally:
        _compares_inputs = before


def check_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise ValueError(
            "torch.distributed is not initialised; call opensora_accel.init_parallel(plan) first"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"this rank is not a member of the process group it was given ({group!r})")
    return group


def check_dim(name: str, dim: int, input_: Tensor) -> int:
    if not -input_.dim() <= dim < input_.dim():
        raise ValueError(
            f"{name}={dim} is out of range for a tensor of {input_.dim()} dims, shape {tuple(input_.shape)}"
        )
    return dim % input_.dim()


def check_agreement(
    operation: str, input_: Tensor, group: dist.ProcessGroup, free_dim: int | None, *facts: Any
) -> None:
    """In debug mode: every rank calls `operation` with one dtype, one shape but for `free_dim`, and equal facts."""
    if not debug_enabled() or group.size() == 1:
        return
    mine = _Call(operation, str(input_.dtype), tuple(input_.shape), free_dim, facts)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    reference = everyone[0]
    for rank, other in enumerate(everyone):
        if other.must_agree() != reference.must_agree():
            raise ValueError(
                f"ranks of the group disagree: rank 0 calls {reference}, "
                f"rank {rank} (global rank {dist.get_global_rank(group, rank)}) calls {other}"
            )


@dataclass(frozen=True)
class _Call:
    operation: str
    dtype: str
    shape: tuple[int, ...]
    free_dim: int | None
    facts: tuple[Any, ...]

    def must_agree(self) -> tuple[Any, ...]:
        fixed = tuple(size for dim, size in enumerate(self.shape) if dim != self.free_dim)
        return self.operation, self.dtype, len(self.shape), self.free_dim, fixed, self.facts

    def __str__(self) -> str:
        free = "" if self.free_dim is None else f" (dim {self.free_dim} may differ between ranks)"
        return (
            f"{self.operation}({', '.join([f'shape {self.shape}', self.dtype, *map(str, self.facts)])}){free}"
        )
