"""Attention with any mask or bias: this rank's queries, and the keys of all ranks gathered.

A mask of queries and keys, or a bias, can be cut neither by heads nor by blocks of keys. So every rank gathers all keys
and values, and computes its own rows of the scores. Of 6 tokens on P = 3 ranks, rank 1 has queries 2 and 3, gathers
keys 0…5, and its bias is rows 2 and 3 of the whole. It costs P times the memory of the ring for keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.attention.call import autocast, torch_attention
from opensora_accel.attention.local import local_attention
from opensora_accel.attention.slices import AttentionSlices
from opensora_accel.communications import check_group, gather_forward_reduce_scatter_backward
from opensora_accel.parallel_states import get_parallel_group


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    slices: AttentionSlices | None = None,
    text_k: Tensor | None = None,
    text_v: Tensor | None = None,
    text_first: bool = True,
    scale: float | None = None,
    kv_splits: Sequence[int] | None = None,
) -> Tensor:
    """Attention of q over all ranks' k and v, and over text that every rank has.

    Args:
        q: [B, S_q/P, H, D], this rank's queries; any text queries among them are the caller's matter.
        k, v: [B, S_kv/P, H_kv, D]; H is a multiple of H_kv.
        group: the P ranks; by default the registered sequence group.
        bias: [B or 1, H or 1, S_q/P or 1, S_kv + T]: bool, true where a key may be seen, or added to the scores.
        slices: in the place of a bias, which of all keys (and text) this rank's queries see: `mask.of_queries(rows)`.
        text_k, text_v: [B, T, H_kv, D], the same on every rank, before or after the other keys.
        scale: 1/√D by default.
        kv_splits: every rank's number of keys, where the caller knows them; otherwise they are exchanged.

    Returns:
        [B, S_q/P, H, D]. A query that sees no key of a bool mask or of slices gives 0.

    Raises:
        ValueError: the splits do not fit, or not one of bias and slices is given.

    Communication: an all-gather of k and v, in backward a reduce-scatter of their gradients.
    """
    if (bias is None) == (slices is None):
        raise ValueError("attention with gathered keys takes a bias or slices, one of them")
    group = check_group(get_parallel_group("sequence") if group is None else group)
    q, k, v = autocast(q, k, v)
    keys, values = (gather_forward_reduce_scatter_backward(t, group, 1, splits=kv_splits) for t in (k, v))
    if text_k is not None and text_v is not None:
        texts = autocast(text_k, text_v)
        keys, values = (
            torch.cat([text, whole] if text_first else [whole, text], 1)
            for text, whole in zip(texts, (keys, values), strict=True)
        )
    if bias is None:
        return local_attention(q, keys, values, scale=scale, slices=slices)
    if bias.dtype != torch.bool:
        # Kernels want the bias in the dtype of the queries, which autocast may have changed.
        bias = bias.to(q.dtype)
    out = torch_attention(
        q.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=bias,
        scale=scale,
        enable_gqa=q.size(2) != keys.size(2),
    )
    if bias.dtype == torch.bool:  # kernels differ in what they make of a row without keys
        out = out.masked_fill(~bias.any(-1, keepdim=True), 0)
    return out.transpose(1, 2)
