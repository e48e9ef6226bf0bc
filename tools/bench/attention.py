"""Claims that attention over ranks is exact, sends the fewest bytes and is no slower than anybody's, and measures it.

Claims, against full attention in fp64 and beside yunchang, DeepSpeed, diffusers, torch and ring-attention-pytorch:
gradients right to 1e-9 on 2, 3 and 4 ranks in every case (uneven tokens and heads, S_kv that is not S_q, grouped heads,
key masks, causal); a ring that sends 6 times its local q for each rank but one in fp32 and 8 times in bf16; a Ulysses
of 4 collectives where others need 8. On two gloo ranks, forward and backward: 1.2 times as fast as diffusers' Ulysses,
2 times torch's `context_parallel` with its MATH kernel, the zigzag 1.15 times the contiguous ring in a causal problem,
slower than nobody within the spread, and at most 1.05 times the best case: 20 lines that check nothing.

First comes what is the same in every run: the errors; then collectives, bytes on the wire and bytes kept for backward
of one layer; last the times. A peer that needs an environment of its own runs in --environments/NAME, where
--install-peers puts it; without it the peer is skipped, with the reason. A peer that raises, aborts or hangs does so
in the table, and the run goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.metadata
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Note, Report, Table, make_claim
from peers import SIDES, find_side, is_ours
from peers import ours as our
from peers.environments import INSTALLS, SETTINGS, install, python_of
from peers.side import NOT_OFFERED, SKIPPED, Attention, Problem, Side, rows_of
from pictures import draw_attention
from ranks import Job, Outcome, World, count_traffic, run_tasks, slowest_rank
from torch import Tensor

from opensora_accel.profiler import LiveBytes

PROGRAM = "python tools/bench/attention.py"
PARTS = ("errors", "bytes", "times", "best")
TIMED = PARTS[2:]
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
BEST_SIZES = ((2048, 8, 64), (256, 8, 32), (64, 4, 16))
# Least length of a turn beside the best case: a shorter call is repeated.
LEAST_MS = 20.0

EXAMPLES = f"""\
{textwrap.fill("sides: " + ", ".join(SIDES), 118)}

examples:
  {PROGRAM} --install-peers                    make the peers' environments first (once, 1 GB each)
  {PROGRAM}                                    everything, on 2, 3 and 4 ranks
  {PROGRAM} --part errors --only ring          gradient errors of the sides whose name holds "ring"
  {PROGRAM} --part times --only "diffusers ulysses"        one row of the table of times
  {PROGRAM} --part best                        beside the best case, in two minutes
  {PROGRAM} --quick --ranks 2                  checks that all runs; its times say nothing
  {PROGRAM} --output result.json --markdown result.md --picture result.png
  {PROGRAM} --also my_package.mine:SIDE        a Side of your own (peers/side.py), beside ours

