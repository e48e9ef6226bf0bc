"""Our sides. They are given every rank's number of tokens, as a model's plan knows it, so no sizes are exchanged."""

from __future__ import annotations

from functools import partial
from typing import Any

from ranks import World
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from opensora_accel import attention
from opensora_accel.communications import share_sizes
from peers.side import Attention, Problem, Side, share_of_mask

ULYSSES, RING, ZIGZAG, STRIPED, USP = (
    f"ours {name}" for name in ("ulysses", "ring", "ring zigzag", "ring striped", "usp")
)


def _make(
    world: World, problem: Problem, mask: Tensor | None, function: Any, layout: Any = "contiguous"
) -> Attention:
    options: dict[str, Any] = {
        "mask": share_of_mask(world, mask, layout),
        "causal": problem.causal,
        "splits": share_sizes(problem.queries, world.num_ranks),
        "kv_splits": share_sizes(problem.keys, world.num_ranks),
    }
    where: Any = world.group
    if function is attention.ring_attention:
        options["layout"] = layout
    if function is attention.usp_attention:
        shape, names = (world.num_ranks // 2, 2), ("ring", "ulysses")
        where = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    return Attention(lambda q, k, v: function(q, k, v, where, **options))


def _balanced(name: str, layout: Any) -> Side:
    make = partial(_make, function=attention.ring_attention, layout=layout)
    return Side(name, make, kind="ours", causal_layout=layout, causal_only=True, beside=RING)


SIDES = (
    Side(ULYSSES, partial(_make, function=attention.ulysses_attention), kind="ours"),
    Side(RING, partial(_make, function=attention.ring_attention), kind="ours"),
    _balanced(ZIGZAG, "zigzag"),
    _balanced(STRIPED, "striped"),
    Side(USP, partial(_make, function=attention.usp_attention), kind="ours", in_pairs=True),
)
