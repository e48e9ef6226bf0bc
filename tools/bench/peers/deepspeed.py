"""DeepSpeed's `DistributedAttention` around torch's SDPA, for the layout [B, S, H, D] (gather dim 1, batch dim 0).

What comes after the batch dim goes to the local attention, which sees the whole sequence of its heads. So that is
given causality, and a key mask as whole as it needs it, which costs the peer no collective here. For heads that do
not divide it asks its registry which rank this is: the mesh that `deepspeed.initialize(mesh_param=…)` would have
made is made for it. `num_kv_heads` is left out, so that it is read from the keys, as it documents.
"""

from __future__ import annotations

from ranks import World
from torch import Tensor

from peers import ours
from peers.side import Attention, Problem, Side, sdpa


def _ulysses(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups

    backend = "nccl" if world.device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    if groups.mesh_device is None:
        shape, names = (1, world.num_ranks), ("data_parallel", "sequence_parallel")
        groups.mesh_device = deepspeed.comm.initialize_mesh_device(shape, names)
    layer = DistributedAttention(sdpa, world.group, scatter_idx=2, gather_idx=1)
    return Attention(lambda q, k, v: layer(q, k, v, 0, causal=problem.causal, mask=mask))


SIDES = (Side("deepspeed ulysses", _ulysses, package="deepspeed", beside=ours.ULYSSES),)
