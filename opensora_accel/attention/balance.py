"""Which tokens a rank holds, so that all have the same work under a causal mask, and what each sees of another's keys.

Query i sees the keys 0…i. Of 12 tokens on P = 3 ranks, the layouts and the number of scores that a rank computes are

    contiguous    rank 0: 0 1 2 3 (10)      rank 1: 4 5 6 7 (26)     rank 2: 8 9 10 11 (42)
    zigzag        rank 0: 0 1 10 11 (26)    rank 1: 2 3 8 9 (26)     rank 2: 4 5 6 7 (26)
    striped       rank 0: 0 3 6 9 (22)      rank 1: 1 4 7 10 (26)    rank 2: 2 5 8 11 (30)

A zigzag is a run from the front and one from the rear. Stripes differ by less than one token's keys a row; every
block of theirs is a triangle, whoever owns its keys.

What the queries of one rank see of the keys of another is cut into tiles for the kernels, each seen wholly or as a
square triangle. In the zigzag above, rank 1 sees of rank 0's keys 0 1 10 11: for its queries 2 3 the keys 0 1, and
for its queries 8 9 the keys 0 1 too. So that is one tile of four rows and two keys.

Bring the whole sequence, and whatever belongs to a token (rotary tables, masks, targets), into a layout with
`rearrange` before it is split by the rule of `torch.tensor_split`, and back with `restore` after it is gathered.

Source: zigzag as in Llama 3 (arXiv:2407.21783, section 3.3.2), stripes arXiv:2311.09431.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from opensora_accel.communications import share_sizes

TokenLayout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[TokenLayout, ...] = get_args(TokenLayout)


@dataclass(frozen=True)
class _Run:
    """Tokens start, start + stride, … of the sequence."""

    start: int
    length: int
    stride: int = 1


class Tile(NamedTuple):
    """Rows `rows` of this rank's queries see keys `keys` of a block: all of them, or as a square triangle."""

    rows: slice
    keys: slice
    # Row i sees keys 0…i of the tile, or if it is reversed, from key i on.
    causal: bool
    reversed: bool = False

    @property
    def num_pairs(self) -> int:
        """Scores that are not masked."""
        num_rows, num_keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        # A triangle of n rows has 1 + 2 + … + n of them.
        return num_rows * (num_rows + 1) // 2 if self.causal else num_rows * num_keys


def check_layout(layout: str, *all_splits: Sequence[int]) -> None:
    """Checks a layout, and every rank's sizes under it.

    Raises:
        ValueError: an unknown layout, or sizes that stripes cannot have.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    for splits in all_splits:
        # Token i of a stripe is on rank i mod P, which leaves no choice of sizes.
        expected = share_sizes(sum(splits), len(splits))
        if layout == "striped" and tuple(splits) != expected:
            raise ValueError(
                f"stripes of {sum(splits)} tokens have the sizes {expected}; got {tuple(splits)}; use zigzag"
            )


def positions(
    total: int,
    num_ranks: int,
    rank: int,
    layout: TokenLayout = "zigzag",
    *,
    splits: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """[S/P]: the places in the sequence of the tokens that `rank` holds, ascending.

    `splits`: every rank's number of tokens, by default those of `torch.tensor_split`.

    Raises:
        ValueError: the splits do not add up, or the layout cannot have them.
    """
    sizes = share_sizes(total, num_ranks) if splits is None else tuple(splits)
    if len(sizes) != num_ranks or sum(sizes) != total:
        raise ValueError(f"splits={sizes} must be {num_ranks} sizes that add up to {total}")
    check_layout(layout, sizes)
    return torch.cat(
        [
            torch.arange(run.length, device=device) * run.stride + run.start
            for run in _runs(layout, sizes, rank)
        ]
    )


def rearrange(
    input_: Tensor,
    num_ranks: int,
    layout: TokenLayout = "zigzag",
    *,
    dim: int = 1,
    splits: Sequence[int] | None = None,
) -> Tensor:
    """The whole sequence in another order: cut into `splits`, rank by rank, it gives the layout's shares.

    Six tokens 0…5 on P = 3 ranks in zigzag become 0 5 1 4 2 3.

    Args:
        input_: [..., S at dim, ...], the whole sequence.
        splits: every rank's number of tokens, by default those of `torch.tensor_split`.

    Returns:
        [..., S at dim, ...].

    Raises:
        ValueError: the layout cannot have these sizes.
    """
    return input_.index_select(dim, _order(input_, num_ranks, layout, dim, splits))


def restore(
    input_: Tensor,
    num_ranks: int,
    layout: TokenLayout = "zigzag",
    *,
    dim: int = 1,
    splits: Sequence[int] | None = None,
) -> Tensor:
    """The inverse of `rearrange`: [..., S at dim, ...] → [..., S at dim, ...]."""
    return input_.index_select(dim, _order(input_, num_ranks, layout, dim, splits).argsort())


def _order(
    input_: Tensor, num_ranks: int, layout: TokenLayout, dim: int, splits: Sequence[int] | None
) -> Tensor:
    """The places [S] in the sequence, rank by rank; input_: [..., S at dim, ...]."""
    total, device = input_.size(dim), input_.device
    parts = [positions(total, num_ranks, r, layout, splits=splits, device=device) for r in range(num_ranks)]
    return torch.cat(parts)


def rotary_tables(at: Tensor, head_dim: int, *, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [S/P, D/2] in fp32, of tokens at the places `at` [S/P]: `positions` of a rank, say.

    Source: RoPE, arXiv:2104.09864. Angles are made in fp64: in fp32 token 100,000 is off by 4e-3 rad.

    Raises:
        ValueError: an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"rotary embedding turns pairs of channels; head_dim ({head_dim}) must be even")
    exponents = torch.arange(0, head_dim, 2, device=at.device, dtype=torch.float64) / head_dim
    angles = at.double().unsqueeze(-1) * theta**-exponents  # [S/P, D/2]
    return angles.cos().float(), angles.sin().float()


def apply_rotary(input_: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The input [B, S/P, H, D] with the channels 2i and 2i + 1 of every head turned; its dtype stays.

    Args:
        cos, sin: [S/P, D/2]; the maths is in the wider of their dtype and the input's.
    """
    pairs = input_.unflatten(-1, (-1, 2)).to(torch.promote_types(input_.dtype, cos.dtype))
    even, odd = pairs.unbind(-1)  # each [B, S/P, H, D/2]
    # [S/P, 1, D/2]: one angle for all heads of a token.
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return turned.flatten(-2).to(input_.dtype)


