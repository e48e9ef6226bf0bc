"""Our sides. They are given every rank's number of tokens, as a model's plan knows it, so no sizes are exchanged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from opensora_accel.communications import share_sizes
from opensora_accel.profiler.bench_attention.problem import Problem, TokenLayout, World
from opensora_accel.profiler.bench_attention.side import Attention, Side

ULYSSES, RING, ZIGZAG, STRIPED, USP = (
    "ours ulysses",
    "ours ring",
    "ours ring zigzag",
    "ours ring striped",
    "ours usp",
)


def _options(world: World, problem: Problem, mask: Tensor | None, layout: TokenLayout) -> dict[str, Any]:
    return {
        "mask": None if mask is None else mask[:, world.rows(problem.keys, layout)],
        "causal": problem.causal,
        "splits": share_sizes(problem.queries, world.num_ranks),
        "kv_splits": share_sizes(problem.keys, world.num_ranks),
    }


def _ulysses(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    from opensora_accel.attention import ulysses_attention

    options = _options(world, problem, mask, "contiguous")
    return Attention(lambda q, k, v: ulysses_attention(q, k, v, world.group, **options))


def _ring(world: World, problem: Problem, mask: Tensor | None, *, layout: TokenLayout) -> Attention:
    from opensora_accel import attention

    ring_attention: Callable[..., Tensor] = attention.ring_attention
    options = _options(world, problem, mask, layout) | {"layout": layout}
    return Attention(lambda q, k, v: ring_attention(q, k, v, world.group, **options))


def _usp(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    from torch.distributed.device_mesh import init_device_mesh

    from opensora_accel import attention

    usp_attention: Callable[..., Tensor] = attention.usp_attention
    shape = (world.num_ranks // 2, 2)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("ring", "ulysses"))
    options = _options(world, problem, mask, "contiguous")
    return Attention(lambda q, k, v: usp_attention(q, k, v, mesh, **options))


def _usp_rule(num_ranks: int) -> str | None:
    return None if num_ranks % 2 == 0 and num_ranks > 2 else "a ring of Ulysses pairs needs 4, 6, … ranks"


def _ring_side(name: str, layout: TokenLayout, **options: Any) -> Side:
    return Side(
        name,
        partial(_ring, layout=layout),
        imports="opensora_accel.attention:ring_attention",
        causal_layout=layout,
        **options,
    )


SIDES = (
    Side(ULYSSES, _ulysses, imports="opensora_accel.attention:ulysses_attention"),
    _ring_side(RING, "contiguous"),
    _ring_side(ZIGZAG, "zigzag", causal_only=True, beside=RING),
    _ring_side(STRIPED, "striped", causal_only=True, beside=RING),
    Side(USP, _usp, imports="opensora_accel.attention:usp_attention", num_ranks_rule=_usp_rule),
)
