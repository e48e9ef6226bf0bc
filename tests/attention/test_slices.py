"""Masks as slices: their pairs, areas and pictures against dense masks, and what is refused."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opensora_accel.attention.balance import Tile
from opensora_accel.attention.slices import AttentionSlices, Slice, tile_order
from opensora_accel.attention.slices.geometry import KINDS, as_table, cut
from opensora_accel.attention.slices.tiles import tiles_of, tiles_of_all

SIZE = 14


def dense(each, num_queries=SIZE, num_keys=SIZE):
    """[S_q, S_kv], as the fields of a slice are meant."""
    rows, columns = torch.arange(num_queries)[:, None], torch.arange(num_keys)
    inside = (
        (rows >= each.q_start) & (rows < each.q_stop) & (columns >= each.k_start) & (columns < each.k_stop)
    )
    return inside & (columns - rows >= each.lower) & (columns - rows <= each.upper)


def random_slice(numbers):
    """A tight one within SIZE queries and keys."""
    while True:
        queries, keys = (sorted(numbers.sample(range(SIZE + 1), 2)) for _ in range(2))
        diagonals = (numbers.randint(-SIZE, SIZE) for _ in range(2))
        made = Slice(*queries, *keys, *diagonals).tight()
        if made is not None:
            return made


@pytest.mark.parametrize("seed", range(200))
def test_a_slice_is_what_its_numbers_say(seed):
    numbers = random.Random(seed)
    one, other = random_slice(numbers), random_slice(numbers)
    pairs, others = dense(one), dense(other)
    assert pairs.any(1).nonzero().flatten().tolist() == list(one.queries)
    assert pairs.any(0).nonzero().flatten().tolist() == list(one.keys)
    assert one.area == pairs.sum()
    assert one.area_of(other) == (pairs & others).sum()
    common = one.intersection(other)
    assert common is None if not (pairs & others).any() else torch.equal(dense(common), pairs & others)
    moved = one.moved(2, 5)
    assert torch.equal(dense(moved, SIZE + 2, SIZE + 5)[2:, 5:], pairs)


def pairs_of(tiles):
    """[S_q, S_kv]: in how many tiles each pair is."""
    counted = torch.zeros(SIZE, SIZE, dtype=torch.int)
    for tile in tiles:
        part = counted[tile.rows, tile.keys]
        ones = torch.ones_like(part)
        if tile.causal:
            assert part.size(0) == part.size(1)
            ones = ones.triu() if tile.reversed else ones.tril()
        assert tile.num_pairs == ones.sum()
        part += ones
    return counted


@pytest.mark.parametrize("seed", range(200))
def test_tiles_hold_every_pair_of_a_slice_once_and_no_other(seed):
    one = random_slice(random.Random(seed))
    assert torch.equal(pairs_of(tiles_of(one)), dense(one).int())


@pytest.mark.parametrize("seed", range(50))
def test_joined_tiles_hold_every_pair_of_all_slices_once_and_no_other(seed):
    """Of a mask that is cut into rectangles at every third row and column, and a slice more where it fits."""
    numbers = random.Random(seed)
    places = itertools.product(range(0, SIZE, 3), repeat=2)
    slices = [
        Slice.of(range(row, min(row + 3, SIZE)), range(column, min(column + 3, SIZE)))
        for row, column in places
        if numbers.random() < 0.6
    ]
    for another in (random_slice(numbers) for _ in range(20)):
        if not any(another.area_of(each) for each in slices):
            slices.append(another)
    tiles = tiles_of_all(slices)
    assert torch.equal(pairs_of(tiles), sum(dense(each).int() for each in slices))
    assert len(tiles) <= sum(len(tiles_of(each)) for each in slices)


def test_neighbours_are_one_tile():
    """Two runs of keys side by side, and rows below that see both."""
    slices = [Slice.of(range(4), range(3)), Slice.of(range(4, 6), range(7)), Slice.of(range(4), range(3, 7))]
    assert tiles_of_all(slices) == (Tile(slice(0, 6), slice(0, 7), causal=False),)
    apart = [Slice.of(range(4), range(3)), Slice.of(range(4), range(4, 7)), Slice.of(range(5, 6), range(3))]
    assert len(tiles_of_all(apart)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_aligned_as_its_name_says(kind):
    one = Slice.of(range(2, 6), range(1, 8), kind)
    rows, columns = torch.arange(4)[:, None], torch.arange(7)
    expected = torch.ones(4, 7, dtype=torch.bool)
    if kind in ("causal", "band"):  # the last query sees all keys
        expected &= columns <= rows + 3
    if kind in ("inverse causal", "band"):  # the first query sees all keys
        expected &= columns >= rows
    assert one.kind == kind
    assert torch.equal(dense(one)[2:6, 1:8], expected)


def by_tokens(frames, tokens_per_frame):
    """[S]: the frame of each token."""
    return torch.arange(frames).repeat_interleave(tokens_per_frame)


def blocks_of(frames, block_frames):
    """[T]: the block of each frame."""
    if isinstance(block_frames, int):
        return torch.arange(frames) // block_frames
    return torch.arange(len(block_frames)).repeat_interleave(torch.tensor(block_frames))


def block_causal(frames, tokens_per_frame, block_frames=1, sink_frames=0, window_frames=None):
    """[S, S], frame by frame as the words of the docstring say it."""
    block = blocks_of(frames, block_frames)
    seen = block[:, None] >= block
    if window_frames is not None:
        ends = torch.tensor([int((block == each).nonzero().max()) + 1 for each in block])
        seen &= (torch.arange(frames) >= ends[:, None] - window_frames) | (torch.arange(frames) < sink_frames)
    at = by_tokens(frames, tokens_per_frame)
    return seen[at][:, at]


CAUSAL = [
    (5, 3, {}),
    (6, 2, {"block_frames": 2}),
    (7, 2, {"block_frames": 3}),
    (7, 1, {"block_frames": [1, 3, 3]}),
    (8, 2, {"window_frames": 3}),
    (8, 2, {"window_frames": 3, "sink_frames": 1}),
    (9, 2, {"block_frames": 3, "window_frames": 4, "sink_frames": 2}),
    (9, 1, {"block_frames": 2, "window_frames": 5, "sink_frames": 4}),
    (4, 2, {"window_frames": 9, "sink_frames": 7}),
]


@pytest.mark.parametrize(("frames", "tokens", "options"), CAUSAL)
def test_blocks_of_frames_see_themselves_and_those_before(frames, tokens, options):
    mask = AttentionSlices.block_causal(frames, tokens, **options)
    assert torch.equal(mask.dense(), block_causal(frames, tokens, **options))


@pytest.mark.parametrize(("frames", "tokens", "options"), CAUSAL)
def test_noisy_blocks_see_themselves_and_the_clean_ones_before(frames, tokens, options):
    mask = AttentionSlices.teacher_forcing(frames, tokens, **options)
    total = frames * tokens
    clean = block_causal(frames, tokens, **options)
    block = blocks_of(frames, options.get("block_frames", 1))[by_tokens(frames, tokens)]
    own = block[:, None] == block
    expected = torch.zeros(2 * total, 2 * total, dtype=torch.bool)
    expected[:total, :total] = clean
    expected[total:, :total] = clean & ~own
    expected[total:, total:] = own
    assert torch.equal(mask.dense(), expected)


@pytest.mark.parametrize(
    ("lengths", "kv_lengths"),
    [([3, 2], None), ([4, 0, 1, 5], None), ([1] * 6, None), ([3, 2, 2, 0], [1, 4, 0, 2])],
)
def test_packed_samples_do_not_see_each_other(lengths, kv_lengths):
    mask = AttentionSlices.packed(lengths, kv_lengths)
    owners = [
        torch.arange(len(each)).repeat_interleave(torch.tensor(each))
        for each in (lengths, kv_lengths or lengths)
    ]
    assert torch.equal(mask.dense(), owners[0][:, None] == owners[1])


@pytest.mark.parametrize(
    ("sizes", "window", "tile"),
    [
        ((6, 8, 8), (6, 4, 12), (2, 4, 4)),
        ((4, 6, 10), (1, 6, 6), (1, 2, 2)),
        ((5, 7, 9), (6, 3, 9), (2, 3, 3)),
        ((3, 4, 4), (9, 12, 12), (3, 4, 4)),
    ],
)
def test_a_tile_sees_those_around_it_and_as_many_at_an_edge(sizes, window, tile):
    mask = AttentionSlices.sliding(*sizes, window, tile=tile)
    place = torch.cartesian_prod(*map(torch.arange, sizes))[tile_order(*sizes, tile)] // torch.tensor(tile)
    expected = torch.ones(len(place), len(place), dtype=torch.bool)
    for dim, (size, seen, side) in enumerate(zip(sizes, window, tile, strict=True)):
        number, reach = -(-size // side), seen // side
        first = (place[:, dim] - reach // 2).clamp(min=0, max=max(number - reach, 0))
        expected &= (place[:, dim] >= first[:, None]) & (place[:, dim] < first[:, None] + reach)
    assert torch.equal(mask.dense(), expected)


def test_tokens_come_back_from_the_order_of_tiles():
    order = tile_order(5, 7, 9, (2, 3, 3))
    assert sorted(order.tolist()) == list(range(5 * 7 * 9))
    tokens = torch.randn(2, 5 * 7 * 9, 3)
    assert torch.equal(tokens.index_select(1, order).index_select(1, order.argsort()), tokens)


ALL = [
    AttentionSlices.full(7, 5),
    AttentionSlices.full(0, 3),
    AttentionSlices.causal(9),
    AttentionSlices.packed([4, 1, 6]),
    AttentionSlices.block_causal(9, 2, block_frames=3, window_frames=4, sink_frames=2),
    AttentionSlices.teacher_forcing(5, 2, block_frames=2),
    AttentionSlices.sliding(6, 8, 8, (6, 4, 12), tile=(2, 4, 4)),
]


@pytest.mark.parametrize("mask", ALL, ids=repr)
def test_a_dense_mask_comes_back_in_as_many_slices(mask):
    again = AttentionSlices.from_dense(mask.dense())
    assert torch.equal(again.dense(), mask.dense())
    assert again == mask
    assert hash(again) == hash(mask)
    assert again.area == mask.area == mask.dense().sum()
    assert len(again.slices) <= len(mask.slices)


@settings(max_examples=60)
@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.floats(0, 1),
    st.integers(0, 1 << 30),
    st.lists(st.integers(0, 13)),
)
def test_any_dense_mask_comes_back_and_its_areas_are_right(num_queries, num_keys, share, seed, places):
    generator = torch.Generator().manual_seed(seed)
    seen = torch.rand(num_queries, num_keys, generator=generator) < share
    mask = AttentionSlices.from_dense(seen)
    assert torch.equal(mask.dense(), seen)
    assert mask == AttentionSlices.from_dense(seen.clone())
    before = mask.area_before(torch.tensor(places, dtype=torch.int64))
    assert before.tolist() == [int(seen[:place].sum()) for place in places]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_of_every_kind_comes_back_as_one(kind):
    one = Slice.of(range(3, 8), range(2, 12), kind)
    again = AttentionSlices.from_dense(AttentionSlices(10, 13, (one,)).dense())
    assert again.slices == (one,)


def test_equal_masks_may_be_cut_otherwise():
    whole = AttentionSlices(6, 6, (Slice.of(range(6), range(6), "causal"),))
    upper_half, lower_half = (whole.slices[0].within(rows, range(6)) for rows in (range(2), range(2, 6)))
    halves = AttentionSlices(6, 6, (upper_half, lower_half))
    assert halves == whole
    assert hash(halves) == hash(whole)
    assert halves != AttentionSlices.causal(7)
    assert whole != AttentionSlices(6, 6, (Slice.of(range(6), range(6), "inverse causal"),))


def test_masks_without_a_common_pair_are_joined():
    clean = AttentionSlices(4, 4, (Slice.of(range(2), range(2)),))
    noisy = AttentionSlices(4, 4, (Slice.of(range(2, 4), range(2, 4)),))
    assert clean | noisy == AttentionSlices.packed([2, 2])
    with pytest.raises(ValueError, match=r"queries 0…1 and keys 0…1 .* have pairs in common"):
        clean | AttentionSlices.causal(4)
    with pytest.raises(ValueError, match="masks of one sequence can be joined"):
        clean | AttentionSlices.causal(5)


@pytest.mark.parametrize("seed", range(8))
def test_slices_are_cut_by_all_runs_at_once_as_one_by_one(seed):
    numbers = random.Random(seed)
    slices = [random_slice(numbers) for _ in range(9)]
    queries, keys = (
        [range(*sorted(numbers.sample(range(SIZE + 1), 2))) for _ in range(number)] for number in (3, 4)
    )
    runs = (torch.tensor([[run.start, run.stop] for run in each]) for each in (queries, keys))
    found = {
        (of_q, of_k, Slice(*each))
        for each, of_q, of_k in zip(*(part.tolist() for part in cut(as_table(slices), *runs)), strict=True)
    }
    expected = {
        (of_q, of_k, each.within(rows, columns))
        for (of_q, rows), (of_k, columns) in itertools.product(enumerate(queries), enumerate(keys))
        for each in slices
    }
    assert found == {each for each in expected if each[2] is not None}


REFUSED = [
    (
        lambda: Slice.of(range(3), range(0)),
        "keys must be a range of step 1 that begins at 0 or later and is not empty",
    ),
    (lambda: Slice.of(range(0, 6, 2), range(4)), "queries must be a range of step 1"),
    (
        lambda: Slice.of(range(3), range(3), "diagonal"),
        "a slice is one of full, causal, inverse causal, band",
    ),
    (lambda: Slice.of(range(5), range(3), "band"), "a band of 5 queries needs at least as many keys; got 3"),
    (lambda: AttentionSlices(4, 4, (Slice.of(range(5), range(4)),)), "ends outside of 4 queries and 4 keys"),
    (lambda: AttentionSlices(4, 4, (Slice(0, 2, 0, 2, 5, 4),)), "has no pair that is seen; leave it out"),
    (lambda: AttentionSlices.packed([3, -1]), r"lengths must be at least 0 each; got \[3, -1\]"),
    (lambda: AttentionSlices.packed([3], [1, 2]), "got 1 lengths and 2 kv_lengths"),
    (lambda: AttentionSlices.block_causal(5, 2, block_frames=[2, 2]), r"\[2, 2\] frames are 4, and not 5"),
    (lambda: AttentionSlices.block_causal(0, 2), "frames must be at least 1"),
    (
        lambda: AttentionSlices.block_causal(5, 2, block_frames=3, window_frames=2),
        r"window_frames \(2\) counts those",
    ),
    (lambda: AttentionSlices.sliding(4, 4, 4, (2, 4, 4), tile=(1, 4, 4)), "an odd number of tiles"),
    (lambda: AttentionSlices.sliding(4, 4, 4, (3, 4, 4), tile=(0, 4, 4)), "tile must be at least 1 each"),
    (lambda: AttentionSlices.from_dense(torch.ones(3, 3)), "a dense mask is bool"),
    (
        lambda: AttentionSlices.from_dense(torch.rand(200, 200) < 0.5),
        r"would take [\d,]+ slices, and 4,096 are the",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_is_no_mask_is_refused_with_the_reason(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("ones", "others"),
    [
        (Slice.of(range(4), range(4), "causal"), Slice.of(range(2), range(2), "inverse causal")),
        (Slice.of(range(1, 3), range(6)), Slice.of(range(2, 5), range(5, 6))),
    ],
)
def test_a_pair_in_two_slices_is_refused(ones, others):
    with pytest.raises(ValueError, match="have pairs in common, which would count twice"):
        AttentionSlices(6, 6, (ones, others))


def test_triangles_that_meet_without_a_common_pair_are_none():
    lower, upper = Slice.of(range(4), range(4), "causal"), Slice.of(range(3), range(1, 4), "inverse causal")
    assert AttentionSlices(4, 4, (lower, upper)) == AttentionSlices.full(4)


def test_a_picture_shows_where_queries_see_keys(capsys, tmp_path):
    AttentionSlices.packed([8, 8]).show(4)
    assert capsys.readouterr().out.splitlines()[1:] == ["██  ", "  ██"]
    AttentionSlices.causal(16).show(4)
    assert capsys.readouterr().out.splitlines()[1:] == ["▓░  ", "██▓░"]
    path = tmp_path / "mask.png"
    AttentionSlices.packed([8, 8]).save_picture(str(path), 16)
    from PIL import Image

    pixels = torch.frombuffer(bytearray(Image.open(path).tobytes()), dtype=torch.uint8).view(16, 16)
    assert torch.equal(pixels == 0, AttentionSlices.packed([8, 8]).dense())


def test_samples_with_masks_of_their_own_stand_one_behind_the_other():
    causal, window = AttentionSlices.causal(4), AttentionSlices.block_causal(3, 2, window_frames=1)
    row = AttentionSlices.packed([causal, 2, window, 0])
    parts = [causal.dense(), torch.ones(2, 2), window.dense()]
    assert torch.equal(row.dense(), torch.block_diag(*parts).bool())
    captions = AttentionSlices(2, 3, (Slice.of(range(1, 2), range(3)),))
    assert AttentionSlices.packed([1, captions], [2, 3]).dense().tolist() == [
        [True, True, False, False, False],
        [False, False, False, False, False],
        [False, False, True, True, True],
    ]
    with pytest.raises(
        ValueError, match=r"a sample has 4 keys, and its mask is AttentionSlices\(2 queries × 3"
    ):
        AttentionSlices.packed([captions, 1], [4, 2])
