"""What a block mask of flex attention says, row by row.

It lists for each row of blocks those that are seen whole and those that are seen in part, and has a function that says
of a query and a key whether they see each other. Three frames of 100 tokens, each of which sees itself and those before
it, in blocks of 128, of 300 tokens and padding:

    row of blocks 0   whole: none; in part: 0 and 1 (queries 0…99 see 100 keys, 100…127 see 200)
    row of blocks 1   whole: 0; in part: 1 and 2
    row of blocks 2   whole: 0 and 1; in part: 2 (the padding sees itself, and is left out here)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def rows_of_block_mask(block_mask: BlockMask, num_queries: int, num_keys: int) -> Iterator[Tensor]:
    """The dense mask of its first `num_queries` queries and `num_keys` keys, on the host, a row of blocks at a time.

    Raises:
        ValueError: it is of another number of tokens, even in whole blocks, differs from sample to sample or from head
            to head, or lets tokens see the padding behind them.
    """
    (q_length, kv_length), (q_size, kv_size) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    side = max(q_size, kv_size)
    for number, length in ((num_queries, q_length), (num_keys, kv_length)):
        if not number <= length <= -(-number // side) * side:
            raise ValueError(
                f"the block mask is of {q_length} queries and {kv_length} keys, and there are {num_queries} and "
                f"{num_keys}, in blocks of {side}; make it for this clip"
            )
    in_part = _same_for_all(block_mask.kv_num_blocks, block_mask.kv_indices)
    whole: list[list[int]] = [[] for _ in in_part]
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        whole = _same_for_all(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    device = block_mask.kv_indices.device
    zero = torch.zeros((), dtype=torch.int64, device=device)
    for row, first in enumerate(range(0, num_queries, q_size)):
        queries = torch.arange(first, min(first + q_size, num_queries), device=device)
        seen = torch.zeros(len(queries), kv_length, dtype=torch.bool, device=device)
        for block in whole[row]:
            seen[:, block * kv_size : (block + 1) * kv_size] = True
        for block in in_part[row]:
            keys = torch.arange(block * kv_size, min((block + 1) * kv_size, kv_length), device=device)
            seen[:, keys[0] : keys[-1] + 1] = block_mask.mask_mod(zero, zero, queries[:, None], keys[None, :])
        if seen[:, num_keys:].any():
            raise ValueError(
                f"the block mask lets some of tokens {first}…{first + len(queries) - 1} see padding behind the "
                f"{num_keys} tokens, whose zeros count in their softmax: make masks for whole blocks of frames, so "
                "that none ends behind the clip"
            )
        yield seen[:, :num_keys].cpu()


def _same_for_all(counts: Tensor, indices: Tensor) -> list[list[int]]:
    """For each row of blocks the numbers of those that it sees; counts [B, H, R], indices [B, H, R, C].

    Raises:
        ValueError: samples or heads differ.
    """
    if counts.dim() != 3 or counts.shape[:2] != (1, 1):
        raise ValueError(
            f"the block mask is made for {tuple(counts.shape[:2])} samples and heads, each with its own, and slices "
            "are the same for all: make it with B=None and H=None"
        )
    return [row[:count] for count, row in zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)]
