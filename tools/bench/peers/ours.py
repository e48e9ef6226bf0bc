"""Our sides. They are given every rank's number of tokens, as a model's plan knows it, so no sizes are exchanged."""

from __future__ import annotations

from functools import partial
from typing import Any

from ranks import World
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from opensora_accel import attention
from opensora_accel.communications import share_sizes
from peers.side import Attention, Problem, Side, rows_of

ULYSSES, RING, ZIGZAG, STRIPED, USP = (
    f"ours {name}" for name in ("ulysses", "ring", "ring zigzag", "ring striped", "usp")
)


def make(
    world: World, problem: Problem, mask: Tensor | None, *, kind: str, layout: Any = "contiguous"
) -> Attention:
    """One of our attentions; `mask` is the whole key mask [B, S_kv]."""
    options: dict[str, Any] = {
        "mask": None if mask is None else mask[:, rows_of(world, problem.keys, layout)],
        "causal": problem.causal,
        "splits": share_sizes(problem.queries, world.num_ranks),
        "kv_splits": share_sizes(problem.keys, world.num_ranks),
    }
    if kind == "ulysses":
        return Attention(lambda q, k, v: attention.ulysses_attention(q, k, v, world.group, **options))
    if kind == "ring":
        return Attention(
            lambda q, k, v: attention.ring_attention(q, k, v, world.group, layout=layout, **options)
        )
    shape, names = (world.num_ranks // 2, 2), ("ring", "ulysses")
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    return Attention(lambda q, k, v: attention.usp_attention(q, k, v, mesh, **options))


def _usp_rule(num_ranks: int) -> str | None:
    return None if num_ranks % 2 == 0 and num_ranks > 2 else "a ring of Ulysses pairs needs 4, 6, … ranks"


def _balanced(name: str, layout: Any) -> Side:
    function = partial(make, kind="ring", layout=layout)
    return Side(name, function, kind="ours", causal_layout=layout, causal_only=True, beside=RING)


SIDES = (
    Side(ULYSSES, partial(make, kind="ulysses"), kind="ours"),
    Side(RING, partial(make, kind="ring"), kind="ours"),
    _balanced(ZIGZAG, "zigzag"),
    _balanced(STRIPED, "striped"),
    Side(USP, partial(make, kind="usp"), kind="ours", num_ranks_rule=_usp_rule),
)
