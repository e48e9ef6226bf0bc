"""The cost of a collective: bytes and seconds by hand, on one node and on several."""

import pytest
import torch
import torch.distributed as dist

from opensora_accel.links import Link, measure_rounds, one_level_s, sent_bytes

# 1 s a message and 10 bytes a second within a node; 100 s and 1 byte a second between nodes.
LINKS = Link(10, 1), Link(1, 100)


@pytest.mark.parametrize(
    ("kind", "sent", "one_node_s", "two_nodes_s"),
    [
        # Of 40 bytes on 4 ranks each sends 30; 2 ranks of a node have a port each, so 15 bytes leave by either.
        ("all-gather", 30, 3 * 1 + 3, 2 * 1 + 100 + 15),
        ("reduce-scatter", 30, 3 * 1 + 3, 2 * 1 + 100 + 15),
        # Along a tree a message passes log2(4) = 2 times, there and back.
        ("all-reduce", 60, 4 * 1 + 6, 2 * 102 + 30),
        # Each piece has 10 bytes: one goes to the neighbour, two to the other node.
        ("all-to-all", 30, 3 * 1 + 3, 1 + 1 + 2 * 100 + 20),
        ("send", 40, 1 + 4, 100 + 40),
    ],
)
def test_seconds_and_bytes_of_40_bytes_on_4_ranks(kind, sent, one_node_s, two_nodes_s):
    assert sent_bytes(kind, 40, 4) == sent
    assert one_level_s(kind, 40, 1, 4, LINKS) == pytest.approx(one_node_s)
    assert one_level_s(kind, 40, 2, 2, LINKS) == pytest.approx(two_nodes_s)
    assert one_level_s(kind, 40, 1, 1, LINKS) == 0


def test_a_ring_has_fewer_messages_than_a_tree_on_few_ranks_of_many_nodes():
    # A ring of 3 nodes of 8 passes 21 links within nodes and 2 between them; a tree, 2·log2(24) = 9.2 between them.
    assert one_level_s("all-reduce", 0, 3, 8, LINKS) == pytest.approx(2 * (21 + 200))


def test_a_link_through_two_messages():
    assert Link.through((8, 0.5), (108, 10.5)) == Link(10, 0.5)
    # Beside other programs the large message may seem the faster one.
    assert Link.through((8, 2.0), (108, 1.0)) == Link(1000, 2.0)


def rounds():
    calls = []
    seconds = measure_rounds(lambda: calls.append(dist.get_rank()), torch.device("cpu"), 3)
    return seconds, len(calls)


def test_all_ranks_measure_the_same_seconds(ranks):
    found = ranks(2, rounds)
    assert found[0] == found[1]
    seconds, num_calls = found[0]
    assert num_calls == 5 and len(seconds) == 3 and seconds == sorted(seconds) and seconds[0] > 0
