"""The options of the benchmark, and what it says about itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from opensora_accel.profiler.bench_offload.measure import VERIFIED_SHARE
from opensora_accel.profiler.bench_offload.schemes import NAMES

DESCRIPTION = """\
Runs training steps (forward, loss, backward) of a stack of plain DiT blocks under every way to keep or move what a
block's backward starts from, side by side in one run, and compares time, memory and bytes moved.

Before anything is timed, the gradients of every scheme must equal those of "full" bit for bit (exit status 1)."""

EXAMPLES = f"""\
schemes: {", ".join(NAMES)}

examples:
  opensora-accel bench offload                          small on a CPU (accounting only), large on a GPU
  opensora-accel bench offload --only offload           only the schemes whose name holds this text, and "full"
  opensora-accel bench offload --hidden 3072 --tokens 30000 75000 --budget-gib 80 --verify-longest
  opensora-accel bench offload --blocks 16 --output result.json --picture result.png

how to read the table:
  step ms    median over the rounds and its quartiles; the schemes take turns, in an order that changes
  vs full    step time over that of checkpointing alone in the same round; 1.02 is two percent slower
  resident   on the device after the forward, above weights, gradients and data, the engine's slots included
  peak       the most within the step, counted likewise. CUDA: by the allocator; CPU: by counting storages
  slots      of it, the two places where our engine fetches blocks to; they stay between steps
  out, in    bytes copied in one step; theory is what the scheme has to copy each way
  hidden     of the time that copies took, how much lay beside compute kernels (CUDA only, from a profiler trace)
  longest    tokens at which weights, gradients and peak fill --budget-gib. Extrapolated: a straight line through
             this length and half of it. "ok": --verify-longest ran {VERIFIED_SHARE:.0%} of it within the budget"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, with what was left out filled in for the device. Exits on what cannot be."""
    parser = argparse.ArgumentParser(
        prog="opensora-accel bench offload",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    add("--hidden", type=int, nargs="+", help="channels; several make several cases (128; 3072 5120 on CUDA)")
    add("--heads", type=int, help="default: heads of 128 channels on CUDA, of 32 on a CPU")
    add("--tokens", type=int, nargs="+", help="length of the sequence (512; 30000 75000 on CUDA)")
    add("--blocks", type=int, help="default: 6; 8 on CUDA")
    add("--batch", type=int, default=1, help="default: 1")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32; bfloat16 on CUDA")
    add("--rounds", type=int, help="timed steps of each scheme (7; 5 on CUDA)")
    add("--keep-last", type=int, default=1, help="last blocks that ours never moves (default: 1)")
    add("--budget-gib", type=float, help="device memory to fill (1; 90 %% of the device on CUDA)")
    add("--verify-longest", action="store_true", help="run the extrapolated lengths too, which takes long")
    add("--only", default="", metavar="TEXT", help="only schemes whose name holds TEXT, and full")
    add("--output", type=Path, metavar="JSON", help="write all figures here")
    add(
        "--picture", type=Path, metavar="PNG", help="draw the last case: memory over the step, and the queues"
    )
    parsed = parser.parse_args(arguments)
    _fill_in(parsed)
    _check(parser, parsed)
    return parsed


def _fill_in(parsed: argparse.Namespace) -> None:
    parsed.device = parsed.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = parsed.device == "cuda"
    small = {"hidden": [128], "tokens": [512], "blocks": 6, "dtype": "float32", "rounds": 7}
    large = {
        "hidden": [3072, 5120],
        "tokens": [30_000, 75_000],
        "blocks": 8,
        "dtype": "bfloat16",
        "rounds": 5,
    }
    for name, value in (large if on_cuda else small).items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)


def _check(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    for name in ("hidden", "tokens", "blocks", "batch", "heads"):
        value = getattr(parsed, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < 1:
                parser.error(f"--{name} must be at least 1; got {number}")
    if parsed.rounds < 2:
        parser.error(f"--rounds must be at least 2, for quartiles; got {parsed.rounds}")
    if parsed.keep_last < 0:
        parser.error(f"--keep-last is a number of blocks, at least 0; got {parsed.keep_last}")
    if parsed.budget_gib is not None and parsed.budget_gib <= 0:
        parser.error(f"--budget-gib must be above 0; got {parsed.budget_gib:g}")
    for hidden in parsed.hidden:
        heads = num_heads(parsed, hidden)
        if hidden % heads:
            parser.error(f"--hidden ({hidden}) must be divisible by --heads ({heads}); leave --heads out")
    _check_tools(parser, parsed)


def _check_tools(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """What has to be here, said now and not after minutes of measuring."""
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; use --device cpu, or a torch built for CUDA")
    if parsed.picture:
        from opensora_accel.profiler.bench_offload.picture import require_matplotlib

        try:
            require_matplotlib()
        except ValueError as error:
            parser.error(str(error))
    if not any(parsed.only in name for name in NAMES):
        parser.error(f"--only {parsed.only!r} is in no scheme's name; they are {', '.join(NAMES)}")


def num_heads(parsed: argparse.Namespace, hidden: int) -> int:
    return parsed.heads or max(1, hidden // (128 if parsed.device == "cuda" else 32))
