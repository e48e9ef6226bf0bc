"""Times this toolkit's collectives beside Open-Sora's scheme, and counts the bytes that each puts on the wire.

Claim: an all-to-all of one tensor of 64 MB per rank on two gloo ranks of one machine is at least 1.5 times faster
than cutting it into a list, `dist.all_to_all`, and concatenating (Open-Sora's scheme). Our result is made contiguous
within the time, because it may be a strided view where the peer's never is. And every operation sends what theory
says it must, and not a byte more.

Outside the claim, because there is no such peer: where pieces differ in size gloo's list `all_to_all` raises, so
Open-Sora's scheme does not run on it, and "plain" sends the pieces one by one (isend and irecv). The three tensors of
`all_to_all_packed` are measured too, against three list all-to-alls; and split, gather and ring exchange, for sizes
that divide and that do not, against the plain way to write them.

Before the clock starts, each side's result and gradient must equal the other's bit for bit, and one run is counted:
the bytes in every c10d call, on the busiest rank (sizes that a call exchanges by itself are counted apart). In the
table "ratio" is plain over ours; above 1, ours is faster.

    python tools/bench/collectives.py --only all_to_all --ranks 4 --megabytes 16
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import torch
from harness import Report, make_claim, make_table
from peers.open_sora import plain_all_to_all, plain_gather, plain_ring, plain_split
from ranks import Job, World, count_traffic, run_tasks
from torch import Tensor

from opensora_accel.communications import (
    all_to_all,
    all_to_all_packed,
    gather_forward_split_backward,
    ring_exchange,
    share_sizes,
    split_forward_gather_backward,
)

LEAST_RATIO = 1.5
HEAD_DIM = 128

Operation = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Setting:
    """What a case is made from; plain data, which the launcher makes and the ranks read."""

    operation: str
    dtype: str = "bfloat16"
    heads: int = 24
    batch: int = 1
    scatter_dim: int = 2
    uneven: bool = False
    backward: bool = False

    def name(self, num_ranks: int) -> str:
        short = {"bfloat16": "bf16", "float32": "fp32"}[self.dtype]
        parts = [self.operation, f"B{self.batch} H{self.heads} {short}"]
        if self.operation == "all_to_all":
            parts[0] += f" scatter {self.scatter_dim} gather {3 - self.scatter_dim}"
        if self.is_uneven(num_ranks):
            parts.append("uneven")
        if self.backward:
            parts.append("forward+backward")
        return ", ".join(parts)

    def is_uneven(self, num_ranks: int) -> bool:
        return self.uneven or (self.operation.startswith("all_to_all") and self.heads % num_ranks != 0)


SETTINGS = (
    Setting("all_to_all", "float32", 32),
    Setting("all_to_all", heads=32),
    Setting("all_to_all", heads=32, scatter_dim=1),
    Setting("all_to_all", heads=32, batch=2),
    Setting("all_to_all", heads=32, batch=2, scatter_dim=1),
    Setting("all_to_all", uneven=True),
    Setting("all_to_all", uneven=True, scatter_dim=1),
    Setting("all_to_all", heads=25),
    Setting("all_to_all", heads=32, backward=True),
    Setting("all_to_all_packed q, k, v"),
    Setting("split", backward=True),
    Setting("split", backward=True, uneven=True),
    Setting("gather", backward=True),
    Setting("gather", backward=True, uneven=True),
    Setting("ring_exchange"),
    Setting("ring_exchange", uneven=True),
)


@dataclass(frozen=True)
class Case:
    """One operation on one layout, in two ways; both take the same inputs and give the same outputs."""

    inputs: list[Tensor]
    ours: Operation
    plain: Operation
    theory_bytes: int


def make_case(world: World, setting: Setting, size_bytes: int) -> Case:
    """The inputs of one rank, of about `size_bytes` in all, and the two ways."""
    rank, ranks, dtype = world.rank, world.num_ranks, getattr(torch, setting.dtype)
    generator = torch.Generator(world.device).manual_seed(rank)

    def draw(*shape: int) -> Tensor:
        tensor = torch.randn(shape, dtype=dtype, device=world.device, generator=generator)
        return tensor.requires_grad_(setting.backward)

    # Of the three tensors that travel packed each is a third; what is split or gathered is that large as a whole.
    parts = {"all_to_all": 1, "ring_exchange": 1, "split": ranks, "gather": ranks}
    size_bytes //= parts.get(setting.operation, 3)
    width = setting.heads * HEAD_DIM
    tokens = ranks * max(ranks, size_bytes // (setting.batch * width * dtype.itemsize)) - setting.uneven
    shares = share_sizes(tokens, ranks)
    if not setting.operation.startswith("all_to_all"):
        dim = 1 if setting.uneven else None
        ways: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
            "split": (lambda x: split_forward_gather_backward(x, None, 1, None), plain_split),
            "gather": (lambda x: gather_forward_split_backward(x, None, 1, None), plain_gather),
            "ring_exchange": (lambda x: ring_exchange(x, None, dim=dim), plain_ring),
        }
        ours_of, plain_of = ways[setting.operation]
        num_others = 1 if setting.operation == "ring_exchange" else ranks - 1
        return Case(
            [draw(1, tokens if setting.operation == "split" else shares[rank], width)],
            lambda x: [ours_of(x[0])],
            lambda x: [plain_of(x[0], shares)],
            num_others * shares[rank] * width * dtype.itemsize,
        )
    # [B, S/P, H, D] → [B, S, H/P, D] for scatter_dim 2, and the way back for scatter_dim 1.
    scatter_dim, gather_dim = setting.scatter_dim, 3 - setting.scatter_dim
    sizes = {1: shares, 2: share_sizes(setting.heads, ranks)}
    shape = [setting.batch, tokens, setting.heads, HEAD_DIM]
    shape[gather_dim] = sizes[gather_dim][rank]
    # Everything but the piece that stays leaves; the gradient travels the other way and keeps the same piece.
    each_bytes = setting.batch * HEAD_DIM * dtype.itemsize
    gathered, scattered = sizes[gather_dim], sizes[scatter_dim]
    theory_bytes = each_bytes * gathered[rank] * (sum(scattered) - scattered[rank])
    if setting.backward:
        theory_bytes += each_bytes * scattered[rank] * (sum(gathered) - gathered[rank])
    inputs = [draw(*shape) for _ in range(3 if "packed" in setting.operation else 1)]

    def ours(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(tensors) > 1:
            return all_to_all_packed(tensors, None, scatter_dim, gather_dim)
        return [all_to_all(tensors[0], None, scatter_dim, gather_dim)]

    def plain(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [plain_all_to_all(each, scatter_dim, gather_dim, gathered, scattered) for each in tensors]

    return Case(inputs, ours, plain, theory_bytes * len(inputs))


def run_task(world: World, task: Mapping[str, Any]) -> dict[str, Any]:
    """Measures one setting: equality, bytes, and the times of both ways."""
    setting = Setting(**task["setting"])
    case = make_case(world, setting, task["size_bytes"])
    outer_gradients = [torch.randn_like(output) for output in case.plain(case.inputs)]

    def run(operation: Operation) -> list[Tensor]:
        """Outputs and gradients."""
        outputs, gradients = [output.contiguous() for output in operation(case.inputs)], list[Tensor]()
        if setting.backward:
            gradients = list(torch.autograd.grad(outputs, case.inputs, outer_gradients))
        return [tensor.contiguous() for tensor in outputs + gradients]

    sides = {"ours": partial(run, case.ours), "plain": partial(run, case.plain)}
    if not all(torch.equal(a, b) for a, b in zip(sides["ours"](), sides["plain"](), strict=True)):
        raise ValueError(f"ours and plain differ on rank {world.rank}")
    sizes_bytes = {"theory_bytes": [case.theory_bytes]}
    for name, side in sides.items():
        traffic = count_traffic(side)
        sizes_bytes |= {f"{name}_{kind}": [traffic[kind]] for kind in ("sent_bytes", "sizes_bytes")}
    busiest = {key: int(value) for key, (value,) in world.largest(sizes_bytes).items()}
    turns = {name: partial(harness.time_ms, side, world.device) for name, side in sides.items()}
    times = world.largest(harness.take_turns(turns, task["rounds"]))
    return {
        "case": setting.name(world.num_ranks),
        "claimed": setting.operation == "all_to_all" and not setting.is_uneven(world.num_ranks),
        "input_bytes": sum(tensor.nbytes for tensor in case.inputs),
        "ratio": harness.ratios(times["plain"], times["ours"]),
        "results_equal": True,
        **busiest,
        "bytes_match": busiest["ours_sent_bytes"] == busiest["plain_sent_bytes"] == busiest["theory_bytes"],
        "times_ms": {name: harness.spread(values) for name, values in times.items()},
    }


COLUMNS = {
    "case": "case",
    "ours ms": "times_ms.ours",
    "plain ms": "times_ms.plain",
    "ratio": "ratio",
    "sent MiB": "ours_sent_bytes",
    "plain": "plain_sent_bytes",
    "theory": "theory_bytes",
    "bytes match": "bytes_match",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 where results differ, bytes are not those of theory, or a case fails."""
    parser = harness.make_parser("collectives", __doc__, rounds=21)
    parser.add_argument("--ranks", type=int, nargs=1, default=[2], help="processes to start (default: 2)")
    parser.add_argument("--megabytes", type=float, default=64, help="bytes of a rank's input (default: 64)")
    options = harness.parse_options(parser, arguments, {"quick": {"megabytes": 1, "rounds": 3}})
    (num_ranks,) = options.ranks
    by_name = {setting.name(num_ranks): setting for setting in SETTINGS}
    chosen = [name for name in by_name if options.only in name]
    if not chosen:
        parser.error(f"--only {options.only!r} is in no case's name; they are {'; '.join(by_name)}")
    backend = "nccl" if options.device == "cuda" else "gloo"
    report = Report(options, ranks=num_ranks, backend=backend, megabytes=options.megabytes)
    common = {"size_bytes": int(options.megabytes * 2**20), "rounds": options.rounds}
    tasks = [{"label": name, "setting": dataclasses.asdict(by_name[name]), **common} for name in chosen]
    outcomes = run_tasks(Job("collectives", num_ranks, options.device), tasks)
    results = [outcome.found for outcome in outcomes if outcome.status == "done"]
    claims = []
    for row in (row for row in results if row["claimed"]):
        # The times of a quick run say nothing.
        ratio = None if options.quick else row["ratio"]["median"]
        claims.append(make_claim(f"{row['case']}: plain over ours", ratio, "at least", LEAST_RATIO))
    wrong = sum(not row["bytes_match"] for row in results)
    claims.append(make_claim("cases that send other bytes than theory", float(wrong), "exactly", 0))
    report.result |= {"results": results, "claims": claims}
    report.show(make_table("Collectives beside the plain way, in turns", COLUMNS, results))
    report.finish()
    failed = [(name, found) for name, found in zip(chosen, outcomes, strict=True) if found.status != "done"]
    for name, outcome in failed:
        print(f"error: {name} {outcome.status}: {outcome.reason}", file=sys.stderr)
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
