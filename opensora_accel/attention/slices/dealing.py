"""Which tokens each rank holds, so that all have the same share of a mask's area and of the tokens.

A causal mask of 8 tokens has 36 pairs. On P = 2 ranks its halves have 10 and 26 of them. Cut into four chunks of two
tokens, which have 3, 7, 11 and 15 pairs, and dealt out in two rounds, the ranks have as much as each other:

    round   chunks, the largest first   who has least gets most
    1       6 7 (15), 4 5 (11)          rank 0: 6 7        (15)    rank 1: 4 5        (11)
    2       2 3 (7), 0 1 (3)            rank 0: 0 1 6 7    (18)    rank 1: 2 3 4 5    (18)

Every round gives each rank one chunk, so tokens are even too. How far apart two ranks are never exceeds the largest
chunk: in a round the one that is ahead gets the smaller chunk, which brings it nearer or, at most, as far to the other
side. So no rank has more than area / P and the largest chunk. There are as few chunks as keep within what is asked,
because each costs kernel calls, and neighbours that fall to one rank are one run.

Keys go with their tokens. A rank sends another one those of its keys that the other's queries see, and no more: `Step`.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from opensora_accel.attention.balance import Tile
from opensora_accel.attention.slices.geometry import Slice, cut
from opensora_accel.attention.slices.mask import AttentionSlices, in_a_row, joined
from opensora_accel.attention.slices.pieces import Pieces
from opensora_accel.communications import share_sizes

# Of a rank. More are no better balanced in any mask tried, and their tiles are small.
_MOST_CHUNKS = 64


Runs = tuple[tuple[range, ...], ...]


class Step(NamedTuple):
    """What a rank does at step s: it sends to the rank s places on, and computes with keys of the one s before it."""

    # Of its own keys, as it holds them.
    sends: tuple[range, ...]
    num_received: int
    # Keys are counted among those received; at step 0 among its own.
    pieces: Pieces

    @property
    def num_sent(self) -> int:
        """How many tokens' keys it sends."""
        return sum(map(len, self.sends))

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """What it computes, kernel call by kernel call."""
        return self.pieces.tiles