def _runs(layout: str, splits: Sequence[int], rank: int) -> list[_Run]:
    if layout == "striped":
        return [_Run(rank, splits[rank], len(splits))]
    if layout == "contiguous":
        return [_Run(sum(splits[:rank]), splits[rank])]
    # Zigzag: a rank has a piece from the front and one from the rear, which stand in mirrored order. For P = 3 the
    # sequence is front 0, front 1, front 2, rear 2, rear 1, rear 0.
    # In an odd share the piece from the front has one token more.
    fronts, rears = [-(-size // 2) for size in splits], [size // 2 for size in splits]
    return [
        _Run(sum(fronts[:rank]), fronts[rank]),
        _Run(sum(fronts) + sum(rears[rank + 1 :]), rears[rank]),
    ]


# Every block of a model asks for the same tiles in every step, so they are made once.
@lru_cache(maxsize=4096)
def causal_tiles(
    layout: str, splits: tuple[int, ...], kv_splits: tuple[int, ...], rank: int, owner: int
) -> tuple[Tile, ...]:
    """What the queries of `rank` see of the keys of `owner`. Every pair that may be seen is in one tile."""
    tiles: list[Tile] = []
    for first, num_rows, seen, grows in _stairs(_runs(layout, splits, rank), _runs(layout, kv_splits, owner)):
        rows = slice(first, first + num_rows)
        # Keys that all of these rows see are a rectangle; where each row sees one more, the rest is a triangle.
        if seen:
            tiles.append(Tile(rows, slice(0, seen), causal=False))
        if grows:
            tiles.append(Tile(rows, slice(seen, seen + num_rows), causal=True))
    return tuple(tiles)


def _stairs(q_runs: Sequence[_Run], kv_runs: Sequence[_Run]) -> list[tuple[int, int, int, bool]]:
    """(first row, number of rows, keys that all of them see, whether each row sees one more than the one before).

    Positions ascend in both, so the number of keys that a row sees never falls from row to row.
    """
    stairs: list[tuple[int, int, int, bool]] = []
    first = 0
    for run in q_runs:
        # Row i of this run sees the first i − delay + 1 keys of each run of keys.
        # A negative delay means that the first row sees several of them already. Strides are equal in a layout.
        delays = [(-(-(kv.start - run.start) // run.stride), kv.length) for kv in kv_runs]
        # The rows at which a run of keys begins to be seen, and from which on all of it is seen.
        edges = {0, run.length}
        for delay, length in delays:
            edges |= {min(max(edge, 0), run.length) for edge in (delay, delay + length)}
        # Between two edges every row sees the same number of keys, or one more than the row before.
        steps = sorted(edges)
        for begin, end in itertools.pairwise(steps):
            # `seen` without the key that each row gains over the row before: that one is in the triangle.
            grows = any(delay <= begin < delay + length for delay, length in delays)
            seen = sum(min(max(begin - delay + 1, 0), length) for delay, length in delays) - grows
            _append(stairs, (first + begin, end - begin, seen, grows))
        first += run.length
    return stairs


def _append(stairs: list[tuple[int, int, int, bool]], step: tuple[int, int, int, bool]) -> None:
    """Joins a step to the one before where one kernel call does for both."""
    if stairs:
        first, num_rows, seen, grows = stairs[-1]
        # Rectangles join where their keys are the same. Triangles join where the second one's rows see all
        # keys of the first and go on growing.
        if grows == step[3] and step[2] == seen + (num_rows if grows else 0):
            stairs[-1] = (first, num_rows + step[1], seen, grows)
            return
    stairs.append(step)
