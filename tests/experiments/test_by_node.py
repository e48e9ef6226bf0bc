"""Collectives by node: the same bits as in one level, and taken where they are faster."""

import itertools
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel import communications as comm
from opensora_accel.attention import ulysses_attention
from opensora_accel.communications import transport
from opensora_accel.experiments import by_node as collectives
from opensora_accel.experiments import overlap
from opensora_accel.experiments.by_node import get_nodes, two_levels_s
from opensora_accel.experiments.compressed import RoundedSum
from opensora_accel.links import Link, one_level_s
from opensora_accel.observe import CollectiveRecorder
from opensora_accel.parallel_states import get_parallel_group
from tests.models import wan
from tests.tiers import PROVE

NODES = [(2, 2), pytest.param((3, 2), marks=PROVE), pytest.param((2, 3), marks=PROVE)]


def group_by_node(num_nodes, per_node, two_level="on"):
    """The ulysses group of a job with so many simulated nodes, whose collectives run in two levels."""
    init_parallel(Plan(ulysses=num_nodes * per_node, two_level=two_level, ranks_per_node=per_node))
    return get_parallel_group("ulysses")


def every_dim(num_nodes, per_node, shapes):
    """Tensors packed in one all-to-all over every pair of dims: outputs and gradients beside those of one level."""
    group = group_by_node(num_nodes, per_node)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    one_level = dist.new_group(list(range(num_ranks)))
    assert get_nodes(one_level) is None and get_nodes(group) is not None
    for scatter_dim, gather_dim in itertools.permutations(range(len(shapes[0])), 2):
        found = []
        for each in (group, one_level):
            generator = torch.Generator().manual_seed(0)
            wholes = [torch.randn(shape, generator=generator) for shape in shapes]
            mine = [w.tensor_split(num_ranks, gather_dim)[rank].clone().requires_grad_() for w in wholes]
            outputs = comm.all_to_all_packed(mine, each, scatter_dim, gather_dim)
            sum((out**3).sum() for out in outputs).backward()
            found.append([*outputs, *(tensor.grad for tensor in mine)])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize(
    "shapes",
    [[(12, 12, 12)], [(6, 12, 6), (6, 12, 12)], [(7, 5, 9), (7, 3, 9)], [(1, 3, 2), (2, 3, 4)]],
    ids=["even", "even, packed", "uneven", "fewer than ranks"],
)
def test_two_levels_move_the_same_bits_forward_and_backward(ranks, nodes, shapes):
    ranks(nodes[0] * nodes[1], every_dim, *nodes, shapes)


def attention_by_node(num_nodes, per_node, heads, kv_heads, tokens, compiled):
    group = group_by_node(num_nodes, per_node)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    one_level = dist.new_group(list(range(num_ranks)))
    splits = comm.share_sizes(tokens, num_ranks)
    found = []
    for each in (group, one_level):
        generator = torch.Generator().manual_seed(0)
        shapes = [(2, tokens, heads, 8), (2, tokens, kv_heads, 8), (2, tokens, kv_heads, 8)]
        wholes = [torch.randn(shape, generator=generator) for shape in shapes]
        mine = [w.split(splits, 1)[rank].clone().requires_grad_() for w in wholes]

        def attend(q, k, v, group=each):
            return ulysses_attention(q, k, v, group, splits=splits, kv_splits=splits)

        torch._dynamo.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
        out = attend(*mine)
        (out**2).sum().backward()
        found.append([out, *(tensor.grad for tensor in mine)])
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(
    "sizes", [(4, 4, 8), pytest.param((5, 5, 7), marks=PROVE), pytest.param((6, 2, 3), marks=PROVE)]
)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=PROVE)])
def test_ulysses_by_node_is_ulysses(ranks, sizes, compiled):
    assert all(ranks(4, attention_by_node, 2, 2, *sizes, compiled))


