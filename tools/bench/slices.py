"""Counts and times attention by slices of a mask: its cost is to be the mask's area.

Claim, by counting, of packed, block-causal, window, teacher-forcing, sliding and causal masks on 2, 8 and 64 ranks: the
rank that has most has at most 1.05 times the mean of the pairs where tokens are dealt out; no rank sends more than in a
ring; and for 1,000 clips on 64 ranks it takes at most 50 ms to find who holds, sends and computes what. No rank runs
for that: the table is what the solver says (simulated), and `tests/attention/test_dealing.py` sees that ranks do it.

Claim, on two gloo ranks, forward and backward: attention by slices takes at most 1.15 times the time that the full ring
takes for as many pairs, by the clock and in the processor's time; no longer than one call for each clip; and less than
clips that are padded to the longest, under a key mask. On one rank it takes less than torch's attention under the dense
mask.

Before the clock starts, outputs and gradients of all sides of a case must be equal to 2e-5 of their largest value. How
to read the tables:

    dealt, in order, zigzag    pairs of the rank that has most over the mean, by who holds which tokens
    busiest, all    bytes, forward and backward in bf16, over those of a ring that passes all blocks on
    runs, tiles     of one rank, the most: pieces of the sequence that it holds, and calls of a kernel
    pairs           share of all pairs of queries and keys that are seen
    over slices     time of the side over that by slices, tokens dealt out, in turns; above 1, slices are faster
    time / pairs    share of the full ring's time over the share of the pairs that are seen; 1 is proportional
    busy / pairs    the same in the processor's time of the busiest rank, which others on the machine change less

    python tools/bench/slices.py --part work --only "1000 clips"
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Report, make_claim, make_table
from ranks import Job, World, run_tasks
from torch import Tensor

from opensora_accel.attention import local_attention, ring_attention, ulysses_attention
from opensora_accel.attention.slices import AttentionSlices, Deal, deal
from opensora_accel.communications import share_sizes

PARTS = ("work", "times")
RANK_COUNTS = (2, 8, 64)
MOST_IMBALANCE, MOST_SOLVER_MS, MOST_OVER_AREA = 1.05, 50.0, 1.15
SLOWEST = "1000 clips"
HEADS, HEAD_DIM = 8, 64
# Sums in another order, in fp32.
TOLERANCE = 2e-5
BLOCK_CAUSAL_FRAMES, BLOCK_FRAMES = 21, 3
# Lengths of the packed clips, in proportion: as uneven as those of a data set.
PROPORTIONS = (24, 6, 2, 16, 9, 1, 13, 10)
DEALT = "slices, dealt"
FULL = "all pairs"

# ---- work: what the solver says


def lognormal(number: int) -> list[int]:
    """Lengths of clips as data sets have them: most are short, few are long."""
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(number, generator=generator) * 0.8 + 7).exp().int().tolist()


def masks() -> dict[str, AttentionSlices]:
    """The masks of video training; a frame of 1,560 tokens is one of 480 × 832 pixels in Wan."""
    block_causal = partial(AttentionSlices.block_causal, tokens_per_frame=1560, block_frames=3)
    return {
        **{f"{number} clips": AttentionSlices.packed(lognormal(number)) for number in (12, 40, 1000)},
        "block causal": block_causal(81),
        "window 21, sink 3": block_causal(300, window_frames=21, sink_frames=3),
        "teacher forcing": AttentionSlices.teacher_forcing(21, 1560, block_frames=3),
        "sliding tiles": AttentionSlices.sliding(32, 48, 80, (12, 24, 24), tile=(4, 8, 8)),
        "causal": AttentionSlices.causal(32768),
    }


def zigzag(mask: AttentionSlices, num_ranks: int) -> Deal:
    """Each rank has a run from the front and its mirror from the rear."""
    sizes = share_sizes(mask.num_queries, 2 * num_ranks)
    (*runs,) = Deal.in_order(mask, sizes, sizes).runs
    return Deal(mask, tuple(runs[rank] + runs[-1 - rank] for rank in range(num_ranks)))


def solve(mask: AttentionSlices, num_ranks: int) -> Deal:
    """What a rank does before its first step: who holds what, and what it sends and computes itself."""
    shares = deal.__wrapped__(mask, num_ranks)  # without the cache
    shares.steps(num_ranks - 1)
    return shares


def count_work(name: str, mask: AttentionSlices, num_ranks: int, rounds: int) -> dict[str, Any]:
    """One row."""
    times = [harness.time_ms(partial(solve, mask, num_ranks), torch.device("cpu")) for _ in range(rounds)]
    shares, sizes = solve(mask, num_ranks), share_sizes(mask.num_queries, num_ranks)
    steps = [shares.steps(rank) for rank in range(num_ranks)]
    # Keys and values travel in bf16 in forward and again in backward, and their gradients come back in fp32, which is
    # as much: for each token that is sent and for each that is received, equally many bytes leave.
    tokens = [sum(step.num_sent + step.num_received for step in of_rank) for of_rank in steps]
    of_ring = 2 * (num_ranks - 1) * mask.num_queries / num_ranks
    return {
        "mask": name,
        "tokens": mask.num_queries,
        "slices": len(mask.slices),
        "ranks": num_ranks,
        "dealt": shares.imbalance,
        "in_order": Deal.in_order(mask, sizes, sizes).imbalance,
        "zigzag": zigzag(mask, num_ranks).imbalance,
        "busiest": max(tokens) / of_ring,
        "all": sum(tokens) / of_ring / num_ranks,
        "runs": max(map(len, shares.runs)),
        "tiles": max(sum(len(step.tiles) for step in of_rank) for of_rank in steps),
        "solver_ms": harness.spread(times),
    }


# ---- times: what a rank does


@dataclass(frozen=True)
class Call:
    """One call of an attention on this rank's tokens: their places in the sequence [B, n], and which are no padding."""

    attend: Callable[..., Tensor]
    at: Tensor
    is_real: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """One mask, and the ways to attend under it; all pairs, which is another attention, tells what a pair takes."""

    mask: AttentionSlices
    sides: dict[str, list[Call]]


