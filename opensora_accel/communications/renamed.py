"""Two collectives under the names of torch 2.13, which deprecates those that older versions have."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def all_gather_single(output: Tensor, input_: Tensor, group: dist.ProcessGroup) -> None:
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(output, input_, group=group)


def reduce_scatter_single(output: Tensor, input_: Tensor, group: dist.ProcessGroup) -> None:
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(output, input_, group=group)
