"""Times compressed and two-level collectives beside the plain ones, counts their bytes, and simulates real links.

Claim: each sends exactly the bytes that docs/collectives.md states: half of fp32 for sums in bf16, 132/256 of bf16 for
weights in int8 or fp8, and in two levels as many between nodes as in one. That a time gets shorter is not claimed
here: the ranks of one machine have no slow link between them, so what is measured is the price of compressing and of
copying. What it is to buy is simulated by the formulas of `links.py` and `by_node.py`, for links that are named,
without the time of compressing; those columns are called simulated.

Claim, on a GPU, for one rank alone: what was gathered comes out of its messages at 85 % of the bandwidth of a copy or
more, in less time than torch's operations take. Cases named unpack need no other rank; the others are left out where
`--only` names them alone.

Before the clock starts, each side's result must be within its bound of the plain one's; of unpacking, the same bits.

    python tools/bench/compressed.py --ranks 4 --megabytes 16
    python tools/bench/compressed.py --device cuda --only unpack        # one GPU
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist
from harness import Report, make_claim, make_table
from ranks import Job, World, count_traffic, run_tasks
from torch import Tensor

from opensora_accel.communications import transport
from opensora_accel.experiments import by_node
from opensora_accel.experiments.by_node import Nodes, two_levels_s
from opensora_accel.experiments.compressed import WIRE_DTYPES, CompressedShards, RoundedSum
from opensora_accel.links import Link, levels_of, one_level_s

PER_NODE = 2
# What is simulated: the bytes of a rank's tensor; and by name nodes, ranks of each, and the links of one rank within
# a node and between nodes.
SIMULATED_BYTES = 256 * 2**20
CLUSTERS = {
    "8 × 8, 200 Gb/s a rank": (8, 8, (Link(300e9, 3e-6), Link(25e9, 20e-6))),
    "8 × 8, 12.5 Gb/s a rank": (8, 8, (Link(300e9, 3e-6), Link(1.5625e9, 50e-6))),
}
CASES = (
    *("reduce-scatter bf16", "all-reduce bf16", "all-gather int8", "all-gather fp8"),
    *("all-to-all by node", "all-reduce by node", "all-to-all by node, 16 KiB"),
)
# What unpacks a block of Wan-14B that 8 ranks hold: the linear layers' weights, by their numbers of elements.
UNPACKED = {"unpack int8": "int8", "unpack fp8": "fp8"}
UNPACKED_RANKS = 8
UNPACKED_NUMELS = [5120 * 5120] * 8 + [5120 * 13824] * 2
LEAST_SHARE = 0.85

Sides = tuple[Callable[[], Tensor], Callable[[], Tensor], float, dict[str, float]]


def make_sides(world: World, name: str, size_bytes: int) -> Sides:
    """Plain, ours, the bound of their difference as a share of the largest, and the bytes of theory.

    Sums are of fp32, gathered weights are bf16, and what is exchanged is bf16.
    """
    group, num_ranks = world.group, world.num_ranks
    others = num_ranks - 1
    generator = torch.Generator().manual_seed(world.rank)  # of what is drawn on the host
    kind, _, how = name.partition(" ")
    if how.endswith("16 KiB"):
        size_bytes = 16 * 2**10
    if kind == "all-gather":
        shard = torch.randn(size_bytes // 2 // num_ranks // 128 * 128, generator=generator).to(
            world.device, torch.bfloat16
        )
        shards = CompressedShards([shard.numel()], [False], shard.dtype, WIRE_DTYPES[how])

        def gather() -> Tensor:
            found = shard.new_empty(num_ranks * shard.numel())
            transport.all_gather(found, shard, group)
            return found

        def gather_compressed() -> Tensor:
            message, found = shards.pack(shard), shard.new_empty(num_ranks, shard.numel())
            messages = message.new_empty(num_ranks * message.numel())
            transport.all_gather(messages, message, group)
            shards.unpack(messages.view(num_ranks, -1), found)
            return found.flatten()

        bytes_of = {"plain": shard.nbytes * others, "ours": shard.numel() * 132 // 128 * others}
        return gather, gather_compressed, 1 / 254 + 2**-8 if how == "int8" else 1 / 16 + 2**-8, bytes_of
    if kind == "all-to-all":
        sent = torch.randn(size_bytes // 2, generator=generator).to(world.device, torch.bfloat16)
        per_node, num_nodes = PER_NODE, num_ranks // PER_NODE
        away = {"plain": sent.nbytes * others / num_ranks}
        away["ours"] = sent.nbytes * ((per_node - 1) / per_node + (num_nodes - 1) / num_nodes)
        return (
            partial(by_node.exchange, sent, group),
            in_two_levels(world, partial(by_node.exchange, sent)),
            0.0,
            away,
        )
    numbers = torch.randn(size_bytes // 4, generator=generator).to(world.device)
    sums = RoundedSum()
    if kind == "reduce-scatter":

        def scatter(reduce: Callable[..., None]) -> Tensor:
            found = numbers.new_empty(numbers.numel() // num_ranks)
            reduce(found, numbers.clone(), group)
            return found

        bytes_of = {
            "plain": numbers.nbytes * others / num_ranks,
            "ours": numbers.nbytes / 2 * others / num_ranks,
        }
        return (
            partial(scatter, transport.reduce_scatter),
            partial(scatter, sums.reduce_scatter),
            0.05,
            bytes_of,
        )

    def reduce(reduce_: Callable[[Tensor, dist.ProcessGroup], None], group: dist.ProcessGroup) -> Tensor:
        found = numbers.clone()
        reduce_(found, group)
        return found

    plain = partial(reduce, transport.all_reduce_, group)
    bytes_of = {"plain": 2 * numbers.nbytes * others / num_ranks}
    if how == "bf16":
        return (
            plain,
            partial(reduce, sums.all_reduce_, group),
            0.05,
            bytes_of | {"ours": bytes_of["plain"] / 2},
        )
    in_levels = partial(reduce, partial(by_node.all_reduce_, sum_=transport.all_reduce_))
    num_nodes = num_ranks // PER_NODE
    near = 2 * numbers.nbytes * (PER_NODE - 1) / PER_NODE
    bytes_of["ours"] = near + 2 * numbers.nbytes / PER_NODE * (num_nodes - 1) / num_nodes
    return plain, in_two_levels(world, in_levels), 1e-5, bytes_of


def in_two_levels(world: World, function: Callable[[dist.ProcessGroup], Tensor]) -> Callable[[], Tensor]:
    """The same over nodes of `PER_NODE` ranks."""
    levels = levels_of([range(world.num_ranks)], PER_NODE)
    assert levels is not None
    own = [next(line for line in lines if world.rank in line) for lines in levels]
    within, between = (dist.new_group(ranks, use_local_synchronization=True) for ranks in own)
    nodes = Nodes(within, between, None)

    def run() -> Tensor:
        with mock.patch.object(by_node, "get_nodes", lambda _group: nodes):
            return function(world.group)

    return run


def run_task(world: World, task: Mapping[str, Any]) -> dict[str, Any]:
    """Measures one case: difference, bytes, and the times of both ways."""
    plain, ours, bound, theory = make_sides(world, task["label"], task["size_bytes"])
    expected = plain().float()
    difference = ((ours().float() - expected).abs().max() / expected.abs().max()).item()
    if difference > bound:
        raise ValueError(f"off by {difference:.3g} of the largest, where {bound:.3g} is the bound")
    sides = {"plain": plain, "ours": ours}
    sent = {name: [count_traffic(side)["sent_bytes"]] for name, side in sides.items()}
    busiest = {f"{name}_sent_bytes": int(value) for name, (value,) in world.largest(sent).items()}
    turns = {name: partial(harness.time_ms, side, world.device) for name, side in sides.items()}
    times = world.largest(harness.take_turns(turns, task["rounds"]))
    return {
        "case": task["label"],
        "difference": difference,
        **busiest,
        "bytes_match": all(busiest[f"{name}_sent_bytes"] == int(theory[name]) for name in sides),
        "ratio": harness.ratios(times["plain"], times["ours"]),
        "times_ms": {name: harness.spread(values) for name, values in times.items()},
        "simulated": {
            name: simulated(task["label"], SIMULATED_BYTES, *cluster) for name, cluster in CLUSTERS.items()
        },
    }


def simulated(
    name: str, size_bytes: float, nodes: int, per_node: int, links: tuple[Link, Link]
) -> dict[str, float]:
    """Milliseconds of the transfers alone, by the formulas of `links.py` and `by_node.py`."""
    kind: Any
    kind, _, how = name.partition(" ")
    if how.startswith("by node"):
        size_bytes = 16 * 2**10 if how.endswith("16 KiB") else size_bytes
        ours_s = two_levels_s(kind, size_bytes, nodes, per_node, links)
    else:
        share = 132 / 256 if kind == "all-gather" else 0.5
        ours_s = one_level_s(kind, share * size_bytes, nodes, per_node, links)
    plain_s = one_level_s(kind, size_bytes, nodes, per_node, links)
    return {"plain_ms": plain_s * 1e3, "ours_ms": ours_s * 1e3, "ratio": plain_s / ours_s}


def measure_unpacking(name: str, device: torch.device, options: Any, copied: float | None) -> dict[str, Any]:
    """The times of both ways to unpack what 8 ranks sent, and the kernel's share of a copy's bandwidth.

    Without a GPU torch's operations run on both sides, and nothing is to be learnt from their times.
    """
    small = 64 if options.quick else 1
    numels = [numel // small // UNPACKED_RANKS for numel in UNPACKED_NUMELS]
    shards = CompressedShards(numels, [False] * len(numels), torch.bfloat16, WIRE_DTYPES[UNPACKED[name]])
    message = shards.pack(torch.randn(sum(numels), device=device, dtype=torch.bfloat16))
    messages = message.repeat(UNPACKED_RANKS, 1)
    found, expected = (message.new_empty(UNPACKED_RANKS, sum(numels), dtype=torch.bfloat16) for _ in range(2))
    shards.unpack(messages, found)
    shards.unpack_by_operations(messages, expected)
    if not torch.equal(found, expected):
        raise ValueError(f"{name}: the kernel gives other bits than torch's operations")
    clocks = {
        "plain": harness.clock(partial(shards.unpack_by_operations, messages, expected), device),
        "ours": harness.clock(partial(shards.unpack, messages, found), device),
    }
    times = harness.take_turns({side: partial(clock, 1) for side, clock in clocks.items()}, options.rounds)
    row = {
        "case": name,
        "weights": found.numel(),
        "ratio": harness.ratios(times["plain"], times["ours"]),
        "times_ms": {side: harness.spread(values) for side, values in times.items()},
    }
    if copied:
        moved = messages.nbytes + found.nbytes
        row["share_of_copy_bandwidth"] = moved / (row["times_ms"]["ours"]["median"] / 1e3) / copied
    return row


def claims_of_unpacking(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The slower of int8 and fp8 decides; without a GPU, nothing."""
    on_gpu = [row for row in rows if "share_of_copy_bandwidth" in row]
    share = min((row["share_of_copy_bandwidth"] for row in on_gpu), default=None)
    ratio = min((row["ratio"]["median"] for row in on_gpu), default=None)
    return [
        make_claim("unpack: share of a copy's bandwidth", share, "at least", LEAST_SHARE),
        make_claim("unpack: time of torch's operations over the kernel's", ratio, "above", 1.0),
    ]