class Prepared:
    """A side with its own leaves.

    Args:
        whole: q, k, v and the outer gradient of the whole sequence, [4, S, H, D], equal on all ranks.
    """

    def __init__(self, calls: Sequence[Call], whole: Tensor):
        self._calls, self._shape = calls, whole.shape
        self._inputs = [[each[call.at].requires_grad_() for each in whole[:3]] for call in calls]
        self._leaves = [leaf for leaves in self._inputs for leaf in leaves]
        self._grads = [
            whole[3][call.at] * (1 if call.is_real is None else call.is_real[:, :, None, None])
            for call in calls
        ]

    def run(self) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Outputs, and the gradients of q, k and v of each call."""
        outputs = [call.attend(*leaves) for call, leaves in zip(self._calls, self._inputs, strict=True)]
        return outputs, torch.autograd.grad(outputs, self._leaves, self._grads)

    def gathered(self) -> Tensor:
        """out, dq, dk, dv of the whole sequence, [4, S, H, D], on every rank."""
        outputs, grads = self.run()
        whole = torch.zeros(self._shape)
        for number, (call, output) in enumerate(zip(self._calls, outputs, strict=True)):
            real = torch.ones_like(call.at, dtype=torch.bool) if call.is_real is None else call.is_real
            for into, tensor in zip(
                whole, (output.detach(), *grads[3 * number : 3 * number + 3]), strict=True
            ):
                into[call.at[real]] = tensor[real]
        dist.all_reduce(whole)
        return whole


def packed(world: World, tokens: int) -> Case:
    """Eight clips in one row: by slices, one call for each, and padded to the longest."""
    lengths = [tokens * each // sum(PROPORTIONS) for each in PROPORTIONS]
    mask, group = AttentionSlices.packed(lengths), world.group
    clips = torch.arange(mask.num_queries).split(lengths)
    own = [clip.tensor_split(world.num_ranks)[world.rank] for clip in clips]
    longest = -(-max(lengths) // world.num_ranks)
    # A rank's part of each clip, padded: [8, longest share].
    padded = torch.stack([F.pad(part, (0, longest - len(part))) for part in own])
    is_real = torch.stack([torch.arange(longest) < len(part) for part in own])
    sides = {
        "slices, Ulysses": [Call(partial(ulysses_attention, group=group, slices=mask), in_order(world, mask))]
    }
    for name, attention in (("ring", ring_attention), ("Ulysses", ulysses_attention)):
        sides[f"8 calls, {name}"] = [Call(partial(attention, group=group), part[None]) for part in own]
        masked = partial(attention, group=group, mask=is_real)
        sides[f"padded, {name}"] = [Call(masked, padded, is_real)]
    return Case(mask, by_slices(world, mask) | sides | all_pairs(world, mask))


def block_causal(world: World, tokens: int) -> Case:
    """Blocks of three frames that see themselves and those before: dealt out, and in order."""
    mask = block_causal_mask(tokens)
    kept = Call(partial(ring_attention, group=world.group, slices=mask), in_order(world, mask))
    return Case(mask, by_slices(world, mask) | {"slices, in order": [kept]} | all_pairs(world, mask))


def on_one_rank(_world: World, tokens: int) -> Case:
    """The same on one rank, beside torch's attention under the dense mask."""
    mask = block_causal_mask(tokens)
    at, dense = torch.arange(mask.num_queries)[None], mask.dense()

    def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (each.transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, attn_mask=dense).transpose(1, 2)

    attentions = {
        DEALT: partial(local_attention, slices=mask),
        "dense mask": torch_attention,
        FULL: local_attention,
    }
    return Case(mask, {name: [Call(attend, at)] for name, attend in attentions.items()})


