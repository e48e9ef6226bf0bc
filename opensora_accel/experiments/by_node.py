"""All-to-all and all-reduce in two levels: within each node, then between nodes.

P = 4 ranks, 0 1 on one node and 2 3 on another. Each has a piece for every rank; `a→d` is that of rank a for rank d.

    rank 0           rank 1           rank 2           rank 3
    0→0 … 0→3        1→0 … 1→3        2→0 … 2→3        3→0 … 3→3
    within the node: what is for the other's place, on whichever node
    0→0 0→2 1→0 1→2  0→1 0→3 1→1 1→3  2→0 2→2 3→0 3→2  2→1 2→3 3→1 3→3
    between nodes, with the rank of the same place: what is for that node
    0→0 1→0 2→0 3→0  0→1 1→1 2→1 3→1  0→2 1→2 2→2 3→2  0→3 1→3 2→3 3→3

Numbers only move: the same bits as in one level. Between nodes there is one message for each node instead of one for
each rank. An all-reduce is a reduce-scatter within the node, an all-reduce of the parts between nodes, which has L
times fewer bytes for L ranks a node, and an all-gather; its sums are added up in another order.

A message of m bytes takes α + m/β seconds; w is the link within a node, b the one between nodes, and the group has N
nodes of L ranks, P = N·L (`opensora_accel/links.py` has the formulas of one level):

    all-to-all    (L−1)·αw + (N−1)·αb + m·(L−1)/L/βw + m·(N−1)/N/βb
    all-reduce    2·(L−1)·(αw + m/L/βw) + 2·(N−1)·(αb + m/(L·N)/βb)

Between nodes as many bytes travel as in one level, in L times fewer messages. An all-to-all pays where m/P < αb·βw:
where the piece for one rank is smaller than what a node's link carries during one latency of the network. An all-reduce
has fewer messages, and does not overlap what it sends within nodes and between them.

With links that were measured a collective takes the faster way for its size; all ranks know the sizes, and take the
same one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications import transport
from opensora_accel.links import Kind, Link, levels_of, measure_link, one_level_s
from opensora_accel.parallel_states import (
    get_mesh,
    get_parallel_group,
    host_group,
    lines_along,
    own_group,
    set_exchange,
    when_reset,
)
from opensora_accel.plan import MESH_AXES, Plan

TwoLevelKind = Literal["all-to-all", "all-reduce"]


class Nodes(NamedTuple):
    """The two levels of a group with L ranks on each of N nodes."""

    # The L ranks of this node, in the group's order.
    within: dist.ProcessGroup
    # The N ranks that have this one's place on their nodes.
    between: dist.ProcessGroup
    # To the first and to the second; where they are known, two levels are taken only where they are faster.
    links: tuple[Link, Link] | None


# Of the job, until its groups are dropped: ranks of a node; links within a node and between nodes, where two_level is
# "auto"; and by the name of a group its levels.
_ranks_per_node: int | None = None
_links: tuple[Link, Link] | None = None
_nodes: dict[str, Nodes] = {}


# ---- what a Plan with two_level calls


def check_ranks(plan: Plan, ranks: Tensor) -> None:
    """Before groups are made: fails on all ranks where two_level="on" asks for what they cannot have.

    Args:
        ranks: [dp_replicate, dp_shard, ring, ulysses, tp].

    Communication: one all-reduce, because machines may have been started with different numbers of ranks.

    Raises:
        ValueError: they were, or no group of the plan has several ranks on each of several nodes.
    """
    global _ranks_per_node
    per_node = plan.ranks_per_node or _local_world_size()
    axes = {"ulysses": lines_along(ranks, ("ulysses",), MESH_AXES)}
    if plan.is_sharded:
        axes["copies of the parameters"] = _lines_of_copies(plan, ranks)
    if plan.two_level == "on" and not any(levels_of(lines, per_node) for lines in axes.values()):
        had = " and ".join(f"{len(lines[0])} {name} of ranks {lines[0]}" for name, lines in axes.items())
        raise ValueError(
            f'two_level="on" needs a group with several ranks on each of several nodes; with {per_node} ranks a node '
            f"the plan has {had}; give that axis a multiple of {per_node} ranks, set ranks_per_node, or take "
            'two_level="auto", which runs one level where there are no two'
        )
    _ranks_per_node = per_node
    when_reset(_forget)


def init_parallel(plan: Plan, ranks: Tensor) -> None:
    """When the groups are there: measures the links for "auto", and splits ulysses by node.

    Communication: for "auto" messages of up to 4 MiB to the next rank, a tenth of a second in all; the ranks of a new
    group wait for each other.
    """
    global _links
    assert _ranks_per_node is not None
    levels = levels_of([ranks.flatten().tolist()], _ranks_per_node)
    if plan.two_level == "auto" and levels is not None:
        device = torch.device(get_mesh().device_type)
        within, between = (
            measure_link(own_group(lines, name), device)
            for lines, name in zip(levels, ("node", "nodes"), strict=True)
        )
        _links = within, between
    group = get_parallel_group("ulysses")
    nodes = _split(group, lines_along(ranks, ("ulysses",), MESH_AXES), "ulysses_by_node")
    if nodes is not None:
        parts = {"within a node": nodes.within, "between nodes": nodes.between}
        set_exchange(group, exchange, parts)


def check_groups(_plan: Plan) -> None:
    """When a model is sharded.

    Raises:
        ValueError: `init_parallel` was not called with such a plan.
    """
    if _ranks_per_node is None:
        raise ValueError(
            "two_level needs the groups by node that opensora_accel.init_parallel(plan) makes; call it with this plan, "
            'or set two_level="off"'
        )


def split_copies(plan: Plan, copies: dist.ProcessGroup) -> Nodes | None:
    """The levels of the ranks that hold copies of this one's shards; None where it has no two. All ranks call."""
    if plan.two_level == "off" or _ranks_per_node is None:
        return None
    return _split(copies, _lines_of_copies(plan, get_mesh().mesh), "replicate_by_node")


