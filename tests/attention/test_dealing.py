"""Who holds which tokens of a mask: even work, every token once, and no byte sent that nobody needs."""

import datetime
import itertools
import time

import pytest
import torch
import torch.distributed as dist

from opensora_accel.attention import blocks, ring_attention, ulysses_attention
from opensora_accel.attention.slices import AttentionSlices, Deal, Slice, deal
from opensora_accel.communications import share_sizes
from opensora_accel.observe import FlopCounter
from tests.attention.counting import counted
from tests.attention.reference import full_attention, random_inputs
from tests.attention.test_failures import OutOfMemory, failing
from tests.attention.test_sliced import MASKS
from tests.tiers import some


def lognormal(number, seed, mean=7.0):
    """Lengths of clips as data sets have them: most are short, few are long."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(number, generator=generator) * 0.8 + mean).exp().int().tolist()


LARGE = {
    **{f"{number} clips": AttentionSlices.packed(lognormal(number, number)) for number in (12, 40, 1000)},
    "block causal": AttentionSlices.block_causal(81, 1560, block_frames=3),
    "window": AttentionSlices.block_causal(300, 1560, block_frames=3, window_frames=21, sink_frames=3),
    "teacher forcing": AttentionSlices.teacher_forcing(21, 1560, block_frames=3),
    "sliding": AttentionSlices.sliding(32, 48, 80, (12, 24, 24), tile=(4, 8, 8)),
    "causal": AttentionSlices.causal(32768),
}


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("name", LARGE)
def test_no_rank_has_5_percent_more_than_its_share(name, num_ranks):
    found = deal(LARGE[name], num_ranks)
    assert found.imbalance <= 1.05
    assert sum(found.areas) == LARGE[name].area
    # Tokens too: a chunk for each round, whose sizes differ by one.
    assert max(found.splits) - min(found.splits) <= max(map(len, found.runs)) * 2 + 64


def test_the_steps_of_a_thousand_clips_are_found_at_once():
    """Each of 31 runs of a rank meets 248 of all ranks; slice by slice that took 94 s."""
    shares = deal(LARGE["1000 clips"], 8)
    start = time.perf_counter()
    steps = shares.steps(3)
    assert time.perf_counter() - start < 2  # 2 ms where nothing else runs
    assert sum(tile.num_pairs for step in steps for tile in step.tiles) == shares.areas[3]


def test_a_clip_that_no_chunks_can_share_out_keeps_the_bound():
    """Of 8 tokens one sees all: whoever holds it has most, however they are dealt."""
    mask = AttentionSlices(8, 8, (Slice.of(range(3, 4), range(8)),))
    found = deal(mask, 2)
    assert sorted(found.areas) == [0, 8]
    assert max(found.areas) <= mask.area / 2 + 8


@pytest.mark.parametrize(("num_ranks", "ulysses"), [(4, 2), (6, 3), (8, 4), (8, 8), (64, 8)])
@pytest.mark.parametrize("name", LARGE)
def test_ranks_that_exchange_heads_are_dealt_tokens_as_one(name, num_ranks, ulysses):
    """So as many calls of a kernel are made as in a ring of them: of 12 clips on 2 × 4 ranks 9 and not 76."""
    shares, ring = deal(LARGE[name], num_ranks, ulysses=ulysses), deal(LARGE[name], num_ranks // ulysses)
    for step, of_ring in zip(shares.merged(ulysses).steps(0), ring.steps(0), strict=True):
        assert (step.sends, step.num_received, step.tiles) == (
            of_ring.sends,
            of_ring.num_received,
            of_ring.tiles,
        )
    assert shares.order().tolist() == ring.order().tolist()
    for first in range(0, num_ranks, ulysses):
        splits = shares.splits[first : first + ulysses]
        assert sum(splits) == ring.splits[first // ulysses] and max(splits) - min(splits) <= 1
    # As ranks that were told of it by other ones would merge it.
    again = Deal(shares.mask, shares.runs).merged(ulysses)
    assert again.areas == ring.areas and again.order().tolist() == ring.order().tolist()


def test_tokens_that_are_cut_between_neighbours():
    dealt = Deal(AttentionSlices.causal(13), ((range(5), range(8, 11)), (range(5, 8), range(11, 13))))
    assert dealt.shared(2).runs == (
        (range(4),),
        (range(4, 5), range(8, 11)),
        (range(5, 8),),
        (range(11, 13),),
    )
    with pytest.raises(ValueError, match="3 ranks that exchange heads do not divide 8 ranks"):
        deal(AttentionSlices.causal(13), 8, ulysses=3)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", MASKS)
def test_every_token_is_held_once_and_its_pairs_are_counted(name, num_ranks):
    mask, found = MASKS[name], deal(MASKS[name], num_ranks)
    assert sorted(found.order().tolist()) == list(range(mask.num_queries))
    seen = mask.dense()
    for rank in range(num_ranks):
        held = found.positions(rank)
        assert len(held) == found.splits[rank]
        assert held.tolist() == sorted(held.tolist())
        assert found.areas[rank] == seen[held].sum()
        for owner in range(num_ranks):
            of_owner = found.positions(owner)
            part = seen[held][:, of_owner]
            again = AttentionSlices(len(held), len(of_owner), tuple(found.seen(rank, owner)))
            assert torch.equal(again.dense(), part)
            needed = [key for run in found.needs(rank, owner) for key in run]
            assert set(part.any(0).nonzero().flatten().tolist()) == set(needed)


@pytest.mark.parametrize(("num_ranks", "ulysses"), [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_keys_behind_those_of_the_tokens_stay_with_their_ranks(num_ranks, ulysses):
    """A cache's: each rank has some, the first one less, and of ranks that exchange heads each has its own."""
    seen = torch.rand(20, 31, generator=torch.Generator().manual_seed(5)) < 0.6
    more = torch.arange(20, 31).tensor_split(num_ranks)[::-1]
    more_keys = tuple((range(int(each[0]), int(each[-1]) + 1),) for each in more)
    found = deal(AttentionSlices.from_dense(seen), num_ranks, ulysses=ulysses, more_keys=more_keys)
    held = [torch.cat([found.positions(rank), more[rank]]) for rank in range(num_ranks)]
    assert found.kv_splits == tuple(map(len, held))
    assert sorted(found.order().tolist()) == list(range(20)) and sum(found.areas) == seen.sum()
    ring = found.merged(ulysses)
    for rank, owner in itertools.product(range(num_ranks // ulysses), repeat=2):
        rows, keys = ring.positions(rank), torch.cat(held[owner * ulysses : (owner + 1) * ulysses])
        again = AttentionSlices(len(rows), len(keys), tuple(ring.seen(rank, owner)))
        assert torch.equal(again.dense(), seen[rows][:, keys])


def test_queries_and_keys_of_other_tokens_are_not_dealt():
    with pytest.raises(ValueError, match="got 4 queries and 6 keys"):
        deal(AttentionSlices.full(4, 6), 2)
    with pytest.raises(ValueError, match="got 4 queries and 5 keys"):
        deal(AttentionSlices.full(4, 6), 2, more_keys=((range(4, 5),), ()))


def traffic(name, held):
    """Bytes that leave this rank, forward and with backward, of a ring by slices."""
    mask, num_ranks, rank = MASKS[name], dist.get_world_size(), dist.get_rank()
    slices = deal(mask, num_ranks) if held == "dealt" else mask
    sizes = slices.splits if held == "dealt" else share_sizes(mask.num_queries, num_ranks)
    qkv = [torch.randn(2, sizes[rank], 3, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    with counted() as sent:
        out = ring_attention(*qkv, dist.group.WORLD, slices=slices, splits=sizes, kv_splits=sizes)
        forward = sent.size_bytes
        out.sum().backward()
    return forward, sent.size_bytes


@pytest.mark.parametrize("num_ranks", some([2, 3, 4], 3))
@pytest.mark.parametrize("held", ["dealt", "in order"])
@pytest.mark.parametrize("name", MASKS)
def test_a_rank_sends_what_others_see_and_gets_gradients_of_what_it_saw(ranks, name, held, num_ranks):
    mask = MASKS[name]
    seen = mask.dense()
    if held == "dealt":
        positions = [deal(mask, num_ranks).positions(rank) for rank in range(num_ranks)]
    else:
        positions = torch.arange(mask.num_queries).tensor_split(num_ranks)
    token, found = 2 * 3 * 8 * 2, ranks(num_ranks, traffic, name, held)  # batch, heads, channels, k and v
    for rank, (forward, both) in enumerate(found):
        others = [other for other in range(num_ranks) if other != rank]
        sent = sum(int(seen[positions[other]][:, positions[rank]].any(0).sum()) for other in others)
        saw = sum(int(seen[positions[rank]][:, positions[other]].any(0).sum()) for other in others)
        assert forward == sent * token * 2  # bf16
        assert both == 2 * forward + saw * token * 4  # gradients are fp32
        assert sent <= len(others) * len(positions[rank])  # a ring passes each block on to all


GOOD = AttentionSlices.packed([5, 3])
BAD = {
    "the slices are of 9 queries and 9 keys, and the ranks hold 8": {"slices": AttentionSlices.causal(9)},
    "leave causal=True and layout='contiguous' out": {"slices": GOOD, "causal": True},
    "leave causal=False and layout='zigzag' out": {"slices": GOOD, "layout": "zigzag"},
    "tokens are dealt out as": {"slices": deal(AttentionSlices.causal(8), 4)},
}


def refused(in_debug):
    """What each bad call says on this rank, and what it has sent."""
    q = torch.zeros(1, 4, 2, 8)
    sizes = {} if in_debug else {"splits": (4, 4), "kv_splits": (4, 4)}
    messages = []
    for options in BAD.values():
        with counted() as sent, pytest.raises(ValueError) as caught:
            ring_attention(q, q, q, dist.group.WORLD, **options, **sizes)
        messages.append((str(caught.value), sent.num_collectives))
    # One rank alone has other slices.
    other = GOOD if dist.get_rank() else AttentionSlices.packed([4, 4])
    for attention in (ring_attention, ulysses_attention):
        with counted() as sent, pytest.raises(ValueError) as caught:
            attention(q, q, q, dist.group.WORLD, slices=other)
        messages.append((str(caught.value), sent.num_collectives))
    return messages


@pytest.mark.parametrize("exchanges", [False, True])
def test_slices_that_do_not_fit_are_refused_on_all_ranks_before_data_is_sent(ranks, exchanges):
    for messages in ranks(2, refused, exchanges):
        assert [number for _, number in messages] == [0] * len(messages)
        said = [message for message, _ in messages]
        assert all(part in message for part, message in zip(BAD, said, strict=False))
        assert all("slices" in message and "rank 1" in message for message in said[len(BAD) :])


def one_rank_fails(direction, at_call):
    """A block has no memory on rank 1; the others come to an end, and what came of it is NaN or right."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mask = AttentionSlices.block_causal(6, 3, block_frames=2)
    slices = deal(mask, num_ranks)
    *full, _ = random_inputs(18, 18, 2, 2, False)
    group = dist.new_group(timeout=datetime.timedelta(seconds=20))
    mine = [
        each.index_select(1, slices.order()).split(slices.splits, 1)[rank].clone().requires_grad_()
        for each in full
    ]
    name = "attend" if direction == "forward" else "attend_backward"
    original = getattr(blocks, name)
    if rank == 1:
        setattr(blocks, name, failing(original, at_call))
    try:
        out = ring_attention(*mine, group, slices=slices)
        expected = full_attention(*full, seen=mask.dense()).index_select(1, slices.order())
        assert (out - expected.split(slices.splits, 1)[rank]).abs().max() < 1e-12
        verdict = "right"
        if direction == "backward":
            out.sum().backward()
            verdict = "NaN" if mine[1].grad.isnan().any() else "right"
    except OutOfMemory:
        verdict = "failed"
    finally:
        setattr(blocks, name, original)
    dist.barrier()  # nothing is pending: the group can be used again
    ring_attention(*mine, group, slices=slices)
    return verdict


@pytest.mark.parametrize(("direction", "at_call"), [("forward", 2), ("backward", 1), ("backward", 3)])
def test_a_rank_that_fails_goes_on_sending(ranks, direction, at_call):
    verdicts = ranks(3, one_rank_fails, direction, at_call)
    assert verdicts[1] == "failed"
    # Forward passes keys alone, which are right. Gradients that the failed rank owes are NaN.
    if direction == "backward":
        assert "NaN" in verdicts


def test_two_deals_of_one_mask_are_told_apart():
    mask = AttentionSlices.causal(12)
    digests = {deal(mask, number).digest for number in (1, 2, 3)} | {mask.digest}
    assert len(digests) == 4
    assert deal(AttentionSlices.causal(12), 3).digest == deal(mask, 3).digest


def test_steps_of_all_ranks_fit_together():
    """What one sends at a step is what the other awaits, also of masks of which it needs parts."""
    for mask, num_ranks in itertools.product(MASKS.values(), (2, 3, 5)):
        steps = [deal(mask, num_ranks).steps(rank) for rank in range(num_ranks)]
        for rank, shift in itertools.product(range(num_ranks), range(num_ranks)):
            receiver = steps[(rank + shift) % num_ranks][shift]
            assert steps[rank][shift].num_sent == receiver.num_received


def flops(name, held):
    """Forward, and forward and backward, as counted on this rank."""
    mask, num_ranks, rank = MASKS[name], dist.get_world_size(), dist.get_rank()
    slices = deal(mask, num_ranks) if held == "dealt" else mask
    sizes = slices.splits if held == "dealt" else share_sizes(mask.num_queries, num_ranks)
    qkv = [torch.randn(2, sizes[rank], 3, 8, requires_grad=True) for _ in range(3)]
    with FlopCounter() as counter:
        out = ring_attention(*qkv, dist.group.WORLD, slices=slices, splits=sizes, kv_splits=sizes)
        forward = counter.hardware_flops
        out.sum().backward()
    return forward, counter.hardware_flops


@pytest.mark.parametrize("held", ["dealt", "in order"])
@pytest.mark.parametrize("name", ["teacher forcing", "random 3"])
def test_operations_are_those_of_the_area(ranks, name, held):
    """Two products of a pair's 8 channels forward, and five backward, of 2 samples and 3 heads."""
    found = ranks(3, flops, name, held)
    assert sum(forward for forward, _ in found) == 2 * 3 * MASKS[name].area * 2 * 2 * 8
    assert [both for _, both in found] == [forward * 7 // 2 for forward, _ in found]


@pytest.mark.parametrize("name", [name for name in MASKS if MASKS[name].num_queries <= 17])
def test_ranks_without_tokens_have_nothing_to_do(name):
    """Wherever they stand among others: each pair is in one tile, and each tile lies within what its rank has."""
    mask = MASKS[name]
    for zeros in itertools.product([False, True], repeat=4):
        if all(zeros):
            continue
        shares = iter(share_sizes(mask.num_queries, zeros.count(False)))
        splits = [0 if is_empty else next(shares) for is_empty in zeros]
        dealt = Deal.in_order(mask, splits, splits)
        num_pairs = 0
        for rank, own in enumerate(splits):
            for step in dealt.steps(rank):
                assert all(run.start < run.stop for run in step.sends)
                keys = own if step is dealt.steps(rank)[0] else step.num_received
                assert all(
                    0 <= tile.rows.start < tile.rows.stop <= own
                    and 0 <= tile.keys.start < tile.keys.stop <= keys
                    for tile in step.tiles
                )
                num_pairs += sum(tile.num_pairs for tile in step.tiles)
        assert num_pairs == mask.area
