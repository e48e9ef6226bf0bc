"""A convolution along a dimension that is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_accel.communications import exchange_halo
from opensora_accel.wrapping import Forward, wrap_forward


def add_halo(
    module: nn.Module,
    name: str,
    group: dist.ProcessGroup,
    dim: int,
    reach: int,
    get_splits: Callable[[], tuple[int, ...] | None],
) -> Callable[[], None]:
    """Runs a convolution that keeps the number of rows along `dim` on the neighbours' rows too; returns the undo.

    At the ends of the sequence its own padding does what it does on one device; elsewhere that part is cut off.

    Raises ValueError for a convolution that reaches farther.
    """
    _check_reach(module, name, dim, reach)

    def with_neighbours(original: Forward) -> Forward:
        def forward(input_: Tensor) -> Any:
            num_own = input_.size(dim)
            rows, before = exchange_halo(input_, group, dim, reach, splits=get_splits())
            if rows.size(dim) == 0:
                # Convolutions take no empty input, and other ranks' gradients await this one's.
                rows = torch.cat([rows, rows.new_zeros(_with(rows.shape, dim, 1))], dim)
            out = original(rows)
            if out.size(dim) != rows.size(dim):
                raise ValueError(
                    f"{name} made {out.size(dim)} rows of {rows.size(dim)}; a convolution over frames that are spread "
                    "must keep their number"
                )
            return out.narrow(dim, before, num_own)

        return forward

    return wrap_forward(module, with_neighbours)


def _check_reach(module: nn.Module, name: str, dim: int, reach: int) -> None:
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return
    at = dim - 2  # behind batch and channels
    needed = -(-module.dilation[at] * (module.kernel_size[at] - 1) // 2)  # of an even kernel the longer side
    if needed > reach:
        raise ValueError(
            f"{name} reaches {needed} rows along dim {dim}, the policy's halo {reach}; set its reach"
        )


def _with(shape: torch.Size, dim: int, size: int) -> list[int]:
    changed = list(shape)
    changed[dim] = size
    return changed