@dataclass(frozen=True, eq=False, repr=False)
class Deal:
    """The tokens of every rank, and what of a mask each computes.

    Args:
        runs: every rank's queries, as it holds them; without text that all ranks hold, if the mask has any.
        kv_runs: every rank's keys; None where they are those of the queries' tokens.
    """

    mask: AttentionSlices
    runs: Runs
    kv_runs: Runs | None = None

    @classmethod
    def in_order(
        cls,
        mask: AttentionSlices,
        splits: Sequence[int],
        kv_splits: Sequence[int],
        starts: tuple[int, int] = (0, 0),
    ) -> Deal:
        """Each rank has a run of queries and one of keys, in order; `starts` are the first query and key."""
        runs, kv_runs = (
            tuple((range(start + run.start, start + run.stop),) for run in in_a_row(sizes))
            for sizes, start in zip((splits, kv_splits), starts, strict=True)
        )
        return cls(mask, runs, None if runs == kv_runs else kv_runs)

    @property
    def splits(self) -> tuple[int, ...]:
        """Every rank's number of queries."""
        return _sizes(self.runs)

    @property
    def kv_splits(self) -> tuple[int, ...]:
        """Every rank's number of keys."""
        return self.splits if self.kv_runs is None else _sizes(self.kv_runs)

    @cached_property
    def name(self) -> str:
        """What `dealt` finds it by, as long as it lives: an operator takes no object."""
        name = f"deal {id(self)}"
        _named[name] = self
        return name

    @cached_property
    def digest(self) -> str:
        """The same for equal deals, on all ranks."""
        return hashlib.sha256(repr((self.mask.digest, self.runs, self.kv_runs)).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"Deal({self.mask!r} over {len(self.runs)} ranks of {self.splits} queries)"

    @cached_property
    def areas(self) -> tuple[int, ...]:
        """Every rank's pairs of queries and keys."""
        ends = [each for of_rank in self.runs for run in of_rank for each in (run.start, run.stop)]
        before = self.mask.area_before(torch.tensor(ends, dtype=torch.int64)).view(-1, 2)
        areas, of_runs = [], iter((before[:, 1] - before[:, 0]).tolist())
        for of_rank in self.runs:
            areas.append(sum(itertools.islice(of_runs, len(of_rank))))
        return tuple(areas)

    @property
    def imbalance(self) -> float:
        """The largest share over the mean; 1 is even."""
        total = sum(self.areas)
        return max(self.areas) * len(self.areas) / total if total else 1.0

    def positions(self, rank: int) -> Tensor:
        """[S/P]: the places in the sequence of a rank's tokens, as it holds them: a rotary embedding needs them."""
        return torch.cat([torch.arange(0), *(torch.arange(run.start, run.stop) for run in self.runs[rank])])

    def order(self) -> Tensor:
        """[S]: the places of all tokens, rank by rank.

        `x.index_select(1, order)` brings a whole sequence [B, S, …] into it, to be cut into `splits`, and
        `x.index_select(1, order.argsort())` back.
        """
        return torch.cat([self.positions(rank) for rank in range(len(self.runs))])

    def seen(self, rank: int, owner: int) -> list[Slice]:
        """What the queries of `rank` see of the keys of `owner`, both counted as the ranks hold them."""
        return self._seen([rank], [owner])[rank, owner]

    def needs(self, rank: int, owner: int) -> tuple[range, ...]:
        """The keys of `owner`, as it holds them, that some query of `rank` sees."""
        return _needed(self.seen(rank, owner))

    def steps(self, rank: int) -> tuple[Step, ...]:
        """What a rank does; every layer asks for the same, so it is found once."""
        if rank not in self._steps:
            num_ranks = len(self.runs)
            seen = self._seen([rank], range(num_ranks))
            seen_of_own = self._seen(range(num_ranks), [rank])
            self._steps[rank] = tuple(
                _step(
                    seen[rank, (rank - shift) % num_ranks],
                    seen_of_own[(rank + shift) % num_ranks, rank],
                    shift,
                )
                for shift in range(num_ranks)
            )
        return self._steps[rank]

    def whole(self) -> Deal:
        """Of one rank that has all tokens, one rank's behind the other's."""
        return self.merged(len(self.runs))

    def merged(self, num_ranks: int) -> Deal:
        """With so many neighbours as one rank."""
        if num_ranks == 1:
            return self
        if num_ranks not in self._made:
            kv_runs = None if self.kv_runs is None else _merge(self.kv_runs, num_ranks)
            self._made[num_ranks] = Deal(self.mask, _merge(self.runs, num_ranks), kv_runs)
        return self._made[num_ranks]

    def shared(self, num_ranks: int) -> Deal:
        """With each rank's tokens cut in order between so many neighbours, which `merged` makes one again."""
        runs, kv_runs = (
            None
            if each is None
            else tuple(share for of_rank in each for share in _shares(of_rank, num_ranks))
            for each in (self.runs, self.kv_runs)
        )
        assert runs is not None
        shared = Deal(self.mask, runs, kv_runs)
        shared._made[num_ranks] = self
        return shared

    def with_keys(self, more_keys: Runs) -> Deal:
        """With further keys, which are no tokens of the sequence, behind those of each rank's tokens."""
        both = zip(self.kv_runs or self.runs, more_keys, strict=True)
        return Deal(self.mask, self.runs, tuple((*own, *more) for own, more in both))

    def with_text(self, splits: Sequence[int], kv_splits: Sequence[int], *, is_first: bool) -> Deal:
        """With each rank's share of text, before its tokens or behind them, as the mask has the whole text.

        Args:
            splits, kv_splits: every rank's number of text queries and text keys.
        """
        shares = (tuple(splits), tuple(kv_splits), is_first)
        if shares not in self._made:
            ends = self.mask.num_queries, self.mask.num_keys
            both = []
            for runs, sizes, end in zip(
                (self.runs, self.kv_runs or self.runs), shares[:2], ends, strict=True
            ):
                start = 0 if is_first else end - sum(sizes)
                text = [(range(start + run.start, start + run.stop),) for run in in_a_row(sizes)]
                pairs = zip(text, runs, strict=True)
                both.append(tuple((*words, *own) if is_first else (*own, *words) for words, own in pairs))
            self._made[shares] = Deal(self.mask, *both)
        return self._made[shares]

    @cached_property
    def _steps(self) -> dict[int, tuple[Step, ...]]:
        return {}

    @cached_property
    def _made(self) -> dict[Any, Deal]:
        return {}

    def _seen(self, ranks: Sequence[int], owners: Sequence[int]) -> dict[tuple[int, int], list[Slice]]:
        """`seen` of each of these ranks and owners, all at once: a slice alone takes as long as thousands."""
        q_runs = _Placed.of(self.runs, ranks)
        k_runs = _Placed.of(self.runs if self.kv_runs is None else self.kv_runs, owners)
        slices, of_q, of_k = cut(self.mask.table, q_runs.runs, k_runs.runs)
        # From places in the sequence to those in which a rank holds its tokens, along with the diagonals.
        rows, columns = q_runs.shifts[of_q], k_runs.shifts[of_k]
        slices = slices + torch.stack([rows, rows, columns, columns, columns - rows, columns - rows], 1)
        found: dict[tuple[int, int], list[Slice]] = {pair: [] for pair in itertools.product(ranks, owners)}
        for *pair, each in zip(
            q_runs.ranks[of_q].tolist(), k_runs.ranks[of_k].tolist(), slices.tolist(), strict=True
        ):
            found[pair[0], pair[1]].append(Slice(*each))
        return found


class _Placed(NamedTuple):
    """Runs of several ranks [R, 2], the rank of each [R], and how far from its place a rank holds it [R]."""

    runs: Tensor
    ranks: Tensor
    shifts: Tensor

    @classmethod
    def of(cls, runs: Runs, ranks: Sequence[int]) -> _Placed:
        rows = [
            (run.start, run.stop, rank, place - run.start)
            for rank in ranks
            for run, place in _placed(runs[rank])
        ]
        table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
        return cls(table[:, :2], table[:, 2], table[:, 3])


def _step(seen: Sequence[Slice], seen_of_own: Sequence[Slice], shift: int) -> Step:
    """Of what a rank sees of the keys of the one before it, and the one behind sees of its own."""
    if shift == 0:
        return Step((), 0, Pieces(tuple(seen)))
    received = _needed(seen)
    # What is received is the needed runs alone, one behind the other.
    starts, places = [run.start for run in received], [place for _, place in _placed(received)]
    moved = []
    for each in seen:
        run = bisect_right(starts, each.k_start) - 1
        moved.append(each.moved(0, places[run] - starts[run]))
    return Step(_needed(seen_of_own), sum(map(len, received)), Pieces(tuple(moved)))


_named: WeakValueDictionary[str, Deal] = WeakValueDictionary()


def dealt(name: str) -> Deal:
    """The deal of this name, which somebody holds."""
    return _named[name]


def _sizes(runs: Runs) -> tuple[int, ...]:
    return tuple(sum(map(len, of_rank)) for of_rank in runs)


def _shares(runs: Sequence[range], num_ranks: int) -> list[tuple[range, ...]]:
    """Runs cut in order into shares of as many tokens: 0…4 and 8…11 in two are 0…4, and 8…11 without the 5th token."""
    shares, placed = [], _placed(runs)
    for share in in_a_row(share_sizes(sum(map(len, runs)), num_ranks)):
        parts = []
        for run, place in placed:
            first, last = max(share.start, place), min(share.stop, place + len(run))
            if first < last:
                parts.append(range(run.start + first - place, run.start + last - place))
        shares.append(tuple(parts))
    return shares


def _merge(runs: Runs, num_ranks: int) -> Runs:
    return tuple(
        tuple(itertools.chain.from_iterable(runs[first : first + num_ranks]))
        for first in range(0, len(runs), num_ranks)
    )


def _needed(seen: Sequence[Slice]) -> tuple[range, ...]:
    return tuple(joined(sorted((each.keys for each in seen), key=lambda run: run.start)))


def _placed(runs: Sequence[range]) -> list[tuple[range, int]]:
    """Runs, and where each begins among a rank's tokens."""
    starts = itertools.accumulate(map(len, runs), initial=0)
    return list(zip(runs, starts, strict=False))


@lru_cache(maxsize=256)
def deal(
    mask: AttentionSlices,
    num_ranks: int,
    *,
    ulysses: int = 1,
    within: float = 0.05,
    tokens: range | None = None,
    more_keys: Runs | None = None,
) -> Deal:
    """Deals out the tokens of a mask.

    Args:
        mask: of a sequence that attends to itself.
        ulysses: how many neighbouring ranks exchange heads (`usp_attention`). Each of them attends over the tokens of
            all, so these are dealt to them as to one rank, and cut in order between them.
        tokens: those that are dealt out, by default all. The others are text that all ranks hold (`joint_attention`).
        more_keys: of a mask that has keys behind those of its tokens, as a cache holds them, every rank's.
        within: how much more than the mean a rank may have to compute. Where no number of chunks reaches it, the one
            that comes nearest is taken, and no rank has more than the mean and the largest chunk.

    Raises:
        ValueError: queries and keys are not the same tokens, or `ulysses` does not divide the ranks.
    """
    if num_ranks % ulysses:
        raise ValueError(f"{ulysses} ranks that exchange heads do not divide {num_ranks} ranks")
    num_more = sum(_sizes(more_keys or ()))
    if mask.num_queries + num_more != mask.num_keys:
        raise ValueError(
            f"tokens are dealt out with their keys, of which there must be as many; got {mask.num_queries} queries and "
            f"{mask.num_keys - num_more} keys"
        )
    dealt = _deal_queries(mask, num_ranks, ulysses, within, tokens)
    return dealt if more_keys is None else dealt.with_keys(more_keys)


def _deal_queries(
    mask: AttentionSlices, num_ranks: int, ulysses: int, within: float, tokens: range | None
) -> Deal:
    """The tokens as queries: who holds what of the mask's further keys is not said yet."""
    if ulysses > 1:
        return _deal_queries(mask, num_ranks // ulysses, 1, within, tokens).shared(ulysses)
    tokens = range(mask.num_queries) if tokens is None else tokens
    best: Deal | None = None
    chunks_of_rank = 1
    while best is None or (chunks_of_rank <= _MOST_CHUNKS and chunks_of_rank * num_ranks <= len(tokens)):
        found = _in_rounds(mask, tokens, num_ranks, chunks_of_rank)
        if best is None or found.imbalance < best.imbalance:
            best = found
        if best.imbalance <= 1 + within:
            break
        chunks_of_rank *= 2
    return best


def _in_rounds(mask: AttentionSlices, tokens: range, num_ranks: int, num_rounds: int) -> Deal:
    sizes = share_sizes(len(tokens), num_ranks * num_rounds)
    edges = torch.tensor([*itertools.accumulate(sizes, initial=tokens.start)])
    areas = mask.area_before(edges).diff()
    # Of chunks alike the first comes first.
    by_area = areas.argsort(descending=True, stable=True).view(num_rounds, num_ranks)
    loads, taken = torch.zeros(num_ranks, dtype=torch.int64), []
    for chunks in by_area:
        ranks = loads.argsort(stable=True)
        loads[ranks] += areas[chunks]
        of_round = torch.empty_like(chunks)
        of_round[ranks] = chunks
        taken.append(of_round)
    held = torch.stack(taken, 1).sort(1).values.tolist()
    ends = edges.tolist()
    return Deal(
        mask, tuple(tuple(joined(range(ends[c], ends[c + 1]) for c in chunks if sizes[c])) for chunks in held)
    )
