"""The command line: which cases, what is printed, what is written."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from opensora_accel.profiler.bench_offload.claims import claims
from opensora_accel.profiler.bench_offload.measure import GradientsDiffer, Options, measure_case
from opensora_accel.profiler.bench_offload.progress import progress
from opensora_accel.profiler.bench_offload.report import (
    CPU_ONLY,
    case_to_dict,
    claim_line,
    date,
    hardware,
    table,
    versions,
)
from opensora_accel.profiler.bench_offload.schemes import NAMES
from opensora_accel.profiler.bench_offload.workload import Case

DESCRIPTION = """\
Runs training steps (forward, loss, backward) of a stack of plain DiT blocks under every way to keep or move what a
block's backward starts from, side by side in one run, and compares time, memory and bytes moved.

Before anything is timed, the gradients of every scheme must equal those of "full" bit for bit (exit status 1)."""

EXAMPLES = f"""\
schemes: {", ".join(NAMES)}

examples:
  python tools/bench_offload.py                          small on a CPU (accounting only), large on a GPU
  python tools/bench_offload.py --only offload           only the schemes whose name holds this text, and "full"
  python tools/bench_offload.py --hidden 3072 --tokens 30000 75000 --budget-gib 80 --verify-longest
  python tools/bench_offload.py --blocks 16 --output result.json --picture result.png

how to read the table:
  step ms    median over the rounds and its quartiles; the schemes take turns, in an order that changes
  vs full    step time over that of checkpointing alone in the same round; 1.02 is two percent slower
  resident   on the device after the forward, above weights, gradients and data, the engine's slots included
  peak       the most within the step, counted likewise. CUDA: by the allocator; CPU: by counting storages
  slots      of it, the two places where our engine fetches blocks to; they stay between steps
  out, in    bytes copied in one step; theory is what the scheme has to copy each way
  hidden     of the time that copies took, how much lay beside compute kernels (CUDA only, from a profiler trace)
  longest    tokens at which weights, gradients and peak fill --budget-gib. Extrapolated: a straight line through
             this length and half of it. "ok": --verify-longest ran {0.98:.0%} of it within the budget"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0, or 1 when a scheme's gradients differ. Claims that fail are printed and stored."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = _parse(given)
    device = _device(parsed.device)
    if parsed.picture:
        from opensora_accel.profiler.bench_offload.picture import require_matplotlib

        require_matplotlib()  # before minutes of measuring
    cases = [_case(parsed, device, hidden, tokens) for hidden in parsed.hidden for tokens in parsed.tokens]
    options = Options(
        rounds=parsed.rounds,
        budget_bytes=_budget_bytes(parsed, device),
        only=parsed.only,
        with_timeline=parsed.picture is not None,
        verify_longest=parsed.verify_longest,
    )
    if device.type == "cpu":
        print(CPU_ONLY)
    result: dict[str, Any] = {
        "note": CPU_ONLY if device.type == "cpu" else None,
        "hardware": hardware(device),
        "versions": versions(),
        "command": _command(given),
        "date": date(),
        "rounds": options.rounds,
        "budget_bytes": options.budget_bytes,
        "cases": [],
        "claims": [],
    }
    try:
        for case in cases:
            _measure(case, options, result)
    except GradientsDiffer as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _write(parsed, result)
    return 0


def _measure(case: Case, options: Options, result: dict[str, Any]) -> None:
    with progress(case.name) as note:
        measured = measure_case(case, options, note)
    result["cases"].append(case_to_dict(case, measured))
    found = claims(case, measured)
    result["claims"] += found
    print("\n" + "\n".join([*table(result["cases"][-1]), "claims:", *map(claim_line, found)]), flush=True)


def _write(parsed: argparse.Namespace, result: dict[str, Any]) -> None:
    for path in filter(None, (parsed.output, parsed.picture)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if parsed.output:
        parsed.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {parsed.output}")
    if parsed.picture:
        from opensora_accel.profiler.bench_offload.picture import draw

        draw(result, parsed.picture)
        print(f"drawn to {parsed.picture}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_offload",
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
    add("--picture", type=Path, metavar="PNG", help="draw the last case: memory over the step, and the queues")
    parsed = parser.parse_args(arguments)
    _fill_in(parsed)
    _check(parser, parsed)
    return parsed


def _fill_in(parsed: argparse.Namespace) -> None:
    parsed.device = parsed.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = parsed.device == "cuda"
    small = {"hidden": [128], "tokens": [512], "blocks": 6, "dtype": "float32", "rounds": 7}
    large = {"hidden": [3072, 5120], "tokens": [30_000, 75_000], "blocks": 8, "dtype": "bfloat16", "rounds": 5}
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
        heads = _heads(parsed, hidden)
        if hidden % heads:
            parser.error(f"--hidden ({hidden}) must be divisible by --heads ({heads}); leave --heads out")
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; use --device cpu, or a torch built for CUDA")
    if not any(parsed.only in name for name in NAMES):
        parser.error(f"--only {parsed.only!r} is in no scheme's name; they are {', '.join(NAMES)}")


def _heads(parsed: argparse.Namespace, hidden: int) -> int:
    return parsed.heads or max(1, hidden // (128 if parsed.device == "cuda" else 32))


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    # Read when CUDA starts. cuBLAS needs the first to be deterministic, which the check of gradients asks for; the
    # second keeps one scheme's freed memory usable for the next.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return torch.device("cuda", torch.cuda.current_device())


def _case(parsed: argparse.Namespace, device: torch.device, hidden: int, tokens: int) -> Case:
    return Case(
        hidden=hidden,
        heads=_heads(parsed, hidden),
        tokens=tokens,
        batch=parsed.batch,
        blocks=parsed.blocks,
        dtype=getattr(torch, parsed.dtype),
        device=device,
        keep_last=parsed.keep_last,
    )


def _budget_bytes(parsed: argparse.Namespace, device: torch.device) -> int:
    if parsed.budget_gib is not None:
        return int(parsed.budget_gib * 2**30)
    return 2**30 if device.type == "cpu" else int(0.9 * torch.cuda.get_device_properties(device).total_memory)


def _command(arguments: Sequence[str]) -> str:
    """As it can be typed elsewhere: of paths only the name."""
    shown = []
    for argument in arguments:
        option, equals, value = argument.rpartition("=")
        shown.append(option + equals + (Path(value).name if "/" in value else value))
    return shlex.join(["python", "tools/bench_offload.py", *shown])