def messages_between_nodes():
    """Calls and bytes of an all-to-all and an all-reduce over 2 nodes of 2 ranks."""
    group = group_by_node(2, 2)
    nodes = get_nodes(group)
    with CollectiveRecorder() as recorder:
        comm.all_to_all(torch.ones(1, 8, 4), group, 2, 1, splits=[8] * 4)
        collectives.all_reduce_(torch.ones(10), group, transport.all_reduce_)
        collectives.all_reduce_(torch.ones(10), group, RoundedSum().all_reduce_)
    names = {group.group_name: "all", nodes.within.group_name: "near", nodes.between.group_name: "far"}
    of_ranks = {
        tuple(dist.get_process_group_ranks(g)): names[g.group_name]
        for g in (group, nodes.within, nodes.between)
    }
    return [(call.kind, of_ranks[call.group], call.sent_bytes) for call in recorder.calls]


def test_bytes_within_nodes_and_between_them(ranks):
    expected = [
        # 128 bytes a rank: half of them to the other rank of the node, then half to the other node.
        ("all-to-all", "near", 64),
        ("all-to-all", "far", 64),
        # 40 bytes: parts of 20, of which the all-reduce between 2 nodes sends 2 · 20 · 1/2.
        ("reduce-scatter", "near", 20),
        ("all-reduce", "far", 20),
        ("all-gather", "near", 20),
        # Parts of 5 elements, filled up to 6: 3 elements of 2 bytes there, and as many back.
        ("reduce-scatter", "near", 20),
        ("all-to-all", "far", 6),
        ("all-gather", "far", 6),
        ("all-gather", "near", 20),
    ]
    assert ranks(4, messages_between_nodes) == [expected] * 4


def sums_by_node(num_nodes, per_node, numel):
    group = group_by_node(num_nodes, per_node)
    tensors = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(group.size())]
    found = tensors[group.rank()].clone()
    collectives.all_reduce_(found, group, transport.all_reduce_)
    exact, sizes = torch.stack(tensors).double().sum(0), torch.stack(tensors).abs().double().sum(0)
    every = comm.checks.gather_objects(found.tolist(), group)
    # Added up in any order, P numbers are off by P − 1 roundings.
    share = (found - exact).abs() / (group.size() * 2.0**-24 * sizes)
    return share.max().item(), all(each == every[0] for each in every)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("numel", [12, 7, 1])
def test_an_all_reduce_by_node_is_the_sum_but_for_its_order(ranks, nodes, numel):
    for share, same in ranks(nodes[0] * nodes[1], sums_by_node, *nodes, numel):
        assert share <= 1 and same


def links_and_choices():
    group = group_by_node(2, 2, two_level="auto")
    within, between = get_nodes(group).links
    # As a cluster would be: 300 GB/s and 3 µs within a node, 25 GB/s and 20 µs between nodes.
    links = Link(300e9, 3e-6), Link(25e9, 20e-6)
    nodes = get_nodes(group)._replace(links=links)
    taken = []
    with mock.patch.object(collectives, "get_nodes", lambda _group: nodes):
        for num_elements in (4096, 2**24):
            with CollectiveRecorder() as recorder:
                comm.all_to_all(torch.ones(1, 4, num_elements), group, 2, 1, splits=[4] * 4)
            taken.append(len(recorder.calls))
    return (within.latency_s, between.bandwidth_bytes_per_s), taken


@pytest.mark.prove
def test_auto_measures_links_and_takes_what_is_faster_for_a_size(ranks):
    found = ranks(4, links_and_choices)
    (latency_s, bandwidth), taken = found[0]
    assert found == [found[0]] * 4  # all ranks decide the same
    assert 0 < latency_s < 10 and 1e3 < bandwidth < 1e13
    # A piece of 16 KiB is less than 20 µs carry at 300 GB/s (6 MB), one of 64 MiB is more.
    assert taken == [2, 1]


def test_two_levels_pay_below_the_size_that_is_stated():
    links = Link(300e9, 3e-6), Link(25e9, 20e-6)
    for nodes, per_node in ((2, 8), (16, 8), (4, 2)):
        threshold = nodes * per_node * links[1].latency_s * links[0].bandwidth_bytes_per_s
        for factor in (0.5, 0.99, 1.01, 2):
            sizes = ("all-to-all", factor * threshold, nodes, per_node, links)
            assert (two_levels_s(*sizes) < one_level_s(*sizes)) == (factor < 1)
    # With one rank a node, or one node, both are the same.
    for nodes, per_node in ((8, 1), (1, 8)):
        assert one_level_s("all-to-all", 1e6, nodes, per_node, links) == pytest.approx(
            two_levels_s("all-to-all", 1e6, nodes, per_node, links)
        )
    assert one_level_s("all-reduce", 1e6, 8, 1, links) == two_levels_s("all-reduce", 1e6, 8, 1, links)


