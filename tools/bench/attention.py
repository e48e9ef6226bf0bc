"""Claims that attention over ranks is exact, sends the fewest bytes and is no slower than anybody's, and measures it.

Claims, against full attention in fp64 and beside yunchang, DeepSpeed, diffusers, torch and ring-attention-pytorch:
gradients right to 1e-9 on 2, 3 and 4 ranks in every case (uneven tokens and heads, S_kv that is not S_q, grouped heads,
key masks, causal); a ring that sends 6 times its local q for each rank but one in fp32 and 8 times in bf16; a Ulysses
of 4 collectives where others need 8. On two gloo ranks, forward and backward: 1.2 times as fast as diffusers' Ulysses,
2 times torch's `context_parallel` with its MATH kernel, the zigzag 1.15 times the contiguous ring in a causal problem,
slower than nobody within the spread, and at most 1.05 times the best case, 20 lines that check nothing (1.1 times it,
of 256 tokens and fewer).

First comes what is the same in every run: the errors; then collectives, bytes on the wire and bytes kept for backward
of one layer; last the times. A peer that needs an environment of its own runs in --environments/NAME, where
--install-peers puts it (1 GB each); without it the peer is skipped. A peer that raises, aborts or hangs does so in the
table, and the run goes on.

How to read the tables:

    gradients    one number for out, dq, dk, dv and all ranks. WRONG: above what rounding explains. –: not offered by
                 the side's interface. raises, aborts, hangs: the reason is below the table
    sent / q     bytes that the busiest rank sends in one forward and backward, over the bytes of its own q
    kept / q     bytes that only the graph holds between forward and backward, its inputs included, over those of q
    side ms      forward and backward of one attention; a barrier stands before each, the slowest rank counts
    side / ours  median, over the rounds, of the ratio of two turns that follow each other, and its quartiles

    python tools/bench/attention.py --part errors --only ring --ranks 4
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.metadata
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Report, make_claim
from peers import INSTALLS, SIDES, install, is_ours, python_of
from peers import ours as our
from peers.side import NOT_OFFERED, SKIPPED, Attention, Problem, Side, rows_of
from pictures import draw_attention
from ranks import Job, Outcome, World, count_traffic, run_tasks
from torch import Tensor

from opensora_accel.profiler import LiveBytes

PARTS = ("errors", "bytes", "times", "best")
GRADIENTS = ("out", "dq", "dk", "dv")
# Largest error over largest value. Sums of 100 terms round to 1e-15, 1e-6 and 1e-2; what is wrong, is so by 0.1.
TOLERANCES = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 3e-2}

# 96 tokens and 12 heads divide by 2, 3 and 4 ranks, and the tokens by twice as many, which a zigzag needs. The
# tokens outnumber the head dim on every rank: torch's `context_parallel` returns other shapes otherwise.
SELF = Problem("self", queries=96, keys=96, heads=12, kv_heads=12, head_dim=8)
CASES = (
    SELF,
    dataclasses.replace(SELF, name="causal", causal=True),
    dataclasses.replace(SELF, name="uneven tokens", queries=97, keys=97),
    dataclasses.replace(SELF, name="S_kv ≠ S_q", keys=60),
    dataclasses.replace(SELF, name="uneven heads", heads=7, kv_heads=7),
    dataclasses.replace(SELF, name="grouped heads", heads=24),
    dataclasses.replace(SELF, name="key mask", masked=True),
)
COUNTED = Problem("counted", queries=384, keys=384, heads=12, kv_heads=12, head_dim=32, batch=1)
TIMED = {
    "cpu": Problem("full", 2048, 2048, heads=8, kv_heads=8, head_dim=64, batch=1, dtype="float32"),
    "cuda": Problem("full", 32768, 32768, heads=24, kv_heads=24, head_dim=128, batch=1, dtype="bfloat16"),
}
# By the tokens that are timed: the fewer, the more of the time is the host's. diffusers stands beside the best case.
MOST_OVER_BEST = {2048: 1.05, 256: 1.1, 64: 1.1}
BESIDE_BEST = ("diffusers ulysses", "diffusers ring")
# Least length of a turn: a shorter call is repeated.
LEAST_MS = 20.0
# gloo's threads let go of a tensor a moment after the transfer was waited for.
LET_GO_S = 0.1

# ---- what a rank does


@dataclass(frozen=True)
class Whole:
    """Inputs and outer gradient over the whole sequence, [B, S, H, D], equal on all ranks."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    # [B, S_kv], true where a key may be seen; every query sees one at least.
    mask: Tensor | None


