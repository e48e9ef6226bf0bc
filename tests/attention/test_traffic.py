"""What goes over the wire and what is kept for backward: facts of the shapes, not of the machine."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from opensora_accel.attention import joint_attention, ring_attention, ulysses_attention, usp_attention
from opensora_accel.attention.ulysses import Heads
from opensora_accel.communications import share_sizes
from tests.attention.counting import counted, saved_for_backward


def inputs(dtype, heads=4, kv_heads=4, tokens=6):
    q = torch.randn(1, tokens, heads, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, tokens, kv_heads, 8, dtype=dtype, requires_grad=True) for _ in "kv")
    return q, k, v


def ring_traffic(dtype, kv_heads):
    q, k, v = inputs(dtype, kv_heads=kv_heads)
    sizes = (q.size(1),) * dist.get_world_size()
    with counted() as sent:
        out = ring_attention(q, k, v, dist.group.WORLD, splits=sizes, kv_splits=sizes)
        forward = sent.size_bytes
        out.sum().backward()
    return forward / q.nbytes, sent.size_bytes / q.nbytes, sent.num_collectives


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ring_bytes_in_units_of_the_local_queries(ranks, num_ranks):
    """fp32: 6 on 2 ranks, 18 on 4. bf16 with gradients in fp32: 8 and 24. Grouped heads: as much less."""
    hops = num_ranks - 1
    for dtype, both, forward in ((torch.float32, 6, 2), (torch.bfloat16, 8, 2)):
        for kv_heads, share in ((4, 1), (1, 1 / 4)):
            expected = (forward * hops * share, both * hops * share, 3 * hops)
            assert ranks(num_ranks, ring_traffic, dtype, kv_heads) == [expected] * num_ranks


def masked_ring_traffic():
    q, k, v = inputs(torch.float32)
    mask = torch.ones(1, 6, dtype=torch.bool)
    sizes = (6, 6)
    with counted() as sent, torch.no_grad():
        ring_attention(q, k, v, dist.group.WORLD, mask=mask, splits=sizes, kv_splits=sizes)
    return sent.size_bytes - 2 * q.nbytes


def test_a_key_mask_costs_a_byte_a_key(ranks):
    assert ranks(2, masked_ring_traffic) == [6, 6]


def ulysses_traffic(kv_heads):
    q, k, v = inputs(torch.float32, kv_heads=kv_heads)
    sizes = (q.size(1),) * dist.get_world_size()
    with counted() as sent:
        ulysses_attention(q, k, v, dist.group.WORLD, splits=sizes, kv_splits=sizes).sum().backward()
    return sent.num_collectives, sent.size_bytes / q.nbytes


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ulysses_takes_four_collectives(ranks, num_ranks):
    away = (num_ranks - 1) / num_ranks
    assert ranks(num_ranks, ulysses_traffic, 4) == [(4, 8 * away)] * num_ranks
    # One key head for all: every rank needs it, and it goes to each once.
    wanted = (4, 2 * (2 * away + 2 * (num_ranks - 1) / 4))
    assert ranks(num_ranks, ulysses_traffic, 1) == [wanted] * num_ranks


def usp_traffic():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    q, k, v = inputs(torch.float32)
    with counted() as sent:
        usp_attention(q, k, v, mesh, splits=(6,) * 4, kv_splits=(6,) * 4).sum().backward()
    return sent.num_collectives, sent.size_bytes / q.nbytes


def test_usp_sends_what_its_two_parts_send(ranks):
    assert ranks(4, usp_traffic) == [(4 + 3, 8 / 2 + 6)] * 4


def joint_traffic(num_text):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    video, text = inputs(torch.float32), inputs(torch.float32, tokens=num_text)
    with counted() as sent:
        out, text_out = joint_attention(*video, *text, mesh, splits=(6, 6))
        (out.sum() + text_out.sum()).backward()
    return sent.num_collectives, sent.size_bytes / video[0].nbytes


@pytest.mark.parametrize("num_text", [1, 6, 7])
def test_text_keys_are_not_sent(ranks, num_text):
    """Beyond the video's own: half of the heads of the text's output, once each way."""
    assert ranks(2, joint_traffic, num_text) == [(4, 4 + 2 * num_text / 6 / 2)] * 2


def kept_by_ring(masked):
    q, k, v = inputs(torch.float32)
    mask = torch.ones(1, 6, dtype=torch.bool) if masked else None
    with saved_for_backward() as kept:
        out = ring_attention(q, k, v, dist.group.WORLD, mask=mask)
    assert {id(t) for t in (q, k, v)} <= {id(t) for t in kept}
    assert out.data_ptr() in {t.data_ptr() for t in kept}
    return sum(t.nbytes for t in kept) - 4 * q.nbytes, len(kept)


def test_ring_keeps_queries_keys_values_output_and_lse(ranks):
    lse_bytes = 6 * 4 * 4
    assert ranks(3, kept_by_ring, False) == [(lse_bytes, 5)] * 3
    assert ranks(3, kept_by_ring, True) == [(lse_bytes + 6, 6)] * 3


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8])
def test_every_rank_gets_its_share_of_heads_and_the_keys_that_they_need(num_ranks):
    """Grouped heads follow their queries, not the other way round: 12 heads of 3 groups are 6 and 6, not 8 and 4."""
    for kv_heads, group_size in itertools.product(range(1, 13), range(1, 7)):
        num_heads = kv_heads * group_size
        heads = Heads.shared(num_heads, kv_heads, num_ranks)
        assert heads.queries == share_sizes(num_heads, num_ranks)
        keys = torch.arange(kv_heads).view(1, 1, -1, 1)
        spread = heads.spread_keys(keys).split([len(each) for each in heads.keys], 2)
        for rank in range(num_ranks):
            aligned = heads.align_keys(spread[rank], rank).flatten().tolist()
            own = [head // group_size for head in heads.query_range(rank)]
            if own:
                assert len(own) % len(aligned) == 0, (num_heads, kv_heads, rank)
                repeated = [key for key in aligned for _ in range(len(own) // len(aligned))]
                assert repeated == own, (num_heads, kv_heads, rank)
            else:
                assert aligned == []
