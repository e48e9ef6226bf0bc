"""ring-attention-pytorch's `ring_flash_attn`, on a GPU `ring_flash_attn_cuda`.

Called with `ring_reduce_col=True` (the ring), as its `RingAttention` layer calls it, and with one bucket per rank.
Causal problems are spread in its stripes (`striped_ring_attn=True`); one bucket per rank makes these plain stripes of
one token. Grouped heads are laid out as it lays them out, query head h on key head h mod H_kv: heads are reordered
before and after. Where S_kv is not S_q it turns its ring off: that is not offered. Its sums are fp32 whatever the
inputs are, so it is measured in fp32.

Why its dK and dV are wrong (0.5.20): in backward `dkv = ring_pass(…)` is the pair of what was received and what was
sent, each of them dK and dV stacked, and `dk, dv = dkv` takes the pair apart instead of the stack. Autograd then sums
the extra dim away: dK is dK + dV of one moment, dV that of another. With a key mask on three ranks or more dQ is wrong
too: the caller's own mask is the buffer that a neighbour's is received into, and backward starts from it.
"""

from __future__ import annotations

from typing import Any

import torch
from ranks import World
from torch import Tensor

from peers import ours
from peers.side import CAUSAL, GROUPED, MASK, Attention, Problem, Side, share_of_mask


def _ring(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    import ring_attention_pytorch as package

    on_cuda = world.device.type == "cuda"
    function = package.ring_flash_attn_cuda if on_cuda else package.ring_flash_attn
    options: dict[str, Any] = {
        "mask": share_of_mask(world, mask),
        "causal": problem.causal,
        "bucket_size": max(1, problem.keys // world.num_ranks),
        "ring_reduce_col": True,
        "striped_ring_attn": problem.causal,
        "ring_size": world.num_ranks,
    }
    order = torch.arange(problem.heads).view(problem.kv_heads, -1).t().flatten()
    if problem.heads == problem.kv_heads:
        return Attention(lambda q, k, v: function(q, k, v, **options))
    return Attention(lambda q, k, v: function(q[:, :, order], k, v, **options)[:, :, order.argsort()])


SIDES = (
    Side(
        "ring-attention-pytorch",
        _ring,
        package="ring-attention-pytorch",
        offers=frozenset({CAUSAL, MASK, GROUPED}),
        causal_layout="striped",
        dtype="float32",
        cuda_dtype="bfloat16",
        beside=ours.RING,
    ),
)
