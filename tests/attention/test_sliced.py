"""Attention by slices over ranks against a dense mask on one device: output and all gradients, in fp64.

Every kind of mask on every mesh, with tokens in order and dealt out, heads that divide and not, grouped heads, key
masks beside the slices, queries that see nothing, and ranks without tokens.
"""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from opensora_accel.attention import gathered_attention, joint_attention, local_attention
from opensora_accel.attention.slices import AttentionSlices, deal
from opensora_accel.communications import share_sizes
from tests.attention.reference import full_attention, random_inputs, weights_like, worst_error
from tests.attention.test_exact import attentions_on, leaves, moved_shares
from tests.attention.test_slices import SIZE, random_slice
from tests.tiers import PROVE, some

BOUND = 1e-10  # sums in another order: measured 3e-15 of the largest element
MESHES = [(2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (5, 1), (3, 2), (2, 3), (6, 1), (1, 6)]
HEADS = [(6, 6), (5, 5), (12, 3), (2, 1)]


def random_mask(seed, size=17):
    """Slices of all kinds without a pair in common, here and there; some queries see nothing."""
    numbers = random.Random(seed)
    mask = AttentionSlices(size, size, ())
    for _ in range(12):
        farther = max(size - SIZE, 0)
        moved = random_slice(numbers).moved(numbers.randint(0, farther), numbers.randint(0, farther))
        each = moved.within(range(size), range(size))
        if each is not None and not any(each.area_of(other) for other in mask.slices):
            mask |= AttentionSlices(size, size, (each,))
    return mask


MASKS = {
    "packed": AttentionSlices.packed([7, 1, 5, 4]),
    "packed, one long": AttentionSlices.packed([1, 13, 2]),
    "block causal": AttentionSlices.block_causal(6, 3, block_frames=2),
    "window and sink": AttentionSlices.block_causal(7, 2, block_frames=2, window_frames=3, sink_frames=1),
    "teacher forcing": AttentionSlices.teacher_forcing(4, 2, block_frames=[1, 3]),
    "sliding": AttentionSlices.sliding(3, 4, 2, (1, 4, 2), tile=(1, 4, 2)),
    "causal": AttentionSlices.causal(13),
    "full": AttentionSlices.full(11),
    "nothing": AttentionSlices(9, 9, ()),
    **{f"random {seed}": random_mask(seed) for seed in range(6)},
}


def error_of(mesh, attention, mask, heads, key_masked, held):
    """Of this rank's output and gradients, over the largest of all."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    *full, keys = random_inputs(mask.num_queries, mask.num_keys, *heads, key_masked)
    full = leaves(full)
    expected = full_attention(*full, keys, seen=mask.dense())
    weight = weights_like(expected)
    (expected * weight).sum().backward()

    # Also as to ranks that exchange no heads, where some do.
    slices = (
        deal(mask, num_ranks, ulysses=mesh["ulysses"].size() if key_masked else 1)
        if held == "dealt"
        else mask
    )
    sizes = {
        "dealt": lambda: slices.splits,
        "moved": lambda: tuple(moved_shares(mask.num_queries, num_ranks)),
    }.get(held, lambda: share_sizes(mask.num_queries, num_ranks))()
    order = slices.order() if held == "dealt" else torch.arange(mask.num_queries)

    def own(tensor):
        return tensor.index_select(1, order).split(sizes, 1)[rank]

    mine = leaves(own(tensor) for tensor in full)
    options = {} if held == "unknown" else {"splits": sizes, "kv_splits": sizes}
    out = attention(*mine, mask=None if keys is None else own(keys), slices=slices, **options)
    (out * own(weight)).sum().backward()
    found = [out, *(tensor.grad for tensor in mine)]
    return worst_error(
        (a.detach(), own(b.detach()), b)
        for a, b in zip(found, [expected, *(tensor.grad for tensor in full)], strict=True)
    )


def all_of_a_mesh(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    found = {}
    for number, (name, mask) in enumerate(MASKS.items()):
        for held in ("in order", "dealt", "moved", "unknown"):
            heads, key_masked = HEADS[number % len(HEADS)], number % 3 == 0
            for which, attention in enumerate(attentions_on(mesh, "contiguous")):
                case = (name, held, heads, key_masked, which)
                found[case] = error_of(mesh, attention, mask, heads, key_masked, held)
            number += 1
    return found


@pytest.mark.parametrize("shape", some(MESHES, (2, 1), (1, 3), (3, 2)), ids=str)
def test_attention_by_slices_is_that_of_a_dense_mask(ranks, shape):
    for rank, errors in enumerate(ranks(shape[0] * shape[1], all_of_a_mesh, shape)):
        wrong = {case: error for case, error in errors.items() if not error < BOUND}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", MASKS)
def test_on_one_device(name, heads):
    mask = MASKS[name]
    *qkv, keys = random_inputs(mask.num_queries, mask.num_keys, *heads, True)
    for key_mask in (None, keys):
        mine, full = leaves(qkv), leaves(qkv)
        expected = full_attention(*full, key_mask, seen=mask.dense())
        out = local_attention(*mine, mask=key_mask, slices=mask)
        weight = weights_like(expected)
        for each in (expected, out):
            (each * weight).sum().backward()
        pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, full, strict=True))]
        assert worst_error((a.detach(), b.detach(), b.detach()) for a, b in pairs) < BOUND


def drawn(shape, size, seed, heads, key_masked, held):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    mask = random_mask(seed, size)
    return max(
        error_of(mesh, each, mask, heads, key_masked, held) for each in attentions_on(mesh, "contiguous")
    )


@PROVE
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(MESHES),
    st.integers(1, 40),
    st.integers(0, 1 << 20),
    st.sampled_from([(n * m, n) for n in range(1, 8) for m in (1, 2, 3)]),
    st.booleans(),
    st.sampled_from(["in order", "dealt", "moved", "unknown"]),
)
def test_any_slices_on_any_mesh(ranks, shape, size, seed, heads, key_masked, held):
    errors = ranks(shape[0] * shape[1], drawn, shape, size, seed, heads, key_masked, held)
    assert max(errors) < BOUND


def gathered(name):
    """Error of this rank's rows over gathered keys, and of the gradients, which a reduce-scatter brings back."""
    mask, rank, num_ranks = MASKS[name], dist.get_rank(), dist.get_world_size()
    *full, _ = random_inputs(mask.num_queries, mask.num_keys, 4, 2, False)
    full = leaves(full)
    expected = full_attention(*full, seen=mask.dense())
    weight = weights_like(expected)
    (expected * weight).sum().backward()
    rows = torch.arange(mask.num_queries).tensor_split(num_ranks)[rank].tolist()
    of_rank = mask.of_queries(range(rows[0], rows[-1] + 1))
    mine = leaves(tensor.tensor_split(num_ranks, 1)[rank] for tensor in full)
    out = gathered_attention(*mine, dist.group.WORLD, slices=of_rank)
    (out * weight.tensor_split(num_ranks, 1)[rank]).sum().backward()
    found = [out.detach(), *(tensor.grad for tensor in mine)]
    wholes = [expected.detach(), *(tensor.grad for tensor in full)]
    return worst_error((a, b.tensor_split(num_ranks, 1)[rank], b) for a, b in zip(found, wholes, strict=True))


@pytest.mark.parametrize("name", MASKS)
def test_over_gathered_keys(ranks, name):
    assert max(ranks(3, gathered, name)) < BOUND


def test_a_bias_and_slices_are_told_apart():
    q, k, v, _ = random_inputs(4, 4, 2, 2, False)
    for options in (
        {},
        {"bias": torch.ones(1, 1, 4, 4, dtype=torch.bool), "slices": AttentionSlices.full(4)},
    ):
        with pytest.raises(ValueError, match="a bias or slices, one of them"):
            gathered_attention(q, k, v, **options)


def test_a_dense_mask_is_no_slices_and_the_way_there_is_told():
    q, k, v, _ = random_inputs(4, 4, 2, 2, False)
    with pytest.raises(
        TypeError, match=r"got Tensor; of a dense mask they are made by AttentionSlices.from_dense"
    ):
        local_attention(q, k, v, slices=torch.ones(4, 4, dtype=torch.bool))


def test_other_numbers_of_queries_and_keys():
    mask = AttentionSlices.packed([5, 3, 4], [2, 0, 6])
    q, k, v, _ = random_inputs(12, 8, 4, 2, False)
    out = local_attention(q, k, v, slices=mask)
    assert (out - full_attention(q, k, v, seen=mask.dense())).abs().max() < BOUND
    assert out[:, 5:8].abs().max() == 0


# Video tokens, text tokens, and those of the text that ask.
WITH_TEXT = [(11, 4, 4), (6, 5, 5), (9, 3, 0), (2, 7, 7)]


def joint_mask(num_queries, num_keys, seed):
    """Packed clips with their captions would be of this kind: runs that see runs."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (
        torch.randint(0, 3, (size,), generator=generator).sort().values for size in (num_queries, num_keys)
    )
    return AttentionSlices.from_dense((rows[:, None] - columns).abs() <= seed % 2)


def error_of_joint(mesh, sizes, heads, text_first, held, seed):
    """Video and text in one sequence on one device; the text's gradients add up over the ranks."""
    num_video, num_text, num_asking = sizes
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    *video, _ = random_inputs(num_video, num_video, *heads, False)
    *text, text_mask = random_inputs(num_asking, num_text, *heads, seed == 2, seed=2)
    video, text = leaves(video), leaves(text)
    order = (lambda a, b: [b, a]) if text_first else (lambda a, b: [a, b])
    both = [torch.cat(order(*pair), 1) for pair in zip(video, text, strict=True)]
    mask = joint_mask(both[0].size(1), both[1].size(1), seed)
    all_keys = None
    if text_mask is not None:
        all_keys = torch.cat(order(torch.ones(2, num_video, dtype=torch.bool), text_mask), 1)
    expected = full_attention(*both, all_keys, seen=mask.dense())
    expected_video, expected_text = order(*expected.split(order(num_video, num_asking), 1))
    weight, text_weight = weights_like(expected_video), weights_like(expected_text, 3)
    ((expected_video * weight).sum() + (expected_text * text_weight).sum()).backward()

    slices, shares, places = mask, share_sizes(num_video, num_ranks), torch.arange(num_video)
    if held == "dealt" and num_asking == num_text:
        first = num_text if text_first else 0
        slices = deal(mask, num_ranks, tokens=range(first, first + num_video))
        shares, places = slices.splits, slices.order() - first

    def own(tensor):
        return tensor.index_select(1, places).split(shares, 1)[rank]

    mine, my_text = leaves(own(tensor) for tensor in video), leaves(text)
    out, text_out = joint_attention(
        *mine, *my_text, mesh, text_first=text_first, text_mask=text_mask, slices=slices,
        splits=shares if held == "dealt" else None,
    )  # fmt: skip
    # The text's loss is counted once: a share on every rank, so that all of them send gradients.
    share = (rank + 1) / sum(range(1, num_ranks + 1))
    ((out * own(weight)).sum() + share * (text_out * text_weight).sum()).backward()
    pairs = [(out.detach(), own(expected_video), expected_video), (text_out.detach(), *[expected_text] * 2)]
    pairs += [(a.grad, own(b.grad), b.grad) for a, b in zip(mine, video, strict=True)]
    for words, reference in zip(my_text, text, strict=True):
        dist.all_reduce(words.grad)
        pairs.append((words.grad, reference.grad, reference.grad))
    return worst_error(pairs)


def all_joint(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    cases = itertools.product(WITH_TEXT, HEADS, (True, False), ("in order", "dealt"), (1, 2, 3))
    return {
        case: error_of_joint(mesh, *case) for number, case in enumerate(cases) if number % 3 == shape[0] % 3
    }


@pytest.mark.slow
@pytest.mark.parametrize("shape", some(MESHES, (2, 2)), ids=str)
def test_with_text_that_all_ranks_hold(ranks, shape):
    for rank, errors in enumerate(ranks(shape[0] * shape[1], all_joint, shape)):
        wrong = {case: error for case, error in errors.items() if not error < BOUND}
        assert not wrong, f"rank {rank}: {wrong}"
