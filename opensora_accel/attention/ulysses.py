"""Ulysses: exchange tokens for heads, attend over the whole sequence, exchange back.

Source: DeepSpeed-Ulysses, arXiv:2309.14509. Here q, k and v travel in one collective, and neither tokens nor
heads need to divide: some ranks then hold one more of either, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.attention.local import check_attention_shapes, local_attention
from opensora_accel.communications import all_to_all_packed, gather_forward_split_backward, share_sizes
from opensora_accel.communications.sizes import splits_of_locals
from opensora_accel.parallel_states import get_parallel_group


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    splits: Sequence[int] | None = None,
    kv_splits: Sequence[int] | None = None,
) -> Tensor:
    """This rank's rows of the attention over the whole sequence, equal to that of one device.

    Args:
        q: [B, S_q/P, H, D].
        k, v: [B, S_kv/P, H_kv, D]; H is a multiple of H_kv.
        group: the P ranks; by default the registered sequence group.
        mask: [B, S_kv/P], this rank's part of the key mask, true where a key may be seen.
        causal: query i sees keys 0…i of the whole sequence; needs S_q = S_kv.
        scale: 1/√D by default.
        splits, kv_splits: every rank's number of queries and of keys, where the caller knows them; otherwise
            they are exchanged.

    Returns:
        [B, S_q/P, H, D].

    Communication: two `all_to_all_single`, q with k and v, and the output, each (P−1)/P of its bytes; as many in
    backward. A mask adds one all-gather of its bytes. Raises ValueError, before any collective, for shapes that
    are no attention.
    """
    check_attention_shapes(q, k, v, mask)
    group = get_parallel_group("sequence") if group is None else group
    num_ranks = group.size()
    if num_ranks == 1:
        _check_causal(causal, q.size(1), k.size(1))
        return local_attention(q, k, v, mask=mask, causal=causal, scale=scale)
    q_splits, kv_splits, _ = splits_of_locals([q, k, v], [splits, kv_splits, kv_splits], group, 1)
    _check_causal(causal, sum(q_splits), sum(kv_splits))
    # Whole groups of query heads go with their key head, so that grouped attention stays local.
    kv_heads = share_sizes(k.size(2), num_ranks)
    heads = tuple(size * (q.size(2) // k.size(2)) for size in kv_heads)
    q, k, v = all_to_all_packed(
        [q, k, v],
        group,
        scatter_dim=2,
        gather_dim=1,
        splits=[q_splits, kv_splits, kv_splits],
        scatter_splits=[heads, kv_heads, kv_heads],
    )
    if mask is not None:
        mask = gather_forward_split_backward(mask.to(torch.uint8), group, 1, splits=kv_splits).bool()
    out = local_attention(q, k, v, mask=mask, causal=causal, scale=scale)
    (out,) = all_to_all_packed(
        [out], group, scatter_dim=1, gather_dim=2, splits=[heads], scatter_splits=[q_splits]
    )
    return out


def _check_causal(causal: bool, num_queries: int, num_keys: int) -> None:
    if causal and num_queries != num_keys:
        raise ValueError(
            f"causal attention needs as many queries as keys; got {num_queries} and {num_keys}; pass a mask instead"
        )
