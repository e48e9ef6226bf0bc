"""Flex attention with gradients on a CPU, where torch's own (2.13) refuses them: dense, under the same mask."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask


def use_dense_flex_attention() -> None:
    """Puts `flex_attention` below in the place of torch's, which diffusers looks up at every call."""
    torch.nn.attention.flex_attention.flex_attention = flex_attention


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_mask: BlockMask,
    scale: float | None,
    kernel_options: Any,
    **options: Any,
) -> Tensor:
    """[B, H, S, D] → [B, H, S, D]; a query that sees nothing gets zeros."""
    assert not any(options.values())
    return F.scaled_dot_product_attention(query, key, value, attn_mask=dense(block_mask), scale=scale)


def dense(block_mask: BlockMask) -> Tensor:
    """[B or 1, H or 1, S_q, S_kv], true where the query sees the key: its block is listed, and `mask_mod` says so."""
    (q_length, kv_length), (q_size, kv_size) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    blocks = block_mask.to_dense().bool()
    tokens = blocks.repeat_interleave(q_size, -2).repeat_interleave(kv_size, -1)[..., :q_length, :kv_length]
    return tokens & create_mask(
        block_mask.mask_mod, 1, 1, q_length, kv_length, device=str(block_mask.kv_indices.device)
    )
