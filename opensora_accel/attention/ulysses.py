"""Ulysses: exchange tokens for heads, attend over the whole sequence, exchange back.

P = 3 ranks, 6 tokens, 3 heads a b c. Each rank holds two tokens with all heads:

    rank 0: tokens 0 1, heads a b c   →   all-to-all   →   rank 0: tokens 0…5, head a   →   attends alone
    rank 1: tokens 2 3, heads a b c                        rank 1: tokens 0…5, head b
    rank 2: tokens 4 5, heads a b c                        rank 2: tokens 0…5, head c   →   all-to-all back

q, k and v travel in one collective. Neither tokens nor heads need to divide: 4 heads on 3 ranks are shares of (2, 1,
1). With grouped heads, a key head goes to every rank that has one of its query heads. 6 query heads of 2 key heads x
y on 3 ranks: rank 0 needs x for its queries 0 1, rank 1 needs x for query 2 and y for query 3, rank 2 needs y. So x
and y travel twice each, and no query head is moved to where its key head is.

Source: DeepSpeed-Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.attention.call import autocast, enter_call
from opensora_accel.attention.local import attend_whole
from opensora_accel.attention.slices import AttentionSlices, Deal
from opensora_accel.communications import (
    Cut,
    Sizes,
    all_to_all_packed,
    all_to_all_unchecked,
    check_group,
    gather_forward_split_backward,
    share_sizes,
)
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
    slices: AttentionSlices | Deal | None = None,
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
        slices: which queries see which keys of the whole sequence; with a key mask beside it, both count. Where tokens
            are dealt out (`deal`), what says so, of these P ranks.

    Returns:
        [B, S_q/P, H, D].

    Raises:
        ValueError: the shapes are no attention; on every rank and before any data is sent, unless the sizes are
        given.

    Communication: two `all_to_all_single`, q with k and v, and the output, each (P−1)/P of its bytes; as many in
    backward. A mask adds one all-gather of its bytes.
    """
    group = check_group(get_parallel_group("sequence") if group is None else group)
    q, k, v = autocast(q, k, v)
    call = enter_call(
        q, k, v, mask, [group], splits=splits, kv_splits=kv_splits, causal=causal, scale=scale, slices=slices
    )
    if group.size() == 1:
        return attend_whole(q, k, v, mask, call)
    num_heads = q.size(2)
    # [B, S/P, H, D] → [B, S, H/P, D] → attention → [B, S, H/P, D] → [B, S/P, H, D]
    q, k, v, mask = scatter_heads(q, k, v, mask, group, call.splits, call.kv_splits)
    return gather_heads(attend_whole(q, k, v, mask, call), group, call.splits, num_heads)


