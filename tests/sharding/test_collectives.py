"""Bytes against what really leaves a rank, time against its formula, FLOPs against torch's own counter."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from opensora_accel.communications import (
    all_to_all_packed,
    gather_forward_split_backward,
    reduce_scatter_forward_gather_backward,
)
from opensora_accel.links import Link
from opensora_accel.observe import CollectiveRecorder
from opensora_accel.sharding import Equation, Partial, Replicate, Shard
from opensora_accel.sharding.collectives import Collective, einsum_flops, redistribution
from opensora_accel.sharding_command.balance import Balance


def really_sent(shape):
    """Bytes of each kind on this rank, for a whole tensor of fp32 numbers."""
    whole, found = torch.zeros(shape), {}
    shares = whole.tensor_split(dist.get_world_size())
    share = shares[dist.get_rank()].contiguous()
    splits = [len(each) for each in shares]
    for kind, run in {
        "all-reduce": lambda: dist.all_reduce(whole.clone()),
        "all-gather": lambda: gather_forward_split_backward(share, dist.group.WORLD, 0, splits=splits),
        "reduce-scatter": lambda: reduce_scatter_forward_gather_backward(whole, dist.group.WORLD, 0),
        "all-to-all": lambda: all_to_all_packed([share], dist.group.WORLD, 1, 0, splits=[splits]),
    }.items():
        with CollectiveRecorder() as recorder:
            run()
        # Sizes that ranks tell each other are whole numbers.
        found[kind] = sum(call.sent_bytes for call in recorder.calls if call.dtype != "int64")
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_are_those_that_leave_a_rank(ranks, num_ranks):
    for found in ranks(num_ranks, really_sent, (48, 4)):
        for kind, size_bytes in found.items():
            assert Collective(kind, "tp", num_ranks, 48 * 4 * 4).sent_bytes == size_bytes, kind


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", [(5, 7), (9, 2), (6, 5)])
def test_bytes_of_uneven_shares_are_those_of_the_busiest_rank(ranks, num_ranks, shape):
    found = ranks(num_ranks, really_sent, shape)
    cuts = {"all-gather": shape[:1], "reduce-scatter": shape[:1], "all-to-all": shape}
    for kind, cut in cuts.items():
        busiest = max(each[kind] for each in found)
        modelled = Collective(kind, "tp", num_ranks, math.prod(shape) * 4, cut).sent_bytes
        assert modelled == pytest.approx(busiest), kind


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (Partial(), Replicate(), "all-reduce"),
        (Partial(), Shard("s"), "reduce-scatter"),
        (Shard("s"), Replicate(), "all-gather"),
        (Shard("s"), Shard("h"), "all-to-all"),
        (Replicate(), Shard("s"), "split"),
    ],
)
def test_the_collective_between_two_placements(before, after, kind):
    assert redistribution(before, after, "tp", 4, 100).kind == kind
    assert redistribution(before, before, "tp", 4, 100) is None
    assert redistribution(before, after, "tp", 1, 100).sent_bytes == 0


def test_terms_are_not_communicated():
    with pytest.raises(ValueError, match="terms are what an einsum leaves"):
        redistribution(Replicate(), Partial(), "tp", 2, 100)


def test_time_of_a_link():
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    # Along a tree of 4 ranks it is 2·log2(4) messages, and around a ring 2·3.
    assert Collective("all-reduce", "tp", 4, 10**9).time_s(link) == pytest.approx(1.5 + 4e-5)
    assert Collective("all-reduce", "tp", 1, 10**9).time_s(link) == 0
    assert Collective("split", "tp", 8, 10**9).time_s(link) == 0
    with pytest.raises(ValueError, match="bandwidth above 0"):
        Link(0)


@pytest.mark.parametrize("text", ["sbi,io->sbo", "bshd,bthd->bhst", "ab,bc,cd->ad", "te,tc->ec"])
def test_flops_are_those_that_torch_counts(text):
    equation = Equation.parse(text)
    sizes = dict(zip(equation.labels, (2, 3, 4, 5, 6), strict=False))
    tensors = [torch.zeros([sizes[n] for n in labels], device="meta") for labels in equation.operands]
    with FlopCounterMode(display=False) as counter:
        torch.einsum(text, *tensors)
    assert einsum_flops(equation, sizes) == counter.get_total_flops()


def test_a_ratio_under_three_to_one_is_bound():
    assert Balance(2.9, 1.0).is_bound and not Balance(3.1, 1.0).is_bound
    assert Balance(1.0, 0.0).ratio == math.inf


def test_a_collective_that_cannot_be():
    with pytest.raises(ValueError, match="one of all-reduce, all-gather"):
        Collective("broadcast", "tp", 2, 1)
    with pytest.raises(ValueError, match="at least 1 rank"):
        Collective("all-reduce", "tp", 0, 1)
