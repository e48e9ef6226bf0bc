"""Parameters sharded by torch FSDP2 over the ranks that a Plan names.

Example for P = 3 ranks (dp_shard=3, sharding="zero3"): each rank keeps a third of every weight. Before a block
computes, its weights are gathered on all three, and dropped after it; after its backward the three gradients
are averaged, and each rank keeps the third that belongs to its weights.

A rank's own third has another norm than the whole gradient. Clip by the whole one: `training.optim.clip_gradients`, or
`shardformer.tensor_parallel.total_grad_norm` in a loop of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from opensora_accel.parallel_states import get_mesh
from opensora_accel.plan import Plan

ModelT = TypeVar("ModelT", bound=nn.Module)


def shard_parameters(model: ModelT, plan: Plan, blocks: Sequence[nn.Module]) -> ModelT:
    """The same model with its parameters as DTensors, gathered block by block while they are used.

    Parameters are sharded over dp_shard × ring × ulysses, and replicated over dp_replicate (HSDP). Gradients are
    averaged over *mixed*, which is what the gradient convention of `communications` asks for: the divisor stays
    at FSDP's own default.

    Args:
        plan: sharding "zero2" keeps parameters gathered between forward and backward, "zero3" does not.
        blocks: the repeated blocks, each gathered on its own.

    Raises:
        ValueError: plan.sharding is "none".
    """
    if plan.sharding == "none":
        raise ValueError('shard_parameters needs sharding="zero2" or "zero3"; this plan has "none"')
    mesh = _parameter_mesh(plan)
    reshard = plan.sharding == "zero3"
    # Inner modules first: what a block holds is not gathered again with the model's own parameters.
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    # In place: the model's class becomes a subclass of its own that FSDP makes.
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def reshard(model: nn.Module) -> None:
    """Drops gathered parameters, after a forward without backward, which leaves them gathered under zero2.

    Whoever reads or writes `model.parameters()` after it would otherwise meet copies that the next step forgets.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _parameter_mesh(plan: Plan) -> DeviceMesh:
    """1-D over the shard ranks, or 2-D with dp_replicate in front."""
    if plan.dp_replicate == 1:
        return get_mesh("mixed")
    # The ranks in the order of the job's mesh, dp_replicate outermost and tp innermost: shares of layers stay apart.
    ranks = get_mesh().mesh.reshape(plan.dp_replicate, plan.mixed // plan.dp_replicate, plan.tp)
    names = ("replicate", "shard", "tp")
    mesh = DeviceMesh(get_mesh().device_type, torch.as_tensor(ranks), mesh_dim_names=names)
    return mesh["replicate", "shard"]