def make_whole(problem: Problem, device: torch.device) -> Whole:
    """Drawn where it is used, from one seed: ranks of one kind of device draw the same. Rounded to the problem's dtype.

    400 million numbers of the timed problem on a GPU would take a host 10 s and more.
    """
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.float64 if problem.torch_dtype == torch.float64 else torch.float32

    def draw(tokens: int, heads: int) -> Tensor:
        shape = (problem.batch, tokens, heads, problem.head_dim)
        return torch.randn(shape, generator=generator, dtype=drawn, device=device).to(problem.torch_dtype)

    q, grad = (draw(problem.queries, problem.heads) for _ in "qg")
    k, v = (draw(problem.keys, problem.kv_heads) for _ in "kv")
    mask = None
    if problem.masked:
        mask = torch.rand(problem.batch, problem.keys, generator=generator, device=device) < 0.7
        mask[:, 0] = True
    return Whole(q, k, v, grad, mask)


def full_attention(problem: Problem, whole: Whole) -> dict[str, Tensor]:
    """out, dq, dk, dv of softmax(q kᵀ/√D) v on one device in fp64, written out."""
    q, k, v = (t.double().requires_grad_() for t in (whole.q, whole.k, whole.v))
    keys, values = (t.repeat_interleave(problem.heads // problem.kv_heads, dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) / problem.head_dim**0.5
    if whole.mask is not None:
        scores = scores.masked_fill(~whole.mask[:, None, None, :], -torch.inf)
    if problem.causal:
        later = torch.ones(problem.queries, problem.keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), values)
    gradients = torch.autograd.grad(out, (q, k, v), whole.grad.double())
    return dict(zip(GRADIENTS, (out.detach(), *gradients), strict=True))


class Prepared:
    """A side with its own share of one problem's inputs."""

    def __init__(self, world: World, side: Side, problem: Problem, whole: Whole) -> None:
        self.world = world
        self.q_rows, self.kv_rows = (
            rows_of(world, total, side.layout(problem)).to(world.device)
            for total in (problem.queries, problem.keys)
        )
        self.grad = whole.grad[:, self.q_rows].contiguous()
        shares = (whole.q[:, self.q_rows], whole.k[:, self.kv_rows], whole.v[:, self.kv_rows])
        self.inputs = [share.contiguous().requires_grad_() for share in shares]
        self.attention: Attention = side.make(world, problem, whole.mask)

    def forward_backward(self) -> tuple[Tensor, ...]:
        """out, dq, dk, dv of this rank."""
        out = self.attention.forward(*self.inputs)
        if out.shape != self.grad.shape:
            raise ValueError(
                f"the output is {list(out.shape)}, but this rank's rows are {list(self.grad.shape)}"
            )
        return (out.detach(), *torch.autograd.grad(out, self.inputs, self.grad))

    def time_ms(self, calls: int) -> float:
        with self.attention.around():
            return harness.time_ms(self.forward_backward, self.world.device, calls)


def run_task(world: World, task: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the last side of the task; in times, beside the first."""
    problem = Problem(**task["problem"])
    whole = make_whole(problem, world.device)
    *beside, side = (Prepared(world, SIDES[name], problem, whole) for name in task["sides"])
    if task["part"] == "errors":
        return measure_errors(side, full_attention(problem, whole), TOLERANCES[problem.dtype])
    if task["part"] == "bytes":
        return measure_bytes(side)
    return {"beside": task["sides"][0], **measure_times(beside[0], side, task["rounds"])}


def measure_errors(side: Prepared, expected: Mapping[str, Tensor], tolerance: float) -> dict[str, Any]:
    """For out, dq, dk, dv [B, S, H, D]: largest error on any rank over largest value; None where it is not finite."""
    on_rank = {}
    with side.attention.around():
        found = side.forward_backward()
    for key, tensor in zip(GRADIENTS, found, strict=True):
        share = expected[key][:, side.kv_rows if key in ("dk", "dv") else side.q_rows]
        error = float((tensor.double() - share).abs().max() / expected[key].abs().max())
        on_rank[key] = [error if error < torch.inf else torch.inf]  # also where it is NaN
    largest = {key: error for key, (error,) in side.world.largest(on_rank).items()}
    worst = max(largest.values())
    errors = {key: None if error == torch.inf else error for key, error in largest.items()}
    return {
        "errors": errors,
        "worst": None if worst == torch.inf else worst,
        "right": worst <= tolerance,
        "tolerance": tolerance,
    }


class KeptBytes(LiveBytes):
    """Live storages, also those inside of tensor subclasses: a DTensor's operation takes it apart first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Tensor for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def measure_bytes(side: Prepared) -> dict[str, Any]:
    """Traffic of one forward and backward, and bytes alive for backward once q, k, v and the output are forgotten."""
    with side.attention.around():
        side.forward_backward()  # not counted: it may set groups up
        counted = count_traffic(side.forward_backward)
        with KeptBytes() as live:
            # As a projection makes them: nobody but the graph holds them once the forward has returned.
            output = side.attention.forward(*(leaf.clone() for leaf in side.inputs))
            node = output.grad_fn
            assert node is not None, "the output needs no gradient"
            del output
            gc.collect()
            time.sleep(LET_GO_S)
            counted["kept_bytes"] = live.now_bytes
            del node
    counted["q_bytes"] = side.inputs[0].nbytes
    busiest = side.world.largest({key: [value] for key, value in counted.items()})
    row: dict[str, Any] = {key: int(value) for key, (value,) in busiest.items()}
    for kind in ("sent", "kept"):
        row[f"{kind}_in_q"] = row[f"{kind}_bytes"] / row["q_bytes"]
    return row


def measure_times(ours: Prepared, side: Prepared, rounds: int) -> dict[str, Any]:
    """Forward and backward of the two in turns, on the slowest rank."""
    world = ours.world
    first_ms = [ours.time_ms(1) for _ in range(3)][-1]
    calls = max(1, round(LEAST_MS / world.largest({"first": [first_ms]})["first"][0]))
    turns = {"ours": partial(ours.time_ms, calls), "side": partial(side.time_ms, calls)}
    times = world.largest(harness.take_turns(turns, rounds))
    spreads = {f"{name}_ms": harness.spread(values) for name, values in times.items()}
    return spreads | {"ratio": harness.ratios(times["side"], times["ours"])}


# ---- which problems are put to which side, and what comes of it

Row = dict[str, Any]


def problems(part: str, side: Side, options: argparse.Namespace) -> Iterator[Problem]:
    """What is put to a side."""
    if part == "errors":
        dtype = side.cuda_dtype if options.device == "cuda" else side.dtype
        yield from (dataclasses.replace(case, dtype=dtype) for case in CASES)
    elif part == "bytes":
        for dtype in ("float32", "bfloat16"):
            yield dataclasses.replace(COUNTED, dtype=dtype, causal=side.causal_only)
    elif part == "times" and side.beside and side.kind != "best case":
        # Every query sees every key, and then causal.
        full = dataclasses.replace(TIMED[options.device], queries=options.tokens, keys=options.tokens)
        yield from [] if side.causal_only else [full]
        yield dataclasses.replace(full, name="causal", causal=True)
    elif part == "best" and (
        side.kind == "best case" or (options.device == "cpu" and side.name in BESIDE_BEST)
    ):
        for tokens in list(MOST_OVER_BEST)[1 if options.quick else 0 :]:
            yield dataclasses.replace(TIMED["cpu"], name=f"{tokens} tokens", queries=tokens, keys=tokens)


def make_task(part: str, side: Side, problem: Problem, rounds: int) -> dict[str, Any]:
    """Plain data; what is timed names the side of ours first."""
    names = [side.name]
    if part in ("times", "best"):
        balanced = side.kind == "peer" and side.layout(problem) != "contiguous"
        names = [our.ZIGZAG if balanced else str(side.beside), side.name]
    label = f"{part} of {' and '.join(names)}, {problem.name}"
    return {
        "label": label,
        "part": part,
        "sides": names,
        "problem": dataclasses.asdict(problem),
        "rounds": rounds,
    }


def measure(part: str, sides: Sequence[Side], num_ranks: int, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of sides that run with one interpreter, and so share their ranks."""
    python = python_of(sides[0], options.environments)
    put = [(side, problem) for side in sides for problem in problems(part, side, options)]
    tasks = [
        make_task(part, *pair, options.rounds) for pair in put if pair[0].refusal(pair[1], num_ranks) is None
    ]
    outcomes = iter(list[Outcome]())
    if python is not None:
        job = Job("attention", num_ranks, options.device, options.timeout, python)
        outcomes = iter(run_tasks(job, tasks))
    for side, problem in put:
        refusal = side.refusal(problem, num_ranks)
        if refusal is not None:
            outcome = Outcome(NOT_OFFERED, refusal)
        elif python is None:
            outcome = Outcome(SKIPPED, "it has no environment here; --install-peers makes it")
        else:
            outcome = next(outcomes)
        row: Row = {"side": side.name, "ranks": num_ranks, "problem": dataclasses.asdict(problem)}
        yield row | {"status": outcome.status, "reason": outcome.reason} | (outcome.found or {})


def measure_part(part: str, options: argparse.Namespace) -> list[Row]:
    """The rows of one part, by side. Where it is timed, a side has ranks of its own."""
    is_timed, rows = part in ("times", "best"), list[Row]()

    def group_of(side: Side) -> tuple[str | None, str]:
        return python_of(side, options.environments), side.name if is_timed else ""

    for num_ranks in options.ranks[:1] if is_timed else options.ranks:
        # Sides of one environment follow each other in the table of sides.
        for _, sides in itertools.groupby(options.sides, group_of):
            rows += measure(part, list(sides), num_ranks, options)
    order = list(SIDES)
    return sorted(rows, key=lambda row: order.index(row["side"]))


# ---- claims

# Time of the side over ours. Every other side: not below 1 by more than the spread.
LEAST_RATIOS = {("diffusers ulysses", "full"): 1.2, ("torch context_parallel", "full"): 2.0}
LEAST_ZIGZAG_GAIN = 1.15
# That a ring sends, in units of the local q, for each rank but one: k and v twice, their fp32 gradients once.
RING_TENSORS = {"float32": 6, "bfloat16": 8}


def is_wrong(row: Row) -> bool:
    """Whether a side of ours was asked for gradients and failed, or returned wrong ones."""
    return is_ours(row["side"]) and row["status"] not in (NOT_OFFERED, SKIPPED) and not row.get("right")


def claims(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What this run can tell of every claim."""
    yield from claims_of_errors(result["errors"])
    yield from claims_of_bytes(result["bytes"])
    yield from claims_of_times(result["times"])
    of_best = [row for row in result["best"] if SIDES[row["side"]].kind == "best case"]
    for row in (row for row in of_best if row["status"] == "done"):
        what = f"{row['ranks']} ranks, {row['problem']['name']}: {row['beside']} over {row['side']}"
        most = MOST_OVER_BEST.get(row["problem"]["queries"], 1.05)
        yield make_claim(what, 1 / row["ratio"]["median"], "at most", most)


def claims_of_errors(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for name, side in SIDES.items():
        asked = [row for row in rows if row["side"] == name and row["status"] != NOT_OFFERED]
        if asked and side.kind == "ours":
            worst: list[Any] = [row.get("worst") for row in asked]
            value = float("nan") if None in worst else max(worst)
            what = f"{name}: gradient error against full attention, {len(asked)} cases"
            yield make_claim(what, value, "at most", asked[0].get("tolerance", 0.0))


def claims_of_bytes(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for name, side in SIDES.items():
        done = [row for row in rows if row["side"] == name and row["status"] == "done"]
        where = f"{name}, {', '.join(dict.fromkeys(str(row['ranks']) for row in done))} ranks"
        collectives = [row["collectives"] for row in done]
        if done and name in (our.RING, our.ZIGZAG, our.STRIPED):
            for dtype, tensors in RING_TENSORS.items():
                sent = [r["sent_in_q"] / (r["ranks"] - 1) for r in done if r["problem"]["dtype"] == dtype]
                what = f"{where}, {dtype}: bytes sent, over the local q's, for each rank but one"
                yield make_claim(what, max(sent, key=lambda each: abs(each - tensors)), "exactly", tensors)
        elif done and name == our.ULYSSES:
            yield make_claim(f"{where}: collectives", max(collectives), "exactly", 4)
        elif done and name.endswith(" ulysses") and side.kind == "peer":
            yield make_claim(f"{where}: collectives", min(collectives), "at least", 8)


def claims_of_times(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for row in (row for row in rows if row["status"] == "done"):
        name, problem, ratio = row["side"], row["problem"]["name"], row["ratio"]
        where = f"{row['ranks']} ranks, {problem}"
        what = f"{where}: {name} over {row['beside']}"
        if name == our.ZIGZAG:
            # The table's ratio is that of the zigzag to the contiguous ring: the claim is of its inverse.
            what, gain = f"{where}: contiguous ring over zigzag", 1 / ratio["median"]
            yield make_claim(what, gain, "at least", LEAST_ZIGZAG_GAIN)
        elif (name, problem) in LEAST_RATIOS:
            yield make_claim(what, ratio["median"], "at least", LEAST_RATIOS[name, problem])
        elif not is_ours(name):
            yield make_claim(f"{what}, upper quartile", ratio["q3"], "at least", 1.0)


# ---- tables

TITLES = {
    "errors": "Gradients: largest error of out, dq, dk and dv over the largest value, against full attention in fp64",
    "bytes": "One layer, forward and backward: calls and MiB of the busiest rank, and bytes kept for backward",
    "times": "Forward and backward, in turns, of the slowest rank: medians and quartiles; above 1, ours is faster",
    "best": "Beside the best case, and diffusers, likewise",
}
WHO = {"side": "side", "ranks": "ranks", "dtype": "problem.dtype"}
CALLS = {"collectives": "collectives", "sends": "sends", "barriers": "barriers"}
SENT = {"sent MiB": "sent_bytes", "sent / q": "sent_in_q", "kept / q": "kept_in_q"}
SIZES = {"B": "problem.batch", "S": "problem.queries", "H": "problem.heads", "D": "problem.head_dim"}
TIMES = {"beside": "beside", "ours ms": "ours_ms", "side ms": "side_ms", "side / ours": "ratio"}
COLUMNS = {"bytes": CALLS | SENT, "times": SIZES | TIMES, "best": SIZES | TIMES}


def make_table(part: str, rows: Sequence[Row]) -> str:
    """The rows of one part; below them why rows failed, each reason once, with the cases it was given for."""
    notes = [f'any row again: python tools/bench/attention.py --part {part} --only "NAME" --ranks P']
    asked = [row for row in rows if row["status"] != NOT_OFFERED]
    failures = dict[Any, list[Row]]()
    for row in (row for row in asked if row["status"] != "done"):
        # Reasons that differ in sizes alone are one.
        key = (row["side"], row["status"], re.sub(r"\d+", "#", row["reason"]))
        failures.setdefault(key, []).append(row)
    if part == "errors":
        columns, asked, wrong = pivot_errors(asked)
        notes += wrong
    else:
        columns = {"case": "problem.name", "": "status"} | COLUMNS[part]
    for (side, status, _), failed in failures.items():
        where = dict.fromkeys(f"{row['problem']['name']} on {row['ranks']}" for row in failed)
        notes.append(f"{side} {status} ({', '.join(where)}): {failed[0]['reason']}")
    return harness.make_table(TITLES[part], WHO | columns, asked, notes)


def pivot_errors(rows: Sequence[Row]) -> tuple[dict[str, str], list[Row], list[str]]:
    """Columns, one line for all cases of a side and rank count, and for what is wrong a note with each gradient."""
    lines, notes = dict[Any, Row](), list[str]()
    for row in rows:
        case, cell = row["problem"]["name"], row["status"]
        if cell == "done":
            cell = harness.show_error(row["worst"])
            if not row["right"]:
                cell = f"WRONG {cell}"
                shown = [f"{key} {harness.show_error(error, 1)}" for key, error in row["errors"].items()]
                notes.append(f"{row['side']}, {row['ranks']} ranks, {case}: {', '.join(shown)}")
        lines.setdefault((row["side"], row["ranks"]), dict(row))[case] = cell
    return {case.name: case.name for case in CASES}, list(lines.values()), notes


# ---- the command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with what was left out filled in for the device. Exits on what cannot be."""
    parser = harness.make_parser("attention", __doc__, rounds=15)
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--ranks", type=int, nargs="+", default=[2, 3, 4], help="times on the first (default: 2 3 4)")
    add("--tokens", type=int, help="of the sequence that is timed (2048; 32768 on CUDA)")
    add("--install-peers", action="store_true", help=f"make the environments of {', '.join(INSTALLS)}")
    add("--environments", type=Path, default=Path(".bench-venv"), metavar="DIR", help="default: .bench-venv")
    add("--timeout", type=float, default=120.0, metavar="S", help="what takes longer hangs (default: 120)")
    usual: Mapping[str, Mapping[str, Any]] = {
        "cpu": {"tokens": 2048},
        "cuda": {"tokens": 32768},
        "quick": {"tokens": 192, "rounds": 3},
    }
    options = harness.parse_options(parser, arguments, usual)
    options.sides = [side for side in SIDES.values() if options.only in side.name]
    if not options.sides:
        parser.error(f"--only {options.only!r} is in no side's name; they are {', '.join(SIDES)}")
    return options


def find_versions(options: argparse.Namespace) -> dict[str, str]:
    """Of what the sides come from."""
    found = {}
    for side in options.sides:
        if side.package in INSTALLS:
            if python_of(side, options.environments) is not None:
                found[side.package] = INSTALLS[side.package][0].partition("==")[2]
        else:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[side.package] = importlib.metadata.version(side.package)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 when a side of ours is wrong or fails. Claims that do not hold are printed and stored."""
    options = parse(arguments)
    for name in INSTALLS if options.install_peers else ():
        wanted = [side for side in options.sides if side.package == name]
        if wanted and python_of(wanted[0], options.environments) is None:
            try:
                install(name, options.environments)
            except (OSError, subprocess.CalledProcessError) as error:  # it is skipped, then
                harness.say(f"{name} was not installed: {error}")
    backend = "nccl" if options.device == "cuda" else "gloo"
    parts = {part: list[Row]() for part in PARTS}
    report = Report(options, find_versions(options), backend=backend, **parts)
    result = report.result
    for part in (part for part in PARTS if part in options.part):
        result[part] = measure_part(part, options)
        # The times of a quick run say nothing.
        result["claims"] = list(claims(result | {"times": [], "best": []} if options.quick else result))
        if result[part]:
            report.show(make_table(part, result[part]))
    report.finish(draw_attention)
    return 1 if any(is_wrong(row) for row in result["errors"]) else 0


if __name__ == "__main__":
    sys.exit(main())
