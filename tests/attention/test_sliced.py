"""Attention by slices over ranks against a dense mask on one device: output and all gradients, in fp64.

Every kind of mask on every mesh, with tokens in order and dealt out, heads that divide and not, grouped heads, key
masks beside the slices, queries that see nothing, and ranks without tokens.
"""

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from opensora_accel.attention import local_attention
from opensora_accel.attention.slices import AttentionSlices, deal
from opensora_accel.communications import share_sizes
from tests.attention.reference import full_attention, random_inputs, weights_like, worst_error
from tests.attention.test_exact import attentions_on, leaves, moved_shares
from tests.attention.test_slices import random_slice
from tests.tiers import some

BOUND = 1e-10  # sums in another order: measured 3e-15 of the largest element
MESHES = [(2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (5, 1), (3, 2), (2, 3), (6, 1), (1, 6)]
HEADS = [(6, 6), (5, 5), (12, 3), (2, 1)]


def random_mask(seed, size=17):
    """Slices of all kinds without a pair in common, here and there; some queries see nothing."""
    numbers = random.Random(seed)
    mask = AttentionSlices(size, size, ())
    for _ in range(12):
        each = random_slice(numbers).moved(numbers.randint(0, 3), numbers.randint(0, 3))
        if not any(each.area_of(other) for other in mask.slices):
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

    slices = deal(mask, num_ranks) if held == "dealt" else mask
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


def test_other_numbers_of_queries_and_keys():
    mask = AttentionSlices.packed([5, 3, 4], [2, 0, 6])
    q, k, v, _ = random_inputs(12, 8, 4, 2, False)
    out = local_attention(q, k, v, slices=mask)
    assert (out - full_attention(q, k, v, seen=mask.dense())).abs().max() < BOUND
    assert out[:, 5:8].abs().max() == 0
