"""What a collective costs: the bytes that a rank sends, and the seconds on links that are known or measured.

A message of m bytes takes α + m/β seconds, for a latency α and a bandwidth β (Thakur et al.,
doi:10.1177/1094342005051521). A group has N nodes of L ranks, P = N·L, with a link w within a node and b between nodes.
Each rank has a link of its own, so a node has L ports: a ring through all ranks runs L times, each on another port.

    kind                         a rank sends, s         one level
    all-gather, reduce-scatter   m·(P−1)/P               (P−N)·αw + (N−1)·αb + max(s/βw, s/L/βb)
    all-reduce                   2·m·(P−1)/P             twice the messages of a ring, or 2·log2(P) along a tree
    all-to-all                   m·(P−1)/P               (L−1)·αw + (N−1)·L·αb + m·(L−1)/P/βw + m·(N−1)/N/βb
    send                         m                       αw + m/βw, or αb + m/βb where the group leaves a node

m is the whole tensor that every rank has before (all-reduce, reduce-scatter, all-to-all) or after (all-gather). With
one node N is 1, and there is no b.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

# torch is imported where links are measured: `opensora-accel shard` computes with them in a fraction of its import.
if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

_SMALL_BYTES, _LARGE_BYTES = 8, 4 * 2**20
_ROUNDS = 7

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]


@dataclass(frozen=True)
class Link:
    """The link of one rank to the others of an axis.

    Raises:
        ValueError: a bandwidth that is not above 0, or a number that is not finite.
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 5e-6

    def __post_init__(self) -> None:
        if not (0 < self.bandwidth_bytes_per_s < math.inf and 0 <= self.latency_s < math.inf):
            raise ValueError(
                f"a link needs a finite bandwidth above 0 and a latency of at least 0; got {self}"
            )

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> Link:
        """The link on which a small and a large message, as (bytes, seconds), took what they took."""
        (small_bytes, small_s), (large_bytes, large_s) = small, large
        # On a machine that does other things a large message may seem the faster one.
        return cls((large_bytes - small_bytes) / max(large_s - small_s, large_s / 10), small_s)

    def time_s(self, num_messages: float, sent_bytes: float) -> float:
        """Seconds for messages one after another that have so many bytes together."""
        return num_messages * self.latency_s + sent_bytes / self.bandwidth_bytes_per_s


def sent_bytes(kind: Kind, size_bytes: float, num_ranks: float) -> float:
    """What one rank sends of a whole tensor of so many bytes; every share is even."""
    if kind == "send":
        return size_bytes
    return (2 if kind == "all-reduce" else 1) * size_bytes * (num_ranks - 1) / num_ranks


def one_level_s(
    kind: Kind, size_bytes: float, nodes: int, per_node: float, links: tuple[Link, Link]
) -> float:
    """Seconds of a collective over all ranks at once.

    Args:
        size_bytes: the whole tensor, m.
        per_node: ranks of a node; their mean, where nodes have not as many each.
        links: within a node, and between nodes.
    """
    within, between = links
    num_ranks = nodes * per_node
    if num_ranks == 1:
        return 0.0
    if kind == "send":
        # All ranks of a ring send at once, and wait for the slowest of them.
        return (between if nodes > 1 else within).time_s(1, size_bytes)
    if kind == "all-to-all":
        near = within.time_s(per_node - 1, size_bytes * (per_node - 1) / num_ranks)
        return near + between.time_s((nodes - 1) * per_node, size_bytes * (nodes - 1) / nodes)
    messages_s = (num_ranks - nodes) * within.latency_s + (nodes - 1) * between.latency_s
    if kind == "all-reduce":
        tree_s = 2 * math.log2(num_ranks) * (between if nodes > 1 else within).latency_s
        messages_s = min(2 * messages_s, tree_s)
    sent = sent_bytes(kind, size_bytes, num_ranks)
    inside_s = sent / within.bandwidth_bytes_per_s if per_node > 1 else 0.0
    outside_s = sent / per_node / between.bandwidth_bytes_per_s if nodes > 1 else 0.0
    return messages_s + max(inside_s, outside_s)


def levels_of(
    lines: Sequence[Sequence[int]], ranks_per_node: int
) -> tuple[list[list[int]], list[list[int]]] | None:
    """The ranks of all groups, [groups, ranks], by node, and by the place on their nodes.

    Four ranks a node and the groups 0 1 4 5 and 2 3 6 7: within a node 0 1, 4 5, 2 3 and 6 7, between nodes 0 4, 1 5,
    2 6 and 3 7. None where a group has not several ranks on each of several nodes, and as many on each.
    """
    within, between = list[list[int]](), list[list[int]]()
    for line in lines:
        by_node: dict[int, list[int]] = {}
        for rank in line:
            by_node.setdefault(rank // ranks_per_node, []).append(rank)
        nodes = list(by_node.values())
        if len(nodes) < 2 or len(nodes[0]) < 2 or any(len(node) != len(nodes[0]) for node in nodes):
            return None
        within += nodes
        between += map(list, zip(*nodes, strict=True))
    return within, between


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """The slowest link from a rank of `group` to the next one, while all of them send; equal on all ranks of the job.

    Communication: every rank of the job calls, for a group of its own; `_ROUNDS` messages of 8 bytes and as many of
    4 MiB to the next rank, and an all-reduce over the job for each.
    """
    import torch

    def taken(size_bytes: int) -> tuple[float, float]:
        sent = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)
        return size_bytes, statistics.median(
            measure_rounds(lambda: pass_on(sent, received, group), device, _ROUNDS)
        )

    return Link.through(taken(_SMALL_BYTES), taken(_LARGE_BYTES))


def pass_on(sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> None:
    """Every rank of the group sends to the next one, and gets from the one before."""
    import torch.distributed as dist

    rank, num_ranks = group.rank(), group.size()
    send = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % num_ranks)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % num_ranks)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def measure_rounds(call: Callable[[], object], device: torch.device, num_rounds: int) -> list[float]:
    """For each round the seconds from when the first rank starts to when the last one is done, in order of size.

    Where all ranks share a machine, and so a clock, a rank that waits for a core before it starts does count. On
    several machines it is the slowest rank's own time. Every rank of the job calls, and gets the same numbers.
    """
    import torch
    import torch.distributed as dist

    starts, ends = [], []
    for number in range(num_rounds + 2):  # the first ones open connections
        dist.all_reduce(torch.zeros(1, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        before = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            starts.append(before)
            ends.append(time.perf_counter())
    first = torch.tensor(starts, dtype=torch.float64, device=device)
    last = torch.tensor(ends, dtype=torch.float64, device=device)
    world_size = str(dist.get_world_size())
    if os.environ.get("LOCAL_WORLD_SIZE", world_size) != world_size:
        first, last = torch.zeros_like(first), last - first
    dist.all_reduce(first, dist.ReduceOp.MIN)
    dist.all_reduce(last, dist.ReduceOp.MAX)
    return [float(seconds) for seconds in (last - first).sort().values]
