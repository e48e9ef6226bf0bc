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

    Raises:
        ValueError: the convolution reaches farther.
    """
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        at = dim - 2  # behind batch and channels
        # An even kernel reaches farther to one side; that side counts.
        needed = -(-module.dilation[at] * (module.kernel_size[at] - 1) // 2)
        if needed > reach:
            raise ValueError(
                f"{name} reaches {needed} rows along dim {dim}, the policy's halo {reach}; set its reach"
            )

    def with_neighbours(original: Forward) -> Forward:
        def forward(input_: Tensor) -> Any:
            """input_: [..., N/P at dim, ...] → as many rows of the output."""
            num_own = input_.size(dim)
            rows, before = exchange_halo(input_, group, dim, reach, splits=get_splits())
            if rows.size(dim) == 0:
                # Convolutions take no empty input, and other ranks' gradients await this one's.
                shape = [1 if at == dim else size for at, size in enumerate(rows.shape)]
                rows = torch.cat([rows, rows.new_zeros(shape)], dim)
            out = original(rows)
            if out.size(dim) != rows.size(dim):
                raise ValueError(
                    f"{name} made {out.size(dim)} rows of {rows.size(dim)}; a convolution over frames that are spread "
                    "must keep their number"
                )
            # Outputs at the neighbours' rows are cut off: those rows lack neighbours of their own here.
            return out.narrow(dim, before, num_own)

        return forward

    return wrap_forward(module, with_neighbours)