how to read the tables:
  gradients  one number for out, dq, dk, dv and all ranks. WRONG: above what rounding explains. –: not offered by the
             side's interface. raises, aborts, hangs: the reason is below the table
  sent / q   bytes that the busiest rank sends in one forward and backward, over the bytes of its own q
  kept / q   bytes that only the graph holds between forward and backward, its inputs included, over those of q
  side ms    forward and backward of one attention; a barrier stands before each, the slowest rank counts
  side / ours  median, over the rounds, of the ratio of two turns that follow each other, and its quartiles"""

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
    """Drawn on the host, so that every rank draws the same, and rounded to the problem's dtype."""
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int, heads: int) -> Tensor:
        shape = (problem.batch, tokens, heads, problem.head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, problem.torch_dtype)

    q, grad = (draw(problem.queries, problem.heads) for _ in "qg")
    k, v = (draw(problem.keys, problem.kv_heads) for _ in "kv")
    mask = None
    if problem.masked:
        mask = torch.rand(problem.batch, problem.keys, generator=generator) < 0.7
        mask[:, 0] = True
        mask = mask.to(device)
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

    def __init__(self, world: World, name: str, problem: Problem, whole: Whole) -> None:
        side = find_side(name)
        layout = side.layout(problem)
        self.q_rows, self.kv_rows = (
            rows_of(world, total, layout).to(world.device) for total in (problem.queries, problem.keys)
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

    def time_ms(self, device: torch.device, calls: int) -> float:
        """Of one forward and backward, on the mean of `calls`."""
        with self.attention.around():
            return harness.time_ms(self.forward_backward, device, calls)


def run_task(world: World, task: Mapping[str, Any], note: Note) -> Any:
    """One measurement of the last side of the task; in times, beside the first."""
    part, names = task["part"], task["sides"]
    if part == "import":
        side = find_side(names[-1])
        side.check_import()
        return importlib.metadata.version(side.package)
    problem = Problem(**task["problem"])
    whole = make_whole(problem, world.device)
    prepared = {name: Prepared(world, name, problem, whole) for name in names}
    if part == "errors":
        return measure_errors(problem, whole, prepared[names[-1]])
    if part == "bytes":
        return measure_bytes(prepared[names[-1]])
    # For each side, the milliseconds of every round on its slowest rank.
    calls = 1
    if part == "best":
        first = [prepared[names[0]].time_ms(world.device, 1) for _ in range(3)][-1]
        calls = max(1, round(LEAST_MS / slowest_rank({"first": [first]}, world.device)["first"][0]))
    turns = {name: partial(side.time_ms, world.device, calls) for name, side in prepared.items()}
    return slowest_rank(harness.take_turns(turns, task["rounds"], note), world.device)


def measure_errors(problem: Problem, whole: Whole, prepared: Prepared) -> dict[str, float | None]:
    """For out, dq, dk, dv: the largest error on this rank over the largest value of the whole; None if not finite."""
    expected, errors = full_attention(problem, whole), {}
    with prepared.attention.around():
        found = prepared.forward_backward()
    for key, tensor in zip(GRADIENTS, found, strict=True):
        share = expected[key][:, prepared.kv_rows if key in ("dk", "dv") else prepared.q_rows]
        error = float((tensor.double() - share).abs().max() / expected[key].abs().max())
        errors[key] = error if error < torch.inf else None
    return errors


class KeptBytes(LiveBytes):
    """Live storages, also those inside of tensor subclasses: a DTensor's operation takes it apart first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Tensor for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def measure_bytes(prepared: Prepared) -> dict[str, Any]:
    """Traffic of one forward and backward, and bytes alive for backward once q, k, v and the output are forgotten."""
    with prepared.attention.around():
        prepared.forward_backward()  # not counted: it may set groups up
        traffic = count_traffic(prepared.forward_backward)
        with KeptBytes() as live:
            # As a projection makes them: nobody but the graph holds them once the forward has returned.
            output = prepared.attention.forward(*(leaf.clone() for leaf in prepared.inputs))
            node = output.grad_fn
            assert node is not None, "the output needs no gradient"
            del output
            gc.collect()
            kept_bytes = live.now_bytes
            del node
    return traffic | {"kept_bytes": kept_bytes, "q_bytes": prepared.inputs[0].nbytes}


# ---- which problems are put to which side, and what comes of it

Row = dict[str, Any]


class Bench:
    """The sides that were asked for, and which of them run here."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.versions, self.skipped = options, dict[str, str](), dict[str, str]()

        def is_asked(side: Side) -> bool:
            return any(any(problems(part, side, options)) for part in options.part)

        # What nothing is put to need not import here.
        self.sides = [side for side in options.sides if is_asked(side)]
        imports = [{"part": "import", "sides": [side.name]} for side in self.sides]
        for side, outcome in zip(self.sides, self._run(imports, num_ranks=1), strict=True):
            if outcome.status == "done":
                self.versions[side.package] = outcome.by_rank[0]
                continue
            failure = "" if outcome.status == SKIPPED else "does not import: "
            self.skipped[side.name] = failure + outcome.reason
            harness.say(f"{side.name} is skipped: {self.skipped[side.name]}")

    def rows(self, part: str) -> list[Row]:
        """The rows of one part, by side."""
        rows = list[Row]()
        for num_ranks in self.options.time_ranks if part in TIMED else self.options.ranks:
            put = [(side, problem) for side in self.sides for problem in problems(part, side, self.options)]
            tasks = [make_task(part, side, problem, self.options.rounds) for side, problem in put]
            known = [self._refuse(side, problem, num_ranks) for side, problem in put]
            waiting = [task for task, outcome in zip(tasks, known, strict=True) if outcome is None]
            found = iter(self._run(waiting, num_ranks))
            for task, outcome in zip(tasks, known, strict=True):
                rows.append(make_row(task, num_ranks, outcome or next(found)))
        order = [side.name for side in self.sides]
        return sorted(rows, key=lambda row: order.index(row["side"]))

    def _refuse(self, side: Side, problem: Problem, num_ranks: int) -> Outcome | None:
        """What is known of a problem that is not put to the side; None where it is put."""
        refusal = side.refusal(problem, num_ranks)
        if refusal is not None:
            return Outcome(NOT_OFFERED, refusal)
        return Outcome(SKIPPED, self.skipped[side.name]) if side.name in self.skipped else None

    def _run(self, tasks: Sequence[Mapping[str, Any]], num_ranks: int) -> list[Outcome]:
        """An outcome for each task. The sides of one environment share ranks; where it is timed, a side has its own."""

        def group_of(task: Mapping[str, Any]) -> tuple[str | None, str]:
            side = find_side(task["sides"][-1])
            return python_of(side, self.options.environments), side.name if task["part"] in TIMED else ""

        outcomes = list[Outcome]()
        # Sides of one environment follow each other, in the table of sides and so in the tasks.
        for (python, _), members in itertools.groupby(tasks, group_of):
            group = list(members)
            if python is None:
                missing = Outcome(SKIPPED, "it has no environment here; --install-peers makes it")
                outcomes += [missing] * len(group)
                continue

            def begin(at: int, group: Sequence[Mapping[str, Any]] = group) -> None:
                task = group[at]
                if "problem" in task:
                    where = f"{task['part']}, {num_ranks} ranks"
                    harness.say(f"{where}: {' and '.join(task['sides'])}, {task['problem']['name']}")

            settings = SETTINGS.get(find_side(group[0]["sides"][-1]).package, {})
            job = Job("attention", num_ranks, self.options.device, self.options.timeout, python, settings)
            if group[0]["part"] == "import":
                job = dataclasses.replace(job, device="cpu", silence_s=180.0)
            outcomes += run_tasks(job, group, begin)
        return outcomes


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
        o = options
        full = Problem("full", o.tokens, o.tokens, o.heads, o.heads, o.head_dim, o.batch, o.dtype)
        yield from [] if side.causal_only else [full]
        yield dataclasses.replace(full, name="causal", causal=True)
    elif part == "best" and side.kind == "best case":
        for tokens, heads, head_dim in BEST_SIZES[1 if options.quick else 0 :]:
            name = f"{tokens}·{heads}·{head_dim}"
            yield Problem(name, tokens, tokens, heads, heads, head_dim, batch=1, dtype="float32")


def make_task(part: str, side: Side, problem: Problem, rounds: int) -> dict[str, Any]:
    """Plain data; what is timed names the side of ours first."""
    names = [side.name]
    if part in TIMED:
        balanced = side.kind == "peer" and side.layout(problem) != "contiguous"
        names = [our.ZIGZAG if balanced else str(side.beside), side.name]
    return {"part": part, "sides": names, "problem": dataclasses.asdict(problem), "rounds": rounds}


def make_row(task: Mapping[str, Any], num_ranks: int, outcome: Outcome) -> Row:
    """Plain data of one side, rank count and problem."""
    part, side, by_rank = task["part"], task["sides"][-1], outcome.by_rank
    command = f'{PROGRAM} --part {part} --only "{side}" --{"time-" if part in TIMED else ""}ranks {num_ranks}'
    row: Row = {"side": side, "ranks": num_ranks, "problem": task["problem"], "status": outcome.status}
    row |= {"reason": outcome.reason, "command": command}
    if outcome.status != "done":
        return row
    if part == "errors":
        # The largest over ranks; None where any is not finite.
        values = {key: [found[key] for found in by_rank] for key in GRADIENTS}
        errors = {key: None if None in found else max(found) for key, found in values.items()}
        finite = [error for error in errors.values() if error is not None]
        worst = max(finite) if len(finite) == len(errors) else None
        tolerance = TOLERANCES[task["problem"]["dtype"]]
        right = worst is not None and worst <= tolerance
        return row | {"errors": errors, "worst": worst, "right": right, "tolerance": tolerance}
    if part == "bytes":
        # Of the rank that sends most; what is kept, of the rank that keeps most.
        row |= max(by_rank, key=lambda found: found["sent_bytes"])
        row |= {key: max(found[key] for found in by_rank) for key in ("kept_bytes", "q_bytes")}
        row["sent_in_q"] = row["sent_bytes"] / row["q_bytes"]
        row["kept_in_q"] = row["kept_bytes"] / row["q_bytes"]
        return row
    ours, theirs = (by_rank[0][name] for name in task["sides"])
    row |= {"beside": task["sides"][0], "ours_ms": harness.spread(ours), "side_ms": harness.spread(theirs)}
    return row | {"ratio": harness.ratios(theirs, ours)}


# ---- claims

# Time of the side over ours. Every other side: not below 1 by more than the spread.
LEAST_RATIOS = {("diffusers ulysses", "full"): 1.2, ("torch context_parallel", "full"): 2.0}
LEAST_ZIGZAG_GAIN, MOST_OVER_BEST = 1.15, 1.05
# That a ring sends, in units of the local q, for each rank but one: k and v twice, their fp32 gradients once.
RING_TENSORS = {"float32": 6, "bfloat16": 8}


def is_wrong(row: Row) -> bool:
    """Whether a side of ours was asked for gradients and failed, or returned wrong ones."""
    return is_ours(row["side"]) and row["status"] not in (NOT_OFFERED, SKIPPED) and not row.get("right")


def claims(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What this run can tell of every claim."""
    asked = [row for row in result["errors"] if row["status"] not in (NOT_OFFERED, SKIPPED)]
    for side, rows in by_side(row for row in asked if is_ours(row["side"])):
        worst: list[Any] = [row.get("worst") for row in rows]
        value = float("nan") if None in worst else max(worst)
        what = f"{side}: gradient error against full attention, {len(rows)} cases"
        yield make_claim(what, value, "at most", rows[0].get("tolerance", 0.0))
    for side, rows in by_side(row for row in result["bytes"] if row["status"] == "done"):
        where = f"{side}, {', '.join(dict.fromkeys(str(row['ranks']) for row in rows))} ranks"
        if side in (our.RING, our.ZIGZAG, our.STRIPED):
            for dtype, tensors in RING_TENSORS.items():
                sent = [r["sent_in_q"] / (r["ranks"] - 1) for r in rows if r["problem"]["dtype"] == dtype]
                what = f"{where}, {dtype}: bytes sent, over the local q's, for each rank but one"
                yield make_claim(what, max(sent, key=lambda each: abs(each - tensors)), "exactly", tensors)
        elif side == our.ULYSSES:
            yield make_claim(f"{where}: collectives", max(r["collectives"] for r in rows), "exactly", 4)
        elif side.endswith(" ulysses") and SIDES[side].kind == "peer":
            yield make_claim(f"{where}: collectives", min(r["collectives"] for r in rows), "at least", 8)
    for row in (row for row in result["times"] if row["status"] == "done"):
        side, problem, ratio = row["side"], row["problem"]["name"], row["ratio"]
        what = f"{row['ranks']} ranks, {problem}: {side} over {row['beside']}"
        if side == our.ZIGZAG:
            # The table's ratio is that of the zigzag to the contiguous ring: the claim is of its inverse.
            what = f"{row['ranks']} ranks, {problem}: contiguous ring over zigzag"
            yield make_claim(what, 1 / ratio["median"], "at least", LEAST_ZIGZAG_GAIN)
        elif (side, problem) in LEAST_RATIOS:
            yield make_claim(what, ratio["median"], "at least", LEAST_RATIOS[side, problem])
        elif not is_ours(side):
            yield make_claim(f"{what}, upper quartile", ratio["q3"], "at least", 1.0)
    for row in (row for row in result["best"] if row["status"] == "done"):
        what = f"{row['ranks']} ranks, {row['problem']['name']}: {row['beside']} over {row['side']}"
        yield make_claim(what, 1 / row["ratio"]["median"], "at most", MOST_OVER_BEST)


def by_side(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Rows stand together by side."""
    for side, members in itertools.groupby(rows, key=lambda row: row["side"]):
        yield side, list(members)


# ---- tables

TITLES = {
    "errors": "Gradients: largest error of out, dq, dk and dv over the largest value, against full attention in fp64",
    "bytes": "One layer, forward and backward: calls and MiB of the busiest rank, and bytes kept for backward",
    "times": "Forward and backward, in turns, of the slowest rank: medians and quartiles; above 1, ours is faster",
    "best": "Beside the best case, likewise",
}
WHO = {"side": "side", "ranks": "ranks", "dtype": "problem.dtype"}
CALLS = {"collectives": "collectives", "of sizes": "size_exchanges", "sends": "sends", "barriers": "barriers"}
SENT = {
    "sent MiB": "sent_bytes",
    "sent / q": "sent_in_q",
    "kept / q": "kept_in_q",
    "not counted": "uncounted",
}
SIZES = {"B": "problem.batch", "S": "problem.queries", "H": "problem.heads", "D": "problem.head_dim"}
TIMES = {"beside": "beside", "ours ms": "ours_ms", "side ms": "side_ms", "side / ours": "ratio"}
COLUMNS = {"bytes": CALLS | SENT, "times": SIZES | TIMES, "best": SIZES | TIMES}


def make_table(part: str, rows: Sequence[Row]) -> Table:
    """The rows of one part; below them why rows failed, each reason once, with the cases it was given for."""
    again = f'{PROGRAM} --part {part} --only "NAME" --{"time-" if part in TIMED else ""}ranks P'
    asked = [row for row in rows if row["status"] != NOT_OFFERED]
    notes, failures, lines = [f"any row again: {again}"], dict[Any, list[Row]](), dict[Any, Row]()
    for row in asked:
        case, status = row["problem"]["name"], row["status"]
        # Of the table of errors a line is all cases of one side, rank count and dtype.
        line = lines.setdefault((row["side"], row["ranks"], row["problem"]["dtype"]), dict(row))
        line[case] = status
        if status != "done":
            # Reasons that differ in sizes alone are one.
            key = (row["side"], status, re.sub(r"\d+", "#", row["reason"]))
            failures.setdefault(key, []).append(row)
        elif part == "errors":
            line[case] = "NaN" if row["worst"] is None else f"{row['worst']:.0e}"
            if not row["right"]:
                line[case] = f"WRONG {line[case]}"
                shown = [f"{key} {'NaN' if e is None else f'{e:.1e}'}" for key, e in row["errors"].items()]
                notes.append(f"{row['side']}, {row['ranks']} ranks, {case}: {', '.join(shown)}")
    for (side, status, _), failed in failures.items():
        where = dict.fromkeys(f"{row['problem']['name']} on {row['ranks']}" for row in failed)
        notes.append(f"{side} {status} ({', '.join(where)}): {failed[0]['reason']}")
    if part == "errors":
        cases = {row["problem"]["name"]: row["problem"]["name"] for row in rows}
        return Table.of(TITLES[part], WHO | cases, lines.values(), notes)
    columns = WHO | {"case": "problem.name", "": "status"} | COLUMNS[part]
    return Table.of(TITLES[part], columns, asked, notes)


# ---- the command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with what was left out filled in for the device. Exits on what cannot be."""
    parser = harness.make_parser(PROGRAM, __doc__, EXAMPLES, rounds=15)
    add, positive = parser.add_argument, harness.positive
    add("--also", action="append", default=[], metavar="MODULE:SIDE", help="a Side that is defined elsewhere")
    add("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--ranks", type=positive, nargs="+", default=[2, 3, 4], help="of errors and bytes (default: 2 3 4)")
    add("--time-ranks", type=positive, nargs="+", default=[2], help="of what is timed (default: 2)")
    add("--tokens", type=positive, help="of the whole sequence that is timed (2048; 32768 on CUDA)")
    add("--heads", type=positive, help="8; 24 on CUDA")
    add("--head-dim", type=positive, help="64; 128 on CUDA")
    add("--batch", type=positive, default=1, help="default: 1")
    add("--dtype", choices=("float32", "bfloat16"), help="float32; bfloat16 on CUDA")
    add("--install-peers", action="store_true", help=f"make the environments of {', '.join(INSTALLS)}")
    add("--environments", type=Path, default=Path(".bench-venv"), metavar="DIR", help="default: .bench-venv")
    add("--timeout", type=float, default=60.0, metavar="S", help="a silence that is a hang (default: 60)")
    options = harness.parse_options(
        parser,
        arguments,
        quick={"rounds": 3, "tokens": 192},
        cpu={"tokens": 2048, "heads": 8, "head_dim": 64, "dtype": "float32"},
        cuda={"tokens": 32768, "heads": 24, "head_dim": 128, "dtype": "bfloat16"},
        count_ranks=lambda given: max(given.ranks + given.time_ranks),
    )
    least = min(options.ranks + options.time_ranks)
    if least < 2:
        parser.error(
            f"--ranks and --time-ranks must be at least 2: one rank has nobody to send to; got {least}"
        )
    for num_ranks in options.time_ranks:
        if options.tokens % (2 * num_ranks) or options.heads % num_ranks:
            parser.error(
                f"--tokens ({options.tokens}) must be a multiple of {2 * num_ranks} and --heads ({options.heads}) "
                f"of {num_ranks}, on {num_ranks} ranks: most peers know no other sizes"
            )
    sides = (*SIDES.values(), *map(find_side, options.also))
    options.sides = [side for side in sides if options.only in side.name]
    if not options.sides:
        names = ", ".join(side.name for side in sides)
        parser.error(f"--only {options.only!r} is in no side's name; they are {names}")
    return options


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
    bench = Bench(options)
    backend = "nccl" if options.device == "cuda" else "gloo"
    facts = {"backend": backend, "skipped": bench.skipped, **{part: list[Row]() for part in PARTS}}
    report = Report(options, bench.versions, **facts)
    result = report.result
    for part in (part for part in PARTS if part in options.part):
        result[part] = bench.rows(part)
        # The times of a quick run say nothing.
        result["claims"] = list(claims(result | {"times": [], "best": []} if options.quick else result))
        if result[part]:
            report.show(make_table(part, result[part]))
    report.finish(draw_attention)
    return 1 if any(is_wrong(row) for row in result["errors"]) else 0


if __name__ == "__main__":
    sys.exit(main())
