"""Ranks together on this machine: collectives, and how ranks slow each other down, for `calibrate`."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from opensora_accel.communications import transport
from opensora_accel.links import Kind, Link, measure_link, measure_rounds, pass_on, sent_bytes

ROUNDS = 9
_MESSAGE_BYTES = (64, 2**16, 2**20, 2**23)


@dataclass(frozen=True)
class Places:
    """Where this rank stands: consecutive ranks fill a node, as launchers start them."""

    nodes: int
    per_node: int
    # On its node.
    place: int

    @classmethod
    def now(cls) -> Places:
        world = dist.get_world_size()
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        return cls(world // per_node, per_node, dist.get_rank() % per_node)

    def numbers(self) -> list[int]:
        """How many ranks of a node are tried at once: each number up to 8, and all."""
        return [number for number in range(1, self.per_node + 1) if number <= 8 or number == self.per_node]

    def group(self, size: int, busy: int) -> dist.ProcessGroup | None:
        """This rank's among groups of consecutive ranks that the first `busy` of each node form."""
        mine = None
        for first in range(0, self.nodes * self.per_node, self.per_node):
            for start in range(first, first + busy, size):
                ranks = range(start, start + size)
                made = dist.new_group(list(ranks))
                mine = made if dist.get_rank() in ranks else mine
        return mine


def between_nodes(device: torch.device) -> Link | None:
    """The link from a rank to the one in its place on the next node; None on a single node."""
    places = Places.now()
    if places.nodes == 1:
        return None
    lines = [range(place, dist.get_world_size(), places.per_node) for place in range(places.per_node)]
    made = [dist.new_group(list(ranks)) for ranks in lines]
    return measure_link(made[places.place], device)


def collectives(device: torch.device) -> dict[str, tuple[tuple[float, float], ...]]:
    """Each kind, in groups of each size on a node, for each number of its ranks that are busy at once."""
    places, points_of = Places.now(), {}
    for busy in places.numbers():
        for size in [number for number in range(2, busy + 1) if busy % number == 0]:
            mine = places.group(size, busy)
            for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"):
                points = [_message(kind, message, size, mine, device) for message in _MESSAGE_BYTES]
                # A larger message is not faster: where it seems so, something else ran beside it.
                seconds = list(itertools.accumulate((taken for _sent, taken in points), max))
                points_of[f"{kind} {size}/{busy}"] = tuple(
                    (sent, taken) for (sent, _), taken in zip(points, seconds, strict=True)
                )
    return points_of


