"""The condition under which a ring hides, against its formula, a simulated ring, and what is measured."""

import pytest
import torch
import torch.distributed as dist

from opensora_accel.attention.overlap import (
    RingHardware,
    RingShape,
    explain_overlap,
    measure_ring_hardware,
    ring_overlap,
)

H100 = RingHardware(flops_per_s=400e12, bandwidth_bytes_per_s=50e9)


def shape(**changes):
    facts = {
        "num_ranks": 8, "batch": 1, "block_tokens": 4096, "heads": 24, "kv_heads": 24, "head_dim": 128,
        "dtype": torch.bfloat16,
    }  # fmt: skip
    return RingShape(**{**facts, **changes})


def test_the_condition_of_the_paper():
    """bf16: forward hides from c = F/W on, forward and backward from 1.2 F/W."""
    limit = H100.flops_per_s / H100.bandwidth_bytes_per_s
    assert ring_overlap(shape(), H100).smallest_block_tokens == pytest.approx(1.2 * limit, abs=1)
    at_limit = ring_overlap(shape(block_tokens=int(limit)), H100)
    assert at_limit.forward_transfer_s == pytest.approx(at_limit.forward_compute_s, rel=1e-3)
    assert not at_limit.hides
    assert ring_overlap(shape(block_tokens=int(1.2 * limit) + 1), H100).hides


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"dtype": torch.float32}, 2.0 / 1.2),  # forward: twice the bytes; backward 16/10
        ({"kv_heads": 6}, 1 / 4),
        ({"causal": True}, 2.0),
        ({"batch": 4}, 1.0),
    ],
)
def test_what_changes_the_smallest_block(changes, factor):
    before = ring_overlap(shape(), H100).smallest_block_tokens
    after = ring_overlap(shape(**changes), H100).smallest_block_tokens
    assert after == pytest.approx(before * factor, rel=1e-3)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 1024])
def test_exposed_time_between_its_two_ends(num_ranks):
    """Nothing to compute: all the bytes are waited for. Much to compute: only the gradients' last hop is."""
    tiny, huge = shape(num_ranks=num_ranks, block_tokens=1), shape(num_ranks=num_ranks, block_tokens=10**6)
    for case, hops in ((tiny, num_ranks - 1), (huge, 0)):
        overlap = ring_overlap(case, H100)
        keys, both = overlap.forward_transfer_s, overlap.backward_transfer_s
        grads = both - keys
        expected = hops * (keys + both) if hops else grads
        # One token computes for 1/8,000 of what its message takes, and hides as much of it.
        assert overlap.exposed_s == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("block_tokens", [512, 4096, 9000, 40000])
def test_exposed_time_on_two_ranks(block_tokens):
    overlap = ring_overlap(shape(num_ranks=2, block_tokens=block_tokens), H100)
    keys, both = overlap.forward_transfer_s, overlap.backward_transfer_s
    expected = (
        max(0, keys - overlap.forward_compute_s) + max(0, keys - overlap.backward_compute_s) + both - keys
    )
    assert overlap.exposed_s == pytest.approx(expected)


def test_one_rank_waits_for_nothing():
    assert ring_overlap(shape(num_ranks=1), H100).exposed_s == 0


def test_the_message_says_what_it_costs_and_what_to_change():
    text = explain_overlap(shape(), H100)
    assert "a block of 4,096 tokens" in text and "400 TFLOP/s and 50 GB/s" in text
    assert (
        "blocks of 9,600 tokens would hide it. Where the heads allow it, move ranks from the ring to ulysses"
        in text
    )


def test_the_message_says_that_a_ring_hides():
    text = explain_overlap(shape(block_tokens=20_000), H100)
    assert text.startswith("the ring of 8 ranks hides its transfers: a block of 20,000 tokens computes")


def test_impossible_hardware_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        RingHardware(0, 1e9)


def draws():
    torch.manual_seed(0)
    measure_ring_hardware(dist.group.WORLD, torch.device("cpu"), torch.float32)
    return torch.rand(1).item()


def test_measuring_draws_no_random_numbers(ranks):
    """A run may go on after it."""
    torch.manual_seed(0)
    assert ranks(2, draws) == [torch.rand(1).item()] * 2


def measured():
    hardware = measure_ring_hardware(dist.group.WORLD, torch.device("cpu"), torch.float32)
    return hardware.flops_per_s, hardware.bandwidth_bytes_per_s


def test_measured_hardware_is_the_same_on_all_ranks_and_plausible(ranks):
    first, second = ranks(2, measured)
    assert first == second
    assert 1e8 < first[0] < 1e14 and 1e6 < first[1] < 1e12
