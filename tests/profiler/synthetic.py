"""Profiled runs that never ran: files as a run of many ranks writes them, with one thing wrong on purpose.

Ranks are grouped in rings of four that exchange keys and values while they attend; all of them average gradients at the
end. Each has its own clock that a message or a collective holds up, as in a real run, so that one slow rank makes the
others wait. Times are drawn around round numbers, always the same for one seed.
"""

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path

from opensora_accel.observe.kinds import BACKWARD, FORWARD, RECOMPUTE
from opensora_accel.plan import Plan
from opensora_accel.profiler.records import (
    CommunicationCall,
    MaskedAttention,
    MemorySample,
    RecordWriter,
    RunRecord,
    Span,
    StepRecord,
)

CASES = (
    "healthy",
    "slow data",
    "exposed ring",
    "optimizer peak",
    "imbalance",
    "uneven mask",
    "congested link",
    "slow link",
    "all loaders slow",
    "host-bound",
    "tiny messages",
    "fragmentation",
    "after memory",
)
# The rank that a case is about, and its ring neighbour.
BAD_RANK, BAD_PEER = 2, 3

_GIB = 1 << 30
_KEYS_AND_VALUES = 64 << 20
_GRADIENTS = 256 << 20
_LINK = 20e9
# A message of a few bytes, its time, and how many a block's MLP waits for.
_TINY, _TINY_S, _NUM_TINY = 2048, 5e-5, 100
# The step whose memory is followed in a case of its own; it and the next one are slower.
FOLLOWED = 3
# Pairs of queries and keys that the mean rank of a ring has in a block, and the bad one's of them.
_PAIRS, _UNEVEN = 50_000_000, 1.75