def _message(
    kind: Kind, size_bytes: int, num_ranks: int, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[float, float]:
    """What a rank sends, and the usual seconds of the slowest rank; one without a group waits for the others."""
    count = max(1, size_bytes // 4 // num_ranks) * num_ranks
    x, y = torch.zeros(count, device=device), torch.zeros(count, device=device)
    part = x[: count // num_ranks].clone()

    def call() -> None:
        if group is None:
            return
        if kind == "all-reduce":
            transport.all_reduce_(x, group)
        elif kind == "all-gather":
            transport.all_gather(y, part, group)
        elif kind == "reduce-scatter":
            transport.reduce_scatter(part, y, group)
        elif kind == "all-to-all":
            transport.all_to_all_single(y, x, group)
        else:
            pass_on(x, y, group)

    return sent_bytes(kind, 4 * count, num_ranks), _usual(measure_rounds(call, device, 3 * ROUNDS))


def beside_others(step: Callable[[], object]) -> tuple[dict[str, float], dict[str, Any], dict[int, float]]:
    """What becomes of a rank where so many compute on one machine.

    Returns:
        how many times longer a rank's step takes, by the number of ranks; (seconds of compute since ranks met, seconds
        by which the last one comes later than a rank on average), by the same; and by how much the middle half of the
        rounds of the first goes up or down.
    """
    places = Places.now()
    medians_s, lateness, spreads = {}, {}, {}
    for busy in places.numbers():
        is_busy, group = places.place < busy, places.group(busy, busy)
        rounds_s = _own_rounds_s(step if is_busy else _nothing, busy, ROUNDS)
        low_s, medians_s[busy], high_s = statistics.quantiles(rounds_s, n=4)
        spreads[busy] = (high_s - low_s) / medians_s[busy] / 2
        if busy > 1:
            lateness[str(busy)] = _late_points(busy, group)
    crowding = {str(busy): max(1.0, seconds / medians_s[1]) for busy, seconds in medians_s.items()}
    return crowding, lateness, spreads


def _late_points(busy: int, group: dist.ProcessGroup | None) -> tuple[tuple[float, float], ...]:
    """(Seconds of compute since ranks met, seconds by which the last comes later); ranks without a group do nothing."""
    matrix, both = torch.randn(512, 512), torch.zeros(2, busy)

    def call(times: int, *, meets: bool) -> None:
        if group is None:
            return
        for _ in range(times):
            matrix @ matrix
        if meets:
            transport.all_to_all_single(both[0], both[1], group)

    def usual_s(times: int, rounds: int, *, meets: bool) -> float:
        return _usual(_own_rounds_s(partial(call, times, meets=meets), busy, rounds))

    meet_s = usual_s(0, 4 * ROUNDS, meets=True)
    since_s, late_s = [], []
    for times, rounds in ((1, 8 * ROUNDS), (4, 6 * ROUNDS), (16, 3 * ROUNDS), (64, 2 * ROUNDS)):
        alone_s, together_s = (usual_s(times, rounds, meets=meets) for meets in (False, True))
        since_s.append(alone_s)
        late_s.append(max(1e-7, together_s - alone_s - meet_s))
    # More compute makes nobody come earlier: where it seems so, something else ran beside it.
    return tuple(zip(since_s, itertools.accumulate(late_s, max), strict=True))


def _nothing() -> None:
    pass


def _usual(rounds_s: Sequence[float]) -> float:
    """The mean without the slowest tenth: what a step of many of them takes, where nothing else runs beside it."""
    return statistics.fmean(sorted(rounds_s)[: max(1, len(rounds_s) * 9 // 10)])


def _own_rounds_s(call: Callable[[], object], busy: int, num_rounds: int) -> list[float]:
    """For each round what a call takes a rank, the mean of the first `busy` ones of each node; all start together."""
    places = Places.now()
    rounds_s = torch.zeros(num_rounds + 2, dtype=torch.float64)
    for number in range(num_rounds + 2):
        dist.barrier()
        before = time.perf_counter()
        call()
        rounds_s[number] = time.perf_counter() - before
    if places.place >= busy:
        rounds_s.zero_()
    dist.all_reduce(rounds_s)
    return [float(seconds) / (busy * places.nodes) for seconds in rounds_s[2:]]


def beside_collective() -> float:
    """How many times longer compute takes while collectives run, which need cores too.

    Ten products of 24 ms beside ten messages of 6 ms end after 28 ms: 2 ms of the messages were hidden. Had compute not
    been slower beside them, they had been hidden whole. In their 6 ms the work of 2 ms was done: 3 times.
    """
    places, matrix = Places.now(), torch.randn(512, 512)
    sent, received = torch.zeros(2**18), torch.zeros(2**18)
    node = places.group(places.per_node, places.per_node)
    assert node is not None

    def run(*, compute: bool, send: bool) -> None:
        for _ in range(10):
            works = transport.start_shift(sent, received, node, operation="calibrate") if send else []
            if compute:
                matrix @ matrix
            transport.finish(works, node, sent.device, operation="calibrate")

    compute_s, messages_s, both_s = (
        statistics.median(_own_rounds_s(partial(run, compute=compute, send=send), places.per_node, ROUNDS))
        for compute, send in ((True, False), (False, True), (True, True))
    )
    hidden_s = compute_s + messages_s - both_s
    # Where messages take longer than compute, only its time can hide them.
    return max(1.0, min(compute_s, messages_s) / max(hidden_s, messages_s / 20))
