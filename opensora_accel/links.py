"""What links between ranks carry, measured, and whether a collective in two levels is faster on them.

A message of m bytes takes α + m/β seconds, for a latency α and a bandwidth β (Thakur et al.,
doi:10.1177/1094342005051521). A group has N nodes of L ranks, P = N·L, with a link w within a node and b between nodes.

All-to-all of a tensor of m bytes on each rank. One level: each rank sends to all others. Two levels: within a node
each rank gets all that the others send to its place on any node, and then N ranks exchange L times as much at once.

    one level     (L−1)·αw + (N−1)·L·αb + m·(L−1)/P/βw + m·(N−1)/N/βb
    two levels    (L−1)·αw + (N−1)·αb   + m·(L−1)/L/βw + m·(N−1)/N/βb

Between nodes as many bytes travel, in L times fewer messages. Two levels pay where m/P < αb·βw: where the piece for one
rank is smaller than what a node's link carries during one latency of the network.

All-reduce of m bytes. One level is a ring through all ranks, whose slowest link holds all back. Two levels: a
reduce-scatter within the node, an all-reduce of the 1/L between nodes, and an all-gather within the node.

    one level     2·(P−1)·αb + 2·m·(P−1)/P/βb
    two levels    2·(L−1)·(αw + m/L/βw) + 2·(N−1)·(αb + m/(L·N)/βb)
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

# torch is imported where links are measured: `opensora-accel shard` computes with them in a fraction of its import.
if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_SMALL_BYTES, _LARGE_BYTES = 8, 4 * 2**20
_ROUNDS = 7


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

    def time_s(self, num_messages: float, sent_bytes: float) -> float:
        """Seconds for messages one after another that have so many bytes together."""
        return num_messages * self.latency_s + sent_bytes / self.bandwidth_bytes_per_s


Kind = Literal["all-to-all", "all-reduce"]


def one_level_s(kind: Kind, size_bytes: float, nodes: int, per_node: int, links: tuple[Link, Link]) -> float:
    """Seconds of a collective over all ranks at once; `size_bytes` is the tensor of one rank, `links` are w and b."""
    within, between = links
    num_ranks = nodes * per_node
    if kind == "all-reduce":
        return between.time_s(2 * (num_ranks - 1), 2 * size_bytes * (num_ranks - 1) / num_ranks)
    near = within.time_s(per_node - 1, size_bytes * (per_node - 1) / num_ranks)
    return near + between.time_s((nodes - 1) * per_node, size_bytes * (nodes - 1) / nodes)


def two_levels_s(kind: Kind, size_bytes: float, nodes: int, per_node: int, links: tuple[Link, Link]) -> float:
    """Seconds of the same collective within nodes and then between them."""
    within, between = links
    if kind == "all-reduce":
        near = within.time_s(2 * (per_node - 1), 2 * size_bytes * (per_node - 1) / per_node)
        return near + between.time_s(2 * (nodes - 1), 2 * size_bytes * (nodes - 1) / (nodes * per_node))
    near = within.time_s(per_node - 1, size_bytes * (per_node - 1) / per_node)
    return near + between.time_s(nodes - 1, size_bytes * (nodes - 1) / nodes)


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """The slowest link from a rank of `group` to the next one, while all of them send; equal on all ranks of the job.

    Communication: `_ROUNDS` messages of 8 bytes and as many of 4 MiB to the next rank, and an all-reduce over the job.
    """
    import torch
    import torch.distributed as dist

    nanoseconds = [int(1e9 * _shift_s(group, size, device)) for size in (_SMALL_BYTES, _LARGE_BYTES)]
    slowest = torch.tensor(nanoseconds, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    small_s, large_s = (1e-9 * nanosecond for nanosecond in slowest.tolist())
    # On a machine that does other things a large message may seem the faster one.
    return Link(_LARGE_BYTES / max(large_s - small_s, large_s / 10), small_s)


def _shift_s(group: dist.ProcessGroup, size_bytes: int, device: torch.device) -> float:
    """The median time in which every rank sends so many bytes to the next rank and gets as many."""
    import torch
    import torch.distributed as dist

    rank, num_ranks = group.rank(), group.size()
    sent = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    found = []
    for number in range(_ROUNDS + 2):  # the first ones open connections
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        send = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % num_ranks)
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % num_ranks)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            found.append(time.perf_counter() - start)
    return statistics.median(found)
