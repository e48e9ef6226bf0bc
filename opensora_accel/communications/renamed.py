"""Two collectives under the names of torch 2.13, which deprecates those that older versions have."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.waiting import waiting


def all_gather_single(output: Tensor, input_: Tensor, group: dist.ProcessGroup) -> None:
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with waiting("all_gather", group):
        function(output, input_, group=group)


def reduce_scatter_single(output: Tensor, input_: Tensor, group: dist.ProcessGroup) -> None:
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with waiting("reduce_scatter", group):
        function(output, input_, group=group)
