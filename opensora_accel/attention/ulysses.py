"""Ulysses: exchange tokens for heads, attend over the whole sequence, exchange back.

Source: DeepSpeed-Ulysses, arXiv:2309.14509. Here q, k and v travel in one collective, and neither tokens nor
heads need to divide: some ranks then hold one more of either, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.attention.checks import agreed_splits
from opensora_accel.attention.local import attend_whole, autocast
from opensora_accel.communications import all_to_all_packed, gather_forward_split_backward, share_sizes
from opensora_accel.communications.checks import check_group
from opensora_accel.communications.sizes import Sizes
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

    Keys that every rank holds whole (cross-attention to text) need none of this: `local_attention(q, k, v)`.

    Args:
        q: [B, S_q/P, H, D].
        k, v: [B, S_kv/P, H_kv, D]; H is a multiple of H_kv.
        group: the P ranks; by default the registered sequence group.
        mask: [B, S_kv/P], this rank's part of the key mask, true where a key may be seen.
        causal: query i sees keys 0…i of the whole sequence; needs S_q = S_kv.
        scale: 1/√D by default.
        splits, kv_splits: every rank's number of queries and of keys, where the caller knows them; otherwise
            they are exchanged. Within torch.compile they must be given.

    Returns:
        [B, S_q/P, H, D].

    Communication: two `all_to_all_single`, q with k and v, and the output, each (P−1)/P of its bytes; as many in
    backward. A mask adds one all-gather of its bytes. A key head goes to every rank that has one of its query heads:
    to more than one where P does not divide H_kv.

    Raises ValueError, before any data is sent, for shapes that are no attention.
    """
    group = check_group(get_parallel_group("sequence") if group is None else group)
    q, k, v = autocast(q, k, v)
    splits, kv_splits = agreed_splits(
        {"q": q, "k": k, "v": v, "mask": mask},
        {"causal": causal, "scale": scale},
        [group],
        splits,
        kv_splits,
    )
    if group.size() == 1:
        return attend_whole(q, k, v, mask, causal, scale)
    num_heads = q.size(2)
    q, k, v, mask = scatter_heads(q, k, v, mask, group, splits, kv_splits)
    out = attend_whole(q, k, v, mask, causal, scale)
    return gather_heads(out, group, splits, num_heads)


@dataclass(frozen=True)
class Heads:
    """Which heads a rank attends with: a share of the query heads, and the key heads that these need."""

    queries: Sizes
    """Every rank's number of query heads."""
    keys: tuple[range, ...]
    """Every rank's key heads; neighbours may share one."""
    group_size: int

    @classmethod
    def shared(cls, num_heads: int, num_kv_heads: int, num_ranks: int) -> Heads:
        queries, size = share_sizes(num_heads, num_ranks), num_heads // num_kv_heads
        ends = [sum(queries[: rank + 1]) for rank in range(num_ranks)]
        keys = tuple(
            range((end - own) // size, -(-end // size)) if own else range(0)
            for end, own in zip(ends, queries, strict=True)
        )
        return cls(queries, keys, size)

    def query_range(self, rank: int) -> range:
        first = sum(self.queries[:rank])
        return range(first, first + self.queries[rank])

    def spread_keys(self, tensor: Tensor) -> Tensor:
        """[B, S, H_kv, D] → all ranks' key heads, one rank's after the other's."""
        heads = [head for keys in self.keys for head in keys]
        return tensor if heads == list(range(tensor.size(2))) else _select(tensor, heads)

    def align_keys(self, tensor: Tensor, rank: int) -> Tensor:
        """The rank's key heads in even groups of its query heads, repeated where its share cuts a group."""
        serving = [head // self.group_size - self.keys[rank].start for head in self.query_range(rank)]
        num_keys = tensor.size(2)
        if num_keys == 0 or serving == [i // (len(serving) // num_keys) for i in range(len(serving))]:
            return tensor
        return _select(tensor, serving)


def _select(tensor: Tensor, heads: list[int]) -> Tensor:
    return tensor.index_select(2, torch.tensor(heads, device=tensor.device))


def scatter_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    group: dist.ProcessGroup,
    splits: Sizes,
    kv_splits: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """This rank's heads of all the group's tokens, and the whole mask."""
    rank = group.rank()
    heads = Heads.shared(q.size(2), k.size(2), group.size())
    num_keys = tuple(map(len, heads.keys))
    q, k, v = all_to_all_packed(
        [q, heads.spread_keys(k), heads.spread_keys(v)],
        group,
        scatter_dim=2,
        gather_dim=1,
        splits=[splits, kv_splits, kv_splits],
        scatter_splits=[heads.queries, num_keys, num_keys],
    )
    k, v = heads.align_keys(k, rank), heads.align_keys(v, rank)
    return q, k, v, None if mask is None else _whole_mask(mask, group, kv_splits)


def _whole_mask(mask: Tensor, group: dist.ProcessGroup, splits: Sizes) -> Tensor:
    as_bytes = mask.to(torch.uint8)
    if not torch.compiler.is_compiling():
        return gather_forward_split_backward(as_bytes, group, 1, splits=splits).bool()
    # An all-gather of uneven sizes, as an all-to-all of one copy for every rank.
    copies = as_bytes.unsqueeze(1).expand(-1, group.size(), -1)
    (whole,) = all_to_all_packed([copies], group, scatter_dim=1, gather_dim=2, splits=[splits])
    return whole.squeeze(1).bool()


def gather_heads(out: Tensor, group: dist.ProcessGroup, splits: Sizes, num_heads: int) -> Tensor:
    """All `num_heads` heads of this rank's tokens, from its heads of all tokens."""
    heads = share_sizes(num_heads, group.size())
    (gathered,) = all_to_all_packed(
        [out], group, scatter_dim=1, gather_dim=2, splits=[heads], scatter_splits=[splits]
    )
    return gathered
