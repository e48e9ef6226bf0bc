"""Which tokens see each other, where a forward is told: several samples in one row, or a mask of its own.

Tokens come in *streams*, each named by the argument by which it enters the model. Two clips of 3 and 2 tokens in one
row, with captions of 2 and 1 tokens:

    hidden_states (3, 2)              hidden_states (3, 2) → encoder_hidden_states (2, 1)
    # # # . .                         # # .
    # # # . .                         # # .
    # # # . .                         # # .
    . . . # #                         . . #
    . . . # #                         . . #

One stream is spread over the ranks, and the others are whole on each. In a ring the first is dealt out, so that every
rank has as many pairs to compute (`attention.slices.deal`); heads of Ulysses are as much work whatever the mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from opensora_accel.attention import slices


@dataclass(frozen=True, eq=False)
class Packed:
    """What one forward is told of its tokens.

    Args:
        lengths: of each stream, every sample's number of tokens.
        masks: of a stream, who sees whom in it, where that is not all of a sample.
        spread: the stream that is spread over the ranks.
        balanced: whether it may be dealt out; otherwise each rank has a run of it.
        positions: what a module returns of the samples, by its path.
        block_mask: of flex attention, where the model's own is what is told.
    """

    lengths: Mapping[str, tuple[int, ...]]
    masks: Mapping[str, slices.AttentionSlices]
    spread: str
    balanced: bool = True
    positions: Mapping[str, object] = field(default_factory=dict)
    block_mask: object = None

    @cached_property
    def own(self) -> slices.AttentionSlices | None:
        """Who sees whom in the stream that is spread; None where all do."""
        return self.between(self.spread, self.spread)

    def between(self, queries: str, keys: str) -> slices.AttentionSlices | None:
        """Which keys the queries of a stream see in another one, or in their own; None where it is all of them."""
        if queries == keys and queries in self.masks:
            return self.masks[queries]
        if queries not in self.lengths or keys not in self.lengths:
            return None
        return _packed(self.lengths[queries], self.lengths[keys])

    @cached_property
    def digest(self) -> str:
        """The same for the same lengths and masks, on all ranks."""
        masks = {name: mask.digest for name, mask in self.masks.items()}
        facts = (sorted(self.lengths.items()), sorted(masks.items()), self.spread, self.balanced)
        return hashlib.sha256(repr(facts).encode()).hexdigest()


@lru_cache(maxsize=256)
def _packed(lengths: tuple[int, ...], kv_lengths: tuple[int, ...]) -> slices.AttentionSlices:
    """One object for equal lengths: each layer asks for it."""
    return slices.AttentionSlices.packed(lengths, kv_lengths)


@lru_cache(maxsize=256)
def deal_in_order(mask: slices.AttentionSlices, splits: tuple[int, ...]) -> slices.Deal:
    """Each rank has a run of tokens. One object for equal masks: it keeps what they were cut into."""
    return slices.Deal.in_order(mask, splits, splits)


@lru_cache(maxsize=256)
def deal_in_runs(
    mask: slices.AttentionSlices, runs: tuple[tuple[range, ...], ...], kv_runs: tuple[tuple[range, ...], ...]
) -> slices.Deal:
    """The ranks' queries and keys as they hold them; every layer asks for the same."""
    return slices.Deal(mask, runs, kv_runs)


@lru_cache(maxsize=256)
def of_queries(mask: slices.AttentionSlices, runs: tuple[range, ...]) -> slices.AttentionSlices:
    """What these queries see, one run behind the other, of all keys."""
    seen = slices.Deal(mask, (runs,), ((range(mask.num_keys),),)).seen(0, 0)
    return slices.AttentionSlices(sum(map(len, runs)), mask.num_keys, tuple(seen))


@lru_cache(maxsize=32)
def order_on(deal: slices.Deal, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """[S] twice: all tokens rank by rank, and back into the order of the sequence; None where that is it already."""
    order = deal.order()
    if torch.equal(order, torch.arange(len(order))):
        return None
    return order.to(device), order.argsort().to(device)
