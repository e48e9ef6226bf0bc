"""Open-Sora's `opensora.acceleration.plugin`: ColossalAI's ZeRO beside sequence parallelism. Needs ColossalAI."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster.plugin import LowLevelZeroPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class ZeroSeqParallelPlugin(LowLevelZeroPlugin):
    """ZeRO over all ranks, which come in sequence groups of `sp_size` neighbours.

    `dp_group`, `sp_group` with their sizes and this rank's place in them are for the setters of `parallel_states`, or
    for `shardformer.colossalai.register_groups(plugin)`. ZeRO averages gradients over all ranks, as it must.

    Args:
        sp_size: ranks that share a sample.
        stage, others: `LowLevelZeroPlugin`'s, in its order.

    Raises:
        ValueError: the number of ranks is no multiple of `sp_size`.
    """

    def __init__(self, sp_size: int = 1, stage: int = 2, *others: Any, **options: Any):
        super().__init__(stage, *others, **options)
        num_ranks = dist.get_world_size()
        if sp_size < 1 or num_ranks % sp_size:
            raise ValueError(f"sp_size must divide the {num_ranks} ranks; got {sp_size}")
        self.sp_size, self.dp_size = sp_size, num_ranks // sp_size
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(device, (self.dp_size, sp_size), mesh_dim_names=("data", "sequence"))
        self.dp_group, self.sp_group = mesh.get_group("data"), mesh.get_group("sequence")
        self.dp_rank, self.sp_rank = self.dp_group.rank(), self.sp_group.rank()

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type[DistributedSampler] | None = None,
        **options: Any,
    ) -> DataLoader:
        """Batches that are equal on the ranks of a sequence group, and differ between groups."""
        sampler = (distributed_sampler_cls or DistributedSampler)(
            dataset, num_replicas=self.dp_size, rank=self.dp_rank, shuffle=shuffle
        )

        def seed_worker(_worker: int) -> None:
            random.seed(seed)
            torch.manual_seed(seed)

        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            worker_init_fn=seed_worker,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            **options,
        )
