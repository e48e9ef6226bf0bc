"""Balanced layouts: inverse, positions, the same work everywhere, and rotary embedding by position."""

import itertools

import pytest
import torch
import torch.distributed as dist

from opensora_accel.attention import local_attention, ring_attention
from opensora_accel.attention.balance import (
    LAYOUTS,
    apply_rotary,
    causal_tiles,
    positions,
    rearrange,
    restore,
    rotary_tables,
)
from opensora_accel.communications import share_sizes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("total", "num_ranks"), [(16, 4), (17, 4), (7, 3), (2, 4), (0, 2), (9, 1)])
def test_restore_is_the_inverse_and_positions_are_a_partition(layout, total, num_ranks):
    tokens = torch.randn(2, total, 3)
    arranged = rearrange(tokens, num_ranks, layout)
    assert torch.equal(restore(arranged, num_ranks, layout), tokens)
    held = [positions(total, num_ranks, rank, layout) for rank in range(num_ranks)]
    assert sorted(torch.cat(held).tolist()) == list(range(total))
    assert tuple(map(len, held)) == share_sizes(total, num_ranks)
    for rank, share in enumerate(arranged.tensor_split(num_ranks, 1)):
        assert torch.equal(share, tokens[:, held[rank]])
        assert held[rank].tolist() == sorted(held[rank].tolist())


def test_zigzag_and_stripes_are_where_they_should_be():
    assert [positions(8, 2, rank, "zigzag").tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [positions(8, 2, rank, "striped").tolist() for rank in (0, 1)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


SHARES = [(4, 4), (5, 4), (3, 3, 2), (0, 3, 6), (1, 1, 1, 0), (7, 1, 2, 5)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("splits", SHARES)
def test_tiles_cover_what_a_causal_mask_lets_through_and_nothing_else(layout, splits):
    total, num_ranks = sum(splits), len(splits)
    kv_choices = [splits, splits[::-1], share_sizes(total, num_ranks)]
    if layout == "striped":
        splits, kv_choices = share_sizes(total, num_ranks), [share_sizes(total, num_ranks)]
    for kv_splits, rank, owner in itertools.product(kv_choices, range(num_ranks), range(num_ranks)):
        rows = positions(total, num_ranks, rank, layout, splits=splits)
        keys = positions(total, num_ranks, owner, layout, splits=kv_splits)
        seen = torch.zeros(len(rows), len(keys), dtype=torch.int)
        for tile in causal_tiles(layout, tuple(splits), tuple(kv_splits), rank, owner):
            part = seen[tile.rows, tile.keys]
            part += torch.ones_like(part).tril() if tile.causal else torch.ones_like(part)
            assert not tile.causal or part.size(0) == part.size(1)
            assert tile.num_pairs == (torch.ones_like(part).tril().sum() if tile.causal else part.numel())
        assert torch.equal(seen, (rows[:, None] >= keys[None, :]).int())


def work(layout, num_ranks, total=4096):
    """Unmasked scores of every rank, over the whole ring."""
    splits = share_sizes(total, num_ranks)
    return [
        sum(
            tile.num_pairs
            for owner in range(num_ranks)
            for tile in causal_tiles(layout, splits, splits, rank, owner)
        )
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(("num_ranks", "gain"), [(2, 1.5), (4, 1.75), (8, 1.875)])
def test_the_busiest_rank_has_less_work(num_ranks, gain):
    contiguous = max(work("contiguous", num_ranks))
    for layout in ("zigzag", "striped"):
        assert contiguous / max(work(layout, num_ranks)) == pytest.approx(gain, rel=2e-3)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_every_rank_has_the_same_unmasked_work(num_ranks):
    """In runs of 1/(2P) of the sequence, the blocks that are not masked are equal in number, plus or minus one."""
    for layout in ("zigzag", "striped"):
        pairs = work(layout, num_ranks)
        block = (4096 // (2 * num_ranks)) ** 2
        assert max(pairs) - min(pairs) <= block
        assert (max(pairs) - min(pairs)) / max(pairs) < 5e-3  # stripes: the diagonal, a row each


def test_each_pair_of_ranks_takes_few_kernel_calls():
    """One call for other ranks' keys and for one's own: the layouts cost nothing in launches."""
    for layout, num_ranks in itertools.product(LAYOUTS, (2, 4)):
        splits = share_sizes(64, num_ranks)
        for rank, owner in itertools.product(range(num_ranks), repeat=2):
            assert len(causal_tiles(layout, splits, splits, rank, owner)) <= 1


def test_rotary_embedding_turns_by_the_difference_of_positions():
    cos, sin = rotary_tables(torch.arange(40), 16)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    scores = [
        (
            apply_rotary(q, cos[i : i + 1], sin[i : i + 1]) * apply_rotary(k, cos[j : j + 1], sin[j : j + 1])
        ).sum()
        for i, j in ((3, 7), (30, 34), (7, 3))
    ]
    assert scores[0].item() == pytest.approx(scores[1].item(), rel=1e-5)
    assert scores[0].item() != pytest.approx(scores[2].item(), rel=1e-2)


def test_rotary_tables_are_exact_far_from_the_start():
    cos, _ = rotary_tables(torch.tensor([3_000_000]), 4)
    assert cos[0, 0].item() == pytest.approx(torch.tensor(3e6, dtype=torch.float64).cos().item(), abs=1e-6)


def with_rotary(layout):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 13, 2, 8, dtype=torch.float64, generator=generator)
    tables = rotary_tables(torch.arange(13), 8)
    expected = local_attention(apply_rotary(q, *tables), apply_rotary(k, *tables), v, causal=True)
    mine = [rearrange(t, num_ranks, layout).tensor_split(num_ranks, 1)[rank] for t in (q, k, v)]
    own = rotary_tables(positions(13, num_ranks, rank, layout), 8)
    out = ring_attention(
        apply_rotary(mine[0], *own), apply_rotary(mine[1], *own), mine[2], causal=True, layout=layout,
        group=dist.group.WORLD,
    )  # fmt: skip
    parts = [None] * num_ranks
    dist.all_gather_object(parts, out)
    return (restore(torch.cat(parts, 1), num_ranks, layout) - expected).abs().max().item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_turns_its_tokens_by_their_own_positions(ranks, layout):
    assert max(ranks(3, with_rotary, layout)) < 1e-12


def test_bad_layouts_are_refused():
    with pytest.raises(ValueError, match="layout must be one of contiguous, zigzag, striped; got 'zig-zag'"):
        positions(8, 2, 0, "zig-zag")
    with pytest.raises(ValueError, match=r"stripes of 8 tokens have the sizes \(4, 4\); got \(5, 3\)"):
        positions(8, 2, 0, "striped", splits=(5, 3))
    with pytest.raises(ValueError, match="2 sizes that add up to 8"):
        positions(8, 2, 0, "zigzag", splits=(5, 4))
    with pytest.raises(ValueError, match=r"head_dim .7. must be even"):
        rotary_tables(torch.arange(3), 7)