MEASURED = {
    "case": "case",
    "ours ms": "times_ms.ours",
    "plain ms": "times_ms.plain",
    "plain over ours": "ratio",
    "sent MiB": "ours_sent_bytes",
    "plain MiB": "plain_sent_bytes",
    "bytes match": "bytes_match",
}


UNPACKING = {
    "case": "case",
    "weights": "weights",
    "kernel ms": "times_ms.ours",
    "operations ms": "times_ms.plain",
    "operations over kernel": "ratio",
    "of a copy": "share_of_copy_bandwidth",
}


def named(cases: Iterable[str], part: str) -> list[str]:
    """Those with this part in their names."""
    return [name for name in cases if part in name]


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 where a result is beyond its bound, bytes are not those of theory, or a case fails."""
    parser = harness.make_parser("compressed", __doc__, rounds=15)
    parser.add_argument("--ranks", type=int, nargs=1, default=[4], help="processes to start (default: 4)")
    parser.add_argument("--megabytes", type=float, default=16, help="bytes of a rank's tensor (default: 16)")
    usual = {"quick": {"megabytes": 1, "rounds": 3}}
    options = harness.parse_options(parser, arguments, usual, lambda given: not named(CASES, given.only))
    (num_ranks,) = options.ranks
    if num_ranks % PER_NODE or num_ranks == PER_NODE:
        parser.error(f"--ranks must be several nodes of {PER_NODE}: 4, 6, …; got {num_ranks}")
    chosen, unpacked = named(CASES, options.only), named(UNPACKED, options.only)
    if not chosen and not unpacked:
        names = "; ".join((*CASES, *UNPACKED))
        parser.error(f"--only {options.only!r} is in no case's name; they are {names}")
    if options.device == "cpu" and not options.quick:
        # Torch's operations would run on both sides, of a GPU's sizes.
        unpacked = []
        if not chosen:
            parser.error("unpacking is timed on a GPU: add --device cuda, or --quick to see that it runs")
    report, device = Report(options), torch.device(options.device)
    rows, claims, wrong = list[dict[str, Any]](), list[dict[str, Any]](), 0
    if unpacked:
        copied = harness.copy_bytes_per_s(device) if device.type == "cuda" else None
        rows = [measure_unpacking(name, device, options, copied) for name in unpacked]
        claims += claims_of_unpacking(rows)
        report.show(make_table("Weights out of 8 ranks' messages, on one device", UNPACKING, rows))
    outcomes = []
    if chosen:
        backend = "nccl" if device.type == "cuda" else "gloo"
        report.result |= {"ranks": num_ranks, "backend": backend, "megabytes": options.megabytes}
        common = {"size_bytes": int(options.megabytes * 2**20), "rounds": options.rounds}
        tasks = [{"label": name, **common} for name in chosen]
        outcomes = run_tasks(Job("compressed", num_ranks, options.device), tasks)
        results = [outcome.found for outcome in outcomes if outcome.status == "done"]
        wrong = sum(not row["bytes_match"] for row in results)
        claims.append(make_claim("cases that send other bytes than theory", float(wrong), "exactly", 0))
        report.show(make_table("Measured on this machine, in turns", MEASURED, results))
        for name in CLUSTERS:
            columns = {
                "case": "case",
                "ours ms": "ours_ms",
                "plain ms": "plain_ms",
                "plain over ours": "ratio",
            }
            of_cluster = [{"case": row["case"], **row["simulated"][name]} for row in results]
            title = f"SIMULATED: transfers alone, of 256 MiB a rank, {name}"
            report.show(make_table(title, columns, of_cluster))
        rows += results
    report.result |= {"results": rows, "claims": claims}
    report.finish()
    failed = [(name, found) for name, found in zip(chosen, outcomes, strict=True) if found.status != "done"]
    for name, outcome in failed:
        print(f"error: {name} {outcome.status}: {outcome.reason}", file=sys.stderr)
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