def get_nodes(group: dist.ProcessGroup) -> Nodes | None:
    """The levels of a group that was split; None where all its ranks are on one node, or one on each."""
    return _nodes.get(group.group_name)


def _split(group: dist.ProcessGroup, lines: list[list[int]], description: str) -> Nodes | None:
    """Registers the levels of this rank's one of the groups [groups, ranks]."""
    assert _ranks_per_node is not None
    levels = levels_of(lines, _ranks_per_node)
    if levels is None:
        return None
    if group.group_name not in _nodes:
        # Links may not be known where the job's ranks do not fill its nodes.
        within, between = (own_group(line, description) for line in levels)
        _nodes[group.group_name] = Nodes(within, between, _links)
    return _nodes[group.group_name]


def _lines_of_copies(plan: Plan, ranks: Tensor) -> list[list[int]]:
    by_copy = ranks.reshape(plan.mixed // plan.num_shards, plan.num_shards, plan.tp)
    return lines_along(by_copy, ("copy",), ("copy", "shard", "tp"))


def _local_world_size() -> int:
    """The ranks of each machine, by the launcher's word."""
    own = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # The largest, and the smallest with its sign turned.
    most, fewest = bounds = torch.tensor([own, -own])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=host_group(dist.distributed_c10d._get_default_group()))
    if most + fewest != 0:
        raise ValueError(
            f"two_level needs as many ranks on every machine, but they have from {-int(fewest)} to {int(most)}; start "
            'the same number on each, or set two_level="off"'
        )
    return own


def _forget() -> None:
    global _ranks_per_node, _links
    _ranks_per_node = _links = None
    _nodes.clear()


# ---- the collectives


def two_levels_s(
    kind: TwoLevelKind, size_bytes: float, nodes: int, per_node: int, links: tuple[Link, Link]
) -> float:
    """Seconds of a collective within nodes and then between them.

    Args:
        size_bytes: the tensor of one rank, m.
        links: within a node, and between nodes.
    """

    def near_s(kind: Kind) -> float:
        return one_level_s(kind, size_bytes, 1, per_node, links)

    def far_s(part_bytes: float) -> float:
        return one_level_s(kind, part_bytes, nodes, 1, links)

    if kind == "all-to-all":
        return near_s("all-to-all") + far_s(size_bytes)
    return near_s("reduce-scatter") + far_s(size_bytes / per_node) + near_s("all-gather")