@dataclass
class Rank:
    """What one rank has recorded of the step that runs."""

    number: int
    now: float = 0.0
    spans: list[Span] = field(default_factory=list)
    calls: list[CommunicationCall] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    # Kinds of memory that change.
    block_inputs: int = 0
    on_the_host: int = 0
    gradients: int = 0
    recomputation: int = 0
    is_in_pieces: bool = False

    def take(self, seconds: float, region: str, name: str = "", phase: str = "") -> None:
        self.spans.append(Span(region, name, phase, self.now, self.now + seconds))
        self.now += seconds

    def sample(self, other: int = _GIB // 4) -> None:
        self.memory.append(
            MemorySample(
                self.now,
                {
                    "parameters": _GIB,
                    "gradients": self.gradients,
                    "optimizer state": 2 * _GIB,
                    "block inputs": self.block_inputs,
                    "block inputs on the host": self.on_the_host,
                    "recomputation": self.recomputation,
                    "communication": 2 * _KEYS_AND_VALUES,
                    "other": other,
                },
                reserved_bytes=12 * _GIB,
                fragmented_bytes=3 * _GIB if self.is_in_pieces else _GIB // 8,
            )
        )


def write_run(
    folder: Path,
    case: str = "healthy",
    num_ranks: int = 8,
    num_steps: int = 6,
    num_blocks: int = 4,
    flops: bool = True,
    seed: int = 0,
) -> Path:
    """Writes the files of a run in which one thing is wrong (`CASES`), and returns the folder."""
    assert case in CASES, case
    random_ = random.Random(seed)
    ring = 4 if num_ranks % 4 == 0 else num_ranks
    ranks = [Rank(number, is_in_pieces=case == "fragmentation") for number in range(num_ranks)]
    # Machines of eight ranks; where the network is congested, neighbours are on two.
    host_of = (lambda number: number % 2) if case == "congested link" else (lambda number: number // 8)
    writers = [
        RecordWriter(folder, _run(rank.number, num_ranks, ring, num_blocks, flops, host_of(rank.number)))
        for rank in ranks
    ]
    for step in range(num_steps):
        starts = [rank.now for rank in ranks]
        for rank in ranks:
            rank.spans, rank.calls, rank.memory = [], [], []
        slowed_by = ""
        if case == "after memory" and step in (FOLLOWED, FOLLOWED + 1):
            slowed_by = "memory" if step == FOLLOWED else "memory or a trace in the step before"
        _Step(case, ranks, ring, num_blocks, random_, slow=4.0 if step == 0 or slowed_by else 1.0).run()
        for rank, start, writer in zip(ranks, starts, writers, strict=True):
            metrics = {"loss": 1.5 / (1 + 0.1 * step) + random_.gauss(0, 0.01), "tokens": 18900.0}
            attention = _attention(rank, ring, num_blocks) if case == "uneven mask" else []
            writer.step(
                StepRecord(
                    step,
                    start,
                    rank.now,
                    metrics,
                    rank.spans,
                    rank.calls,
                    rank.memory,
                    attention,
                    _starved(rank, case),
                    slowed_by,
                )
            )
    for writer in writers:
        writer.close()
    return folder


def _starved(rank: Rank, case: str) -> list[tuple[float, float]]:
    """Of a device that is ahead of its host the MLPs; in any case what it waits for clips."""
    regions = ("data", "mlp", "optimizer") if case == "host-bound" else ("data",)
    return [(span.start_s, span.end_s) for span in rank.spans if span.region in regions]


def _attention(rank: Rank, ring: int, num_blocks: int) -> list[MaskedAttention]:
    """A mask of which one rank has too much, and its ring's others too little."""
    beside = (ring - _UNEVEN) / (ring - 1) if rank.number // ring == BAD_RANK // ring else 1.0
    share = _UNEVEN if rank.number == BAD_RANK else beside
    pairs = round(share * _PAIRS * num_blocks)
    return [MaskedAttention("a causal mask", num_blocks, pairs, float(_PAIRS * num_blocks))]


def _run(number: int, num_ranks: int, ring: int, num_blocks: int, flops: bool, host: int) -> RunRecord:
    first = number // ring * ring
    return RunRecord(
        rank=number,
        world_size=num_ranks,
        coordinates={"dp_replicate": number // ring, "ring": number % ring},
        groups={"ring": list(range(first, first + ring)), "mixed": list(range(num_ranks))},
        plan=Plan(dp_replicate=num_ranks // ring, ring=ring, checkpoint="full", offload=0.5).to_dict(),
        model={"class": "SyntheticTransformer", "num_parameters": 268435456, "num_blocks": num_blocks},
        environment={
            "host": f"node{host}",
            "device": "none: synthetic",
            "torch": "2.13",
            "backend": "none",
        },
        model_flops=3e14 if flops else None,
        hardware_flops=4e14 if flops else None,
        peak_flops=9.89e14 if flops else None,
        peak_flops_source="data sheet, bf16 dense" if flops else "",
        link_bytes_per_s={"ring": _LINK, "mixed": _LINK},
        clock_error_s=2e-5,
        started_at=1.79e9,
    )


@dataclass
class _Step:
    case: str
    ranks: list[Rank]
    ring: int
    num_blocks: int
    random: random.Random
    slow: float
    _tiny_start: float = 0.0

    def run(self) -> None:
        for rank in self.ranks:
            is_late = self.case == "all loaders slow" or (
                self.case == "slow data" and rank.number == BAD_RANK
            )
            late = 0.3 if is_late else 0.0
            rank.take(self._about(0.01) + late, "data")
            rank.sample()
        for block in range(self.num_blocks):
            self._block(f"blocks.{block}", FORWARD, 1.0)
            for rank in self.ranks:
                if block < self.num_blocks // 2:
                    rank.take(self._about(0.002), "copy out", f"blocks.{block}")
                    rank.on_the_host += _GIB // 8
                else:
                    rank.block_inputs += _GIB // 8
                rank.sample()
        for block in reversed(range(self.num_blocks)):
            for rank in self.ranks:
                if block < self.num_blocks // 2:
                    rank.take(self._about(0.002), "copy in", f"blocks.{block}")
                    rank.on_the_host -= _GIB // 8
                    rank.block_inputs += _GIB // 8
                rank.recomputation = _GIB // 2
            self._block(f"blocks.{block}", RECOMPUTE, 1.0)
            for rank in self.ranks:
                rank.sample()
            self._block(f"blocks.{block}", BACKWARD, 2.0)
            for rank in self.ranks:
                rank.gradients += _GIB // self.num_blocks
                rank.block_inputs -= _GIB // 8
                rank.sample()
                rank.recomputation = 0
        self._all_reduce()
        for rank in self.ranks:
            rank.sample()
            peak = _GIB * 2 if self.case == "optimizer peak" else _GIB // 4
            rank.take(self._about(0.01), "optimizer", "first half")
            rank.sample(peak)
            rank.take(self._about(0.01), "optimizer", "second half")
            rank.gradients = 0
            rank.sample()
            rank.now += self._about(0.002)

    def _block(self, name: str, phase: str, times: float) -> None:
        starts = [rank.now for rank in self.ranks]
        for rank in self.ranks:
            rank.now += self._about(0.001)
        attention_starts = [rank.now for rank in self.ranks]
        for _ in range(self.ring - 1):
            self._exchange(times)
        for rank, start, attention_start in zip(self.ranks, starts, attention_starts, strict=True):
            rank.spans.append(Span("attention", f"{name}.attn1", phase, attention_start, rank.now))
            if self.case == "tiny messages":
                self._tiny_messages(rank)
            rank.take(self._about(0.02) * times * self._share(rank), "mlp", f"{name}.ffn", phase)
            rank.spans.append(Span("block", name, phase, start, rank.now))

    def _exchange(self, times: float) -> None:
        """Every rank sends keys and values on while it attends to those that it has, and waits for the next ones."""
        starts = [rank.now for rank in self.ranks]
        arrived = []
        for rank in self.ranks:
            target = self._neighbour(rank.number, 1)
            seconds = _KEYS_AND_VALUES / _LINK * (4.0 if self.case == "exposed ring" else 1.0)
            if (
                self.case in ("congested link", "slow link")
                and rank.number == BAD_RANK
                and target == BAD_PEER
            ):
                seconds *= 6
            arrived.append(max(starts[rank.number], starts[target]) + self._about(seconds))
        for rank in self.ranks:
            attended = (
                _UNEVEN if self.case == "uneven mask" and rank.number == BAD_RANK else self._share(rank)
            )
            computed = starts[rank.number] + self._about(0.008) * times * attended
            source = self._neighbour(rank.number, -1)
            done = max(computed, arrived[source], arrived[rank.number])
            for kind, end, sent in (("send", arrived[rank.number], True), ("recv", arrived[source], False)):
                exposed = max(0.0, end - computed)
                to = {self._neighbour(rank.number, 1): _KEYS_AND_VALUES} if sent else {}
                of = {} if sent else {source: _KEYS_AND_VALUES}
                rank.calls.append(
                    CommunicationCall(
                        kind, "ring", "ring", starts[rank.number], end, exposed, sum(to.values()), to, of
                    )
                )
            rank.now = done

    def _tiny_messages(self, rank: Rank) -> None:
        """Sums of a few numbers, each of which is waited for; nobody comes late to them."""
        group = [other.number for other in self.ranks]
        start = max(other.now for other in self.ranks) if rank is self.ranks[0] else self._tiny_start
        self._tiny_start = rank.now = start
        to = {number: _TINY for number in group if number != rank.number}
        for _ in range(_NUM_TINY):
            begin, rank.now = rank.now, rank.now + _TINY_S
            rank.calls.append(
                CommunicationCall(
                    "all-reduce", "mixed", "mixed", begin, rank.now, _TINY_S, sum(to.values()), to
                )
            )

    def _all_reduce(self) -> None:
        come = max(rank.now for rank in self.ranks)
        done = come + self._about(_GRADIENTS * 1.75 / _LINK / 4)
        for rank in self.ranks:
            others = {
                other.number: _GRADIENTS // len(self.ranks) for other in self.ranks if other is not rank
            }
            rank.calls.append(
                CommunicationCall(
                    "all-reduce",
                    "mixed",
                    "mixed",
                    rank.now,
                    done,
                    done - rank.now,
                    sum(others.values()),
                    others,
                )
            )
            rank.now = done

    def _neighbour(self, number: int, hops: int) -> int:
        first = number // self.ring * self.ring
        return first + (number - first + hops) % self.ring

    def _share(self, rank: Rank) -> float:
        """Of the tokens."""
        return 1.5 if self.case == "imbalance" and rank.number == BAD_RANK else 1.0

    def _about(self, seconds: float) -> float:
        return seconds * self.slow * self.random.uniform(0.98, 1.02)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", choices=CASES, default="healthy")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args()
    write_run(options.folder, options.case, options.ranks, options.steps, options.blocks)
