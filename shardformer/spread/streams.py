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
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from opensora_accel.attention import slices
from opensora_accel.communications import share_sizes

# Of every rank, places of tokens.
Runs = tuple[tuple[range, ...], ...]


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
        more_keys: every rank's keys that are no tokens of this forward, by their places among those of the mask.
    """

    lengths: Mapping[str, tuple[int, ...]]
    masks: Mapping[str, slices.AttentionSlices]
    spread: str
    balanced: bool = True
    positions: Mapping[str, object] = field(default_factory=dict)
    block_mask: object = None
    more_keys: Runs | None = None

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
        facts = (
            sorted(self.lengths.items()),
            sorted(masks.items()),
            self.spread,
            self.balanced,
            self.more_keys,
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()


@lru_cache(maxsize=256)
def _packed(lengths: tuple[int, ...], kv_lengths: tuple[int, ...]) -> slices.AttentionSlices:
    """One object for equal lengths: each layer asks for it."""
    return slices.AttentionSlices.packed(lengths, kv_lengths)


@lru_cache(maxsize=256)
def deal_in_order(
    mask: slices.AttentionSlices, splits: tuple[int, ...], more_keys: Runs | None = None
) -> slices.Deal:
    """Each rank has a run of tokens. One object for equal masks: it keeps what they were cut into."""
    dealt = slices.Deal.in_order(mask, splits, splits)
    return dealt if more_keys is None else dealt.with_keys(more_keys)


@lru_cache(maxsize=256)
def deal_in_runs(mask: slices.AttentionSlices, runs: Runs, kv_runs: Runs) -> slices.Deal:
    """The ranks' queries and keys as they hold them; every layer asks for the same."""
    return slices.Deal(mask, runs, kv_runs)


@lru_cache(maxsize=256)
def of_runs(
    mask: slices.AttentionSlices, runs: tuple[range, ...], kv_runs: tuple[range, ...]
) -> slices.AttentionSlices:
    """What these queries see of these keys, of both one run behind the other."""
    seen = slices.Deal(mask, (runs,), (kv_runs,)).seen(0, 0)
    return slices.AttentionSlices(sum(map(len, runs)), sum(map(len, kv_runs)), tuple(seen))


@dataclass(frozen=True)
class Buffers:
    """Where a call's tokens stand in buffers of zeros, for which a block mask is made.

    A video of 4 frames of 3 tokens, of which a call has the first 3 frames of 2, and a cache 2 frames of 2. The
    buffers' sides are as long as whole blocks of flex attention, say 16 (o: zeros, #: tokens):

        queries   ##o##o##oooooooo                      tokens (0 1, 3 4, 6 7)
        keys      ##o##o##oooooooo ##o##ooooooooooo     held (16 17, 19 20)

    The zeros among the keys count in the softmax of queries that the mask lets see them.

    Args:
        num_queries, num_keys: of the buffers.
        tokens: their places, among the queries and among the keys.
        held: places of keys that an earlier forward left with the ranks.
        held_splits: how many of these each rank has, in order.
    """

    num_queries: int
    num_keys: int
    tokens: tuple[range, ...]
    held: tuple[range, ...]
    held_splits: tuple[int, ...]


@lru_cache(maxsize=256)
def laid_out(mask: slices.AttentionSlices, at: Buffers) -> tuple[slices.AttentionSlices, Runs]:
    """What tokens see of themselves, of keys that ranks hold, and of zeros; and each rank's of the latter two.

    Zeros that no token sees are left out, and the others are shared out.
    """
    seen = slices.Deal(mask, (at.tokens,), ((range(mask.num_keys),),)).needs(0, 0)
    zeros = _without(seen, (*at.tokens, *at.held))
    laid = of_runs(mask, at.tokens, (*at.tokens, *at.held, *zeros))
    num_zeros = share_sizes(sum(map(len, zeros)), len(at.held_splits))
    held = _in_a_row(at.held_splits, laid.num_queries)
    return laid, tuple(zip(held, _in_a_row(num_zeros, laid.num_keys - sum(num_zeros)), strict=True))


def _in_a_row(sizes: tuple[int, ...], start: int) -> list[range]:
    stops = list(itertools.accumulate(sizes, initial=start))
    return [range(*ends) for ends in itertools.pairwise(stops)]


def _without(runs: tuple[range, ...], others: tuple[range, ...]) -> tuple[range, ...]:
    """What is left of runs without others."""
    for other in others:
        before = [range(run.start, min(run.stop, other.start)) for run in runs]
        behind = [range(max(run.start, other.stop), run.stop) for run in runs]
        runs = tuple(part for pair in zip(before, behind, strict=True) for part in pair if part)
    return runs


@lru_cache(maxsize=32)
def order_on(deal: slices.Deal, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """[S] twice: all tokens rank by rank, and back into the order of the sequence; None where that is it already."""
    order = deal.order()
    if torch.equal(order, torch.arange(len(order))):
        return None
    return order.to(device), order.argsort().to(device)