def exchange(
    sent: Tensor, group: dist.ProcessGroup, piece_size: Callable[[int, int], int] | None = None
) -> Tensor:
    """`communications.transport.exchange`, where it is faster in one call within nodes and one between them.

    Args:
        sent: a piece for each rank, in order: [N, ...], in equal pieces; or [N] and `piece_size`.
        piece_size: how many elements one rank (first) sends to another (second).
    """
    ranks, nodes = range(group.size()), get_nodes(group)
    if nodes is None:
        return transport.exchange_at_once(sent, group, piece_size)
    if piece_size is None:
        if _takes_two(nodes, "all-to-all", sent.nbytes):
            return _exchange_even(sent, nodes)
    else:
        # The mean over ranks, so that all of them take the same way.
        num_elements = sum(piece_size(source, target) for source in ranks for target in ranks) / len(ranks)
        if _takes_two(nodes, "all-to-all", num_elements * sent.element_size()):
            return _exchange_uneven(sent, nodes, piece_size)
    return transport.exchange_at_once(sent, group, piece_size)


def all_reduce_(
    tensor: Tensor, group: dist.ProcessGroup, sum_: Callable[[Tensor, dist.ProcessGroup], None]
) -> None:
    """Replaces `tensor` [n] by its sum over the group; `sum_(tensor, group)` does so over ranks of all nodes."""
    nodes = get_nodes(group)
    if nodes is None or not _takes_two(nodes, "all-reduce", tensor.nbytes):
        sum_(tensor, group)
        return
    per_node = nodes.within.size()
    size = -(-tensor.numel() // per_node)
    # Zeros behind the end, as the parts of a reduce-scatter have one size.
    padded = tensor.new_zeros(per_node * size)
    padded[: tensor.numel()] = tensor
    own = tensor.new_empty(size)
    transport.reduce_scatter(own, padded, nodes.within)
    # Only this part crosses between nodes: 1/L of the bytes.
    sum_(own, nodes.between)
    transport.all_gather(padded, own, nodes.within)
    tensor.copy_(padded[: tensor.numel()])


def _takes_two(nodes: Nodes, kind: TwoLevelKind, size_bytes: float) -> bool:
    """Whether a collective on tensors of so many bytes runs in two levels."""
    if nodes.links is None:
        return True
    sizes = size_bytes, nodes.between.size(), nodes.within.size()
    return two_levels_s(kind, *sizes, nodes.links) < one_level_s(kind, *sizes, nodes.links)


def _exchange_even(sent: Tensor, nodes: Nodes) -> Tensor:
    """[N, ...], where rank after rank gets as many rows."""
    num_nodes, per_node = nodes.between.size(), nodes.within.size()
    # By node and place: [N nodes, L places, a piece].
    pieces = sent.reshape(num_nodes, per_node, -1)
    first = pieces.transpose(0, 1).contiguous()
    near = torch.empty_like(first)
    transport.all_to_all_single(near, first, nodes.within)
    # What arrived is by the place of its sender, and by the node that it is for.
    second = near.transpose(0, 1).contiguous()
    far = torch.empty_like(second)
    transport.all_to_all_single(far, second, nodes.between)
    return far.view(sent.shape)


def _exchange_uneven(sent: Tensor, nodes: Nodes, piece_size: Callable[[int, int], int]) -> Tensor:
    """[N] → [M], where pieces differ in size; ranks are counted within the group."""
    num_nodes, per_node = range(nodes.between.size()), range(nodes.within.size())
    node, place = nodes.between.rank(), nodes.within.rank()

    def rank_of(node: int, place: int) -> int:
        return node * len(per_node) + place

    own = rank_of(node, place)
    pieces = sent.split([piece_size(own, rank_of(n, p)) for n in num_nodes for p in per_node])
    # A message within the node is for a place, and has the pieces for that place on every node.
    first = torch.cat([pieces[rank_of(n, p)] for p in per_node for n in num_nodes])
    # From each place of this node, what it has for this place on each node.
    coming = [[piece_size(rank_of(node, p), rank_of(n, place)) for n in num_nodes] for p in per_node]
    near = sent.new_empty(sum(map(sum, coming)))
    going = [sum(pieces[rank_of(n, p)].size(0) for n in num_nodes) for p in per_node]
    transport.all_to_all_single(near, first, nodes.within, [sum(sizes) for sizes in coming], going)
    parts = near.split([size for sizes in coming for size in sizes])  # by sender's place, then by node
    # A message between nodes is for one rank, and has the pieces of all places of this node.
    second = torch.cat([parts[p * len(num_nodes) + n] for n in num_nodes for p in per_node])
    arriving = [sum(piece_size(rank_of(n, p), own) for p in per_node) for n in num_nodes]
    far = sent.new_empty(sum(arriving))
    leaving = [sum(coming[p][n] for p in per_node) for n in num_nodes]
    transport.all_to_all_single(far, second, nodes.between, arriving, leaving)
    return far
