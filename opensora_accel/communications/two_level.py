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

With links that were measured a collective takes the faster way for its size (`opensora_accel/links.py` has the
formulas); all ranks know the sizes, and take the same one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.transport import all_gather, all_to_all_single, reduce_scatter
from opensora_accel.links import TwoLevelKind, one_level_s, two_levels_s
from opensora_accel.parallel_states import Nodes, get_nodes


def exchange(
    sent: Tensor, group: dist.ProcessGroup, piece_size: Callable[[int, int], int] | None = None
) -> Tensor:
    """What the ranks of the group have for this one, in order of ranks.

    Args:
        sent: a piece for each rank, in order: [N, ...], in equal pieces; or [N] and `piece_size`.
        piece_size: how many elements one rank (first) sends to another (second), where that is not always the same.

    Communication: one `all_to_all_single`, or one within nodes and one between them.
    """
    rank, ranks = group.rank(), range(group.size())
    nodes = get_nodes(group)
    if piece_size is None:
        if nodes is not None and _takes_two(nodes, "all-to-all", sent.nbytes):
            return _exchange_even(sent, nodes)
        received = torch.empty_like(sent)
        all_to_all_single(received, sent, group)
        return received
    if nodes is not None:
        # The mean over ranks, so that all of them take the same way.
        num_elements = sum(piece_size(source, target) for source in ranks for target in ranks) / len(ranks)
        if _takes_two(nodes, "all-to-all", num_elements * sent.element_size()):
            return _exchange_uneven(sent, nodes, piece_size)
    send_sizes = [piece_size(rank, target) for target in ranks]
    receive_sizes = [piece_size(source, rank) for source in ranks]
    received = sent.new_empty(sum(receive_sizes))
    all_to_all_single(received, sent, group, receive_sizes, send_sizes)
    return received


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
    reduce_scatter(own, padded, nodes.within)
    # Only this part crosses between nodes: 1/L of the bytes.
    sum_(own, nodes.between)
    all_gather(padded, own, nodes.within)
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
    all_to_all_single(near, first, nodes.within)
    # What arrived is by the place of its sender, and by the node that it is for.
    second = near.transpose(0, 1).contiguous()
    far = torch.empty_like(second)
    all_to_all_single(far, second, nodes.between)
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
    all_to_all_single(near, first, nodes.within, [sum(sizes) for sizes in coming], going)
    parts = near.split([size for sizes in coming for size in sizes])  # by sender's place, then by node
    # A message between nodes is for one rank, and has the pieces of all places of this node.
    second = torch.cat([parts[p * len(num_nodes) + n] for n in num_nodes for p in per_node])
    arriving = [sum(piece_size(rank_of(n, p), own) for p in per_node) for n in num_nodes]
    far = sent.new_empty(sum(arriving))
    leaving = [sum(coming[p][n] for p in per_node) for n in num_nodes]
    all_to_all_single(far, second, nodes.between, arriving, leaving)
    return far