def block_causal_mask(tokens: int) -> AttentionSlices:
    return AttentionSlices.block_causal(
        BLOCK_CAUSAL_FRAMES, tokens // BLOCK_CAUSAL_FRAMES, block_frames=BLOCK_FRAMES
    )


def by_slices(world: World, mask: AttentionSlices) -> dict[str, list[Call]]:
    shares = deal(mask, world.num_ranks)
    attend = partial(ring_attention, group=world.group, slices=shares)
    return {DEALT: [Call(attend, shares.positions(world.rank)[None])]}


def all_pairs(world: World, mask: AttentionSlices) -> dict[str, list[Call]]:
    return {FULL: [Call(partial(ring_attention, group=world.group), in_order(world, mask))]}


def in_order(world: World, mask: AttentionSlices) -> Tensor:
    """[1, S/P]: a run of the sequence for each rank."""
    return torch.arange(mask.num_queries).tensor_split(world.num_ranks)[world.rank][None]


# By the number of ranks and the share of --tokens: on one rank a dense mask would take minutes.
CASES: dict[str, tuple[Callable[[World, int], Case], int, int]] = {
    "packed": (packed, 2, 1),
    "block causal": (block_causal, 2, 1),
    "block causal, alone": (on_one_rank, 1, 4),
}


def run_task(world: World, task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of one case; a barrier stands before each turn, and the slowest rank counts."""
    case = CASES[task["case"]][0](world, task["tokens"])
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, case.mask.num_queries, HEADS, HEAD_DIM, generator=generator)
    sides = {name: Prepared(calls, whole) for name, calls in case.sides.items()}
    expected = sides[DEALT].gathered()
    for name, side in sides.items():
        error = float(
            ((side.gathered() - expected).abs().amax((1, 2, 3)) / expected.abs().amax((1, 2, 3))).max()
        )
        # All pairs must differ, or no mask was applied.
        if (error <= TOLERANCE) == (name == FULL):
            raise ValueError(f"{name} differs from {DEALT} by {error:.1e} on rank {world.rank}")
    busy = {name: list[float]() for name in sides}

    def turn(name: str) -> float:
        start = time.process_time()
        elapsed_ms = harness.time_ms(sides[name].run, world.device)
        busy[name].append((time.process_time() - start) * 1e3)
        return elapsed_ms

    times = world.largest(harness.take_turns({name: partial(turn, name) for name in sides}, task["rounds"]))
    busy = world.largest({name: values[harness.WARM_UP_ROUNDS :] for name, values in busy.items()})
    share = case.mask.area / case.mask.num_queries**2
    rows = []
    for name, values in times.items():
        row = {"case": task["case"], "side": name, "ranks": world.num_ranks, "tokens": case.mask.num_queries}
        row |= {"pairs": share, "ms": harness.spread(values), "busy_ms": harness.spread(busy[name])}
        row["over_slices"] = None if name == DEALT else harness.ratios(values, times[DEALT])
        if name.startswith("slices"):
            for key, of in (("over_area", times), ("busy_over_area", busy)):
                row[key] = harness.spread(
                    [one / other / share for one, other in zip(of[name], of[FULL], strict=True)]
                )
        rows.append(row)
    return rows


# ---- claims


def claims_of_work(rows: Sequence[Mapping[str, Any]], *, is_timed: bool) -> Iterator[dict[str, Any]]:
    for num_ranks in RANK_COUNTS:
        of_count = [row for row in rows if row["ranks"] == num_ranks]
        if of_count:
            where = f"{num_ranks} ranks, {len(of_count)} masks"
            most = max(row["dealt"] for row in of_count)
            yield make_claim(
                f"{where}: largest share of the pairs over the mean", most, "at most", MOST_IMBALANCE
            )
            most = max(row["busiest"] for row in of_count)
            yield make_claim(f"{where}: bytes of the busiest rank over a ring's", most, "at most", 1.0)
    for row in (row for row in rows if row["mask"] == SLOWEST and row["ranks"] == max(RANK_COUNTS)):
        value = row["solver_ms"]["median"] if is_timed else None
        yield make_claim(
            f"{SLOWEST}, {row['ranks']} ranks: ms of the solver", value, "at most", MOST_SOLVER_MS
        )


def claims_of_times(rows: Sequence[Mapping[str, Any]], *, is_timed: bool) -> Iterator[dict[str, Any]]:
    for row in rows:
        where, name = f"{row['case']}, {row['ranks']} rank(s)", row["side"]
        if name == DEALT:
            for key, what in (("over_area", "time"), ("busy_over_area", "the processor's time")):
                value = row[key]["median"] if is_timed else None
                yield make_claim(
                    f"{where}: {what} over that of as many pairs", value, "at most", MOST_OVER_AREA
                )
        elif name.startswith(("8 calls", "padded", "dense")):
            value = row["over_slices"]["median"] if is_timed else None
            yield make_claim(f"{where}: {name} over {DEALT}", value, "at least", 1.0)


# ---- the command

WORK = {"mask": "mask", "tokens": "tokens", "slices": "slices", "ranks": "ranks", "dealt": "dealt"}
WORK |= {"in order": "in_order", "zigzag": "zigzag", "busiest": "busiest", "all": "all", "runs": "runs"}
WORK |= {"tiles": "tiles", "solver ms": "solver_ms"}
TIMES = {"case": "case", "side": "side", "ranks": "ranks", "tokens": "tokens", "pairs": "pairs", "ms": "ms"}
TIMES |= {"over slices": "over_slices", "time / pairs": "over_area", "busy / pairs": "busy_over_area"}
# A figure of others, for masks of their own.
PUBLISHED = (
    "beside it: of what a ring sends, 25 % is needed by nobody under a causal mask, and more than 33 % in packed "
    "block-causal clips, where ranks hold runs in order (published by MagiAttention, "
    "https://sandai-org.github.io/MagiAttention/docs/v1.1.0/blog/magi_attn.html; not run here)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 where a case fails. Claims that do not hold are printed and stored."""
    parser = harness.make_parser("slices", __doc__, rounds=7)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: both")
    parser.add_argument(
        "--tokens", type=int, default=8400, help="of the sequences that are timed (default: 8400)"
    )
    arguments = sys.argv[1:] if arguments is None else arguments
    # Also on a machine with GPUs.
    arguments = ["--device", "cpu", *arguments]
    options = harness.parse_options(parser, arguments, {"quick": {"tokens": 420, "rounds": 2}})
    by_name = masks()
    if not any(options.only in name for name in [*by_name, *CASES]):
        parser.error(f"--only {options.only!r} is in no name; they are {', '.join([*by_name, *CASES])}")
    if options.device != "cpu":
        parser.error(
            "--device: it times gloo ranks on a CPU, in fp32, which no GPU's flash kernel takes; leave it out"
        )
    report = Report(options, backend="gloo", heads=HEADS, head_dim=HEAD_DIM, work=[], times=[])
    result, failed = report.result, False
    for name, mask in by_name.items() if "work" in options.part else ():
        if options.only in name:
            harness.say(f"work: {name}")
            result["work"] += [count_work(name, mask, ranks, options.rounds) for ranks in RANK_COUNTS]
    result["claims"] += claims_of_work(result["work"], is_timed=not options.quick)
    if result["work"]:
        report.show(
            make_table("Work and bytes, simulated: as the solver says", WORK, result["work"], [PUBLISHED])
        )
    for name, (_, num_ranks, part) in CASES.items() if "times" in options.part else ():
        if options.only in name:
            task = {"label": name, "case": name, "tokens": options.tokens // part, "rounds": options.rounds}
            (outcome,) = run_tasks(Job("slices", num_ranks, limit_s=600.0), [task])
            if outcome.status == "done":
                result["times"] += outcome.found
            else:
                failed = True
                print(f"error: {name} {outcome.status}: {outcome.reason}", file=sys.stderr)
    result["claims"] += claims_of_times(result["times"], is_timed=not options.quick)
    if result["times"]:
        title = f"Forward and backward, fp32, H {HEADS}, D {HEAD_DIM}, one thread a rank, in turns"
        report.show(make_table(title, TIMES, result["times"]))
    report.finish()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