# 1 s a message and 10 bytes a second within a node; 100 s and 1 byte a second between nodes.
SLOW = Link(10, 1), Link(1, 100)


def test_two_levels_are_what_they_consist_of():
    # All-to-all: 20 of the 40 bytes to the neighbour, and 20 to the other node.
    assert two_levels_s("all-to-all", 40, 2, 2, SLOW) == pytest.approx(1 + 2 + 100 + 20)
    # All-reduce: 20 bytes to the neighbour, the sum of 20 bytes between two nodes, and 20 bytes back.
    assert two_levels_s("all-reduce", 40, 2, 2, SLOW) == pytest.approx((1 + 2) * 2 + 200 + 20)


def groups_made():
    """The process groups of a job with a ulysses axis over two nodes, without and with two levels."""
    found = []
    for options in ({}, {"two_level": "on", "ranks_per_node": 2}):
        parallel_states.reset()
        init_parallel(Plan(ulysses=4, **options))
        found.append(len(dist.distributed_c10d._world.pg_map))
    parallel_states.make_mesh(1, 4)
    return found


def test_no_group_is_made_twice(ranks):
    for without, with_levels in ranks(4, groups_made):
        # Groups of the first are still there: those of one rank are made again, and two are new.
        assert with_levels <= 2 * without + 2


def refused(fields, env, message):
    with mock.patch.dict(os.environ, env), pytest.raises(ValueError, match=message):
        init_parallel(Plan(**fields))


def test_on_needs_two_levels(ranks):
    ranks(4, refused, {"ulysses": 4, "two_level": "on", "ranks_per_node": 4}, {}, "with 4 ranks a node")
    ranks(4, refused, {"ulysses": 4, "two_level": "on"}, {"LOCAL_WORLD_SIZE": "1"}, "with 1 ranks a node")
    ranks(
        4,
        refused,
        {"ulysses": 2, "ring": 2, "two_level": "on", "ranks_per_node": 2},
        {},
        "set ranks_per_node",
    )


def refused_uneven_machines():
    own = {"LOCAL_WORLD_SIZE": str(1 + dist.get_rank() % 2)}
    refused({"ulysses": 4, "two_level": "auto"}, own, "they have from 1 to 2; start the same number on each")


def test_machines_have_as_many_ranks(ranks):
    ranks(4, refused_uneven_machines)


def refused_without_levels():
    init_parallel(Plan(ulysses=4))
    with pytest.raises(ValueError, match=r"init_parallel\(plan\) makes; call it with this plan"):
        shardformer.shard(wan(), Plan(ulysses=4, two_level="on", ranks_per_node=2))


def test_a_plan_that_the_groups_were_not_made_for_is_refused(ranks):
    ranks(4, refused_without_levels)


def refused_overlap():
    group = group_by_node(2, 2)
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(ValueError, match="set overlap_ulysses=False"):
        overlap.ulysses_attention(q, q, q, group)


def test_overlap_is_refused(ranks):
    ranks(4, refused_overlap)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"two_level": "on"}, "the plan has neither"),
        ({"two_level": "on", "dp_replicate": 4}, "the plan has neither"),
        ({"ranks_per_node": 2, "ulysses": 4}, 'set it to "on" or "auto"'),
        ({"two_level": "on", "ulysses": 4, "ranks_per_node": 3}, "must divide the plan's 4 ranks"),
        (
            {"two_level": "on", "ulysses": 4, "ranks_per_node": 8},
            "a whole number of the plan's 4 ranks; got 8",
        ),
        ({"two_level": "on", "ulysses": 4, "overlap_ulysses": True}, "set overlap_ulysses=False"),
        ({"two_level": "yes", "ulysses": 4}, "two_level must be one of off, on, auto"),
    ],
)
def test_plans_without_two_levels_are_refused(fields, message):
    with pytest.raises(ValueError) as caught:
        Plan(**fields)
    assert message in str(caught.value)
