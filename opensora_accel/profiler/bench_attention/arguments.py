"""The options of the benchmark, and what it says about itself."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch

from opensora_accel.profiler.bench_attention.environments import INSTALLS
from opensora_accel.profiler.bench_attention.peers import SIDES, find_side
from opensora_accel.profiler.bench_attention.results import PROGRAM
from opensora_accel.profiler.bench_offload.picture import require_matplotlib

PARTS = ("errors", "bytes", "times")
QUICK_ROUNDS, QUICK_TOKENS = 3, 192

DESCRIPTION = """\
Attention over the ranks of this machine, ours beside everybody else's. First what is the same in every run: the error
of the output and of every gradient against full attention in fp64; then the collectives, the bytes on the wire and the
bytes kept for backward of one layer; and last the times, ours and one peer in turns in the same processes.

A peer that needs an environment of its own runs in --environments/NAME, where `--install-peers` puts it; without it
the peer is skipped, with the reason. Whatever a peer does, the run goes on: it raises, aborts or hangs in the table."""

EXAMPLES = f"""\
{textwrap.fill("sides: " + ", ".join(SIDES), 118)}

examples:
  {PROGRAM} --install-peers                    make the peers' environments first (once, 1 GB each)
  {PROGRAM}                                    everything, on 2, 3 and 4 ranks
  {PROGRAM} --part errors --only ring          gradient errors of the sides whose name holds "ring"
  {PROGRAM} --part times --only "diffusers ulysses"        one row of the table of times
  {PROGRAM} --quick --ranks 2                  checks that all runs; its times say nothing
  {PROGRAM} --output result.json --markdown result.md --picture result.png
  {PROGRAM} --also my_package.mine:SIDE        a Side of your own, beside ours

how to read the tables:
  gradients  one number for out, dq, dk, dv and all ranks. WRONG: above what rounding explains. –: not offered by the
             side's interface. raises, aborts, hangs: the reason is below the table
  sent / q   bytes that the busiest rank sends in one forward and backward, over the bytes of its own q
  kept / q   bytes that only the graph holds between forward and backward, its inputs included, over those of q
  side ms    forward and backward of one attention; a barrier stands before each, the slowest rank counts
  side / ours  median, over the rounds, of the ratio of two turns that follow each other, and its quartiles"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, with what was left out filled in for the device. Exits on what cannot be."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_what(parser)
    _add_sizes(parser)
    add = parser.add_argument
    add("--install-peers", action="store_true", help=f"make the environments of {', '.join(INSTALLS)}")
    add("--environments", type=Path, default=Path(".bench-venv"), metavar="DIR", help="default: .bench-venv")
    add("--timeout", type=float, default=60.0, metavar="S", help="a silence that is a hang (default: 60)")
    add("--output", type=Path, metavar="FILE", help="write all figures here, as JSON")
    add("--markdown", type=Path, metavar="FILE", help="write the tables here")
    add("--picture", type=Path, metavar="FILE", help="draw a PNG here")
    parsed = parser.parse_args(arguments)
    _fill_in(parsed)
    _check(parser, parsed)
    return parsed


def _add_what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help="only sides whose name holds TEXT")
    add("--also", action="append", default=[], metavar="MODULE:SIDE", help="a Side that is defined elsewhere")
    add("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--ranks", type=int, nargs="+", default=[2, 3, 4], help="of errors and bytes (default: 2 3 4)")
    add("--time-ranks", type=int, nargs="+", default=[2], help="of times (default: 2)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where every rank has a GPU")
    add("--quick", action="store_true", help=f"{QUICK_TOKENS} tokens and {QUICK_ROUNDS} rounds in times")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes of what is timed")
    sizes.add_argument("--tokens", type=int, help="of the whole sequence (2048; 32768 on CUDA)")
    sizes.add_argument("--heads", type=int, help="default: 8; 24 on CUDA")
    sizes.add_argument("--head-dim", type=int, help="default: 64; 128 on CUDA")
    sizes.add_argument("--batch", type=int, default=1, help="default: 1")
    sizes.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32; bfloat16 on CUDA")
    sizes.add_argument("--rounds", type=int, help="turns of each side (default: 15)")


def _fill_in(parsed: argparse.Namespace) -> None:
    most = max(parsed.ranks + parsed.time_ranks)
    parsed.device = parsed.device or ("cuda" if torch.cuda.device_count() >= most else "cpu")
    small = {"tokens": 2048, "heads": 8, "head_dim": 64, "dtype": "float32", "rounds": 15}
    large = {"tokens": 32768, "heads": 24, "head_dim": 128, "dtype": "bfloat16", "rounds": 15}
    defaults = large if parsed.device == "cuda" else small
    if parsed.quick:
        defaults |= {"tokens": QUICK_TOKENS, "rounds": QUICK_ROUNDS}
    for name, value in defaults.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)


def _check(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    if parsed.picture:
        try:
            require_matplotlib()
        except ValueError as error:
            parser.error(str(error))
    for name in ("tokens", "heads", "head_dim", "batch"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1; got {getattr(parsed, name)}")
    for name in ("ranks", "time_ranks"):
        if min(getattr(parsed, name)) < 2:
            parser.error(
                f"--{name.replace('_', '-')} must be at least 2: one rank has nobody to send to; got "
                f"{min(getattr(parsed, name))}"
            )
    if parsed.rounds < 2:
        parser.error(f"--rounds must be at least 2, for quartiles; got {parsed.rounds}")
    for num_ranks in parsed.time_ranks:
        if parsed.tokens % (2 * num_ranks) or parsed.heads % num_ranks:
            parser.error(
                f"--tokens ({parsed.tokens}) must be a multiple of {2 * num_ranks} and --heads ({parsed.heads}) of "
                f"{num_ranks}, on {num_ranks} ranks: most peers know no other sizes"
            )
    most = max(parsed.ranks + parsed.time_ranks)
    if parsed.device == "cuda" and torch.cuda.device_count() < most:
        parser.error(
            f"--device cuda needs a GPU for each of {most} ranks, and there are {torch.cuda.device_count()}; use "
            "--device cpu, or fewer ranks"
        )
    names = [find_side(name).name for name in parsed.also]
    if not any(parsed.only in name for name in (*SIDES, *names)):
        parser.error(f"--only {parsed.only!r} is in no side's name; they are {', '.join((*SIDES, *names))}")