@dataclass(frozen=True)
class Heads:
    """Which heads a rank attends with: a share of the query heads, and the key heads that these need."""

    # Every rank's number of query heads.
    queries: Sizes
    # Every rank's key heads; neighbours may share one.
    keys: tuple[range, ...]
    # Query heads of one key head.
    group_size: int
    # Every rank has as many key heads, each with all of its query heads: nothing is sent twice or repeated.
    are_even: bool = False

    @classmethod
    def shared(cls, num_heads: int, num_kv_heads: int, num_ranks: int) -> Heads:
        """The shares of `torch.tensor_split` of the query heads."""
        queries, size = share_sizes(num_heads, num_ranks), num_heads // num_kv_heads
        # Then the query heads divide too, as they are a multiple of the key heads.
        if num_kv_heads % num_ranks == 0:
            # Neighbouring key heads go to one rank, each with all of its query heads.
            share = num_kv_heads // num_ranks
            even = tuple(range(rank * share, (rank + 1) * share) for rank in range(num_ranks))
            return cls(queries, even, size, are_even=True)
        keys, start = [], 0
        for own in queries:
            # From the key head of the first own query to that of the last one.
            keys.append(range(start // size, -(-(start + own) // size)) if own else range(0))
            start += own
        return cls(queries, tuple(keys), size)

    def query_range(self, rank: int) -> range:
        """The query heads of a rank."""
        first = sum(self.queries[:rank])
        return range(first, first + self.queries[rank])

    def spread_keys(self, tensor: Tensor) -> Tensor:
        """[B, S, H_kv, D] → [B, S, all ranks' key heads, D], one rank's after the other's."""
        if self.are_even:
            return tensor
        heads = [head for keys in self.keys for head in keys]
        # Without a copy where no rank shares a key head with another: the heads are then in order already.
        if heads == list(range(tensor.size(2))):
            return tensor
        # Slices, because an index would be copied to the device, which waits for that.
        return torch.cat([tensor[:, :, keys.start : keys.stop] for keys in self.keys if keys], 2)

    def align_keys(self, tensor: Tensor, rank: int) -> Tensor:
        """[B, S, this rank's key heads, D] with key heads repeated until each has as many query heads.

        Rank 1 of the example at the top has the queries 2 3 and the keys x y: one query each, as it should be. With 9
        query heads of 3 key heads on 2 ranks, rank 0 has the queries 0…4 and the keys x y: x serves three and y two.
        No kernel takes that, so the keys become x x x y y.
        """
        if self.are_even:
            return tensor
        # For each of this rank's queries, which of its key heads it needs.
        serving = [head // self.group_size - self.keys[rank].start for head in self.query_range(rank)]
        num_keys = tensor.size(2)
        # A kernel's own grouping: as many queries in a row for each key.
        if num_keys == 0 or serving == [i // (len(serving) // num_keys) for i in range(len(serving))]:
            return tensor
        repeated = [
            tensor[:, :, head : head + 1].expand(-1, -1, serving.count(head), -1) for head in range(num_keys)
        ]
        return torch.cat(repeated, 2)


def scatter_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    group: dist.ProcessGroup,
    splits: Sizes,
    kv_splits: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """This rank's heads of all the group's tokens, and the whole mask.

    Args:
        q: [B, S_q/P, H, D]; k, v: [B, S_kv/P, H_kv, D]; mask: [B, S_kv/P].

    Returns:
        [B, S_q, H/P, D], twice [B, S_kv, H_kv/P, D] (or more key heads, where shares cut a group), and [B, S_kv].
    """
    # Whole heads go to each rank. A head's attention needs no other head, so nothing is sent within it.
    heads = Heads.shared(q.size(2), k.size(2), group.size())
    tokens = Cut(1, (splits, kv_splits, kv_splits))
    num_keys = tuple(map(len, heads.keys))
    q, k, v = all_to_all_unchecked(
        [q, heads.spread_keys(k), heads.spread_keys(v)],
        group,
        scatter=Cut(2, (heads.queries, num_keys, num_keys)),
        gather=tokens,
    )
    # Key heads are repeated after the exchange, because copies would have to travel otherwise.
    k, v = heads.align_keys(k, group.rank()), heads.align_keys(v, group.rank())
    return q, k, v, None if mask is None else whole_mask(mask, group, kv_splits)


def whole_mask(mask: Tensor, group: dist.ProcessGroup, splits: Sizes) -> Tensor:
    """The key mask of all ranks: [B, S_kv/P] → [B, S_kv]."""
    as_bytes = mask.to(torch.uint8)
    if not torch.compiler.is_compiling():
        return gather_forward_split_backward(as_bytes, group, 1, splits=splits).bool()
    # In a graph an all-gather of uneven sizes is an all-to-all of one copy for every rank: [B, P, S_kv/P].
    copies = as_bytes.unsqueeze(1).expand(-1, group.size(), -1)
    (whole,) = all_to_all_packed([copies], group, scatter_dim=1, gather_dim=2, splits=[splits])
    return whole.squeeze(1).bool()


def gather_heads(out: Tensor, group: dist.ProcessGroup, splits: Sizes, num_heads: int) -> Tensor:
    """All `num_heads` heads of this rank's tokens, from its heads of all tokens: [B, S, H/P, D] → [B, S/P, H, D]."""
    # The shares that `scatter_heads` gave out: this is the same exchange with its dims the other way round.
    heads = share_sizes(num_heads, group.size())
    (gathered,) = all_to_all_unchecked([out], group, scatter=Cut(1, (splits,)), gather=Cut(2, (heads,)))
    return gathered


def switch_sharded_dim(
    input_: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    from_dim: int,
    to_dim: int,
    splits: Sequence[int] | None = None,
) -> Tensor:
    """The same tokens with `to_dim` spread over the ranks instead of `from_dim`.

    For factorised attention (Open-Sora's STDiT), where frames attend along space and places along time: a layer needs
    one dimension whole and may have the other one spread. Ulysses would send four tensors (q, k, v and the output)
    around the attention along the dimension that is spread; a switch there and one back are half of that.

    Args:
        input_: [B, T/P, S, C] with from_dim=1 (frames are spread), to_dim=2: of any dims.
        group: the P ranks; by default the registered sequence group.
        splits: every rank's size of `from_dim`, where the caller knows them; otherwise they are exchanged.

    Returns:
        [B, T, S/P, C]; shares by the rule of `torch.tensor_split`, of sizes that need not divide.

    Raises:
        ValueError: the dims are out of range or equal, or the splits do not fit.

    Communication: one `all_to_all_single` of (P−1)/P of the input. Gradient: the switch back, unscaled.
    Source: dynamic sequence parallelism, arXiv:2403.10266.
    """
    group = get_parallel_group("sequence") if group is None else group
    # What becomes spread is scattered, and what was spread is gathered.
    (switched,) = all_to_all_packed([input_], group, to_dim, from_dim, splits=[splits])
    return switched
