"""The command line: which cases, what is printed, what is written."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from opensora_accel.profiler.bench_offload.arguments import num_heads, parse
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
from opensora_accel.profiler.bench_offload.workload import Case


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0, or 1 when a scheme's gradients differ. Claims that fail are printed and stored."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = parse(given)
    device = _device(parsed.device)
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
            _store(parsed.output, result)
    except GradientsDiffer as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _draw(parsed.picture, result)
    return 0


def _measure(case: Case, options: Options, result: dict[str, Any]) -> None:
    with progress(case.name) as note:
        measured = measure_case(case, options, note)
    result["cases"].append(case_to_dict(case, measured))
    found = claims(case, measured)
    result["claims"] += found
    print("\n" + "\n".join([*table(result["cases"][-1]), "claims:", *map(claim_line, found)]), flush=True)


def _store(path: Path | None, result: dict[str, Any]) -> None:
    """After every case: hours later the next one may run into a limit of time."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_as_json(result), encoding="utf-8")
        print(f"written to {path}")


def _draw(path: Path | None, result: dict[str, Any]) -> None:
    if path:
        from opensora_accel.profiler.bench_offload.picture import draw

        path.parent.mkdir(parents=True, exist_ok=True)
        draw(result, path)
        print(f"drawn to {path}")


def _as_json(result: dict[str, Any]) -> str:
    """Lists of numbers on one line each, or a timeline would be most of the file's lines."""

    def joined(found: re.Match[str]) -> str:
        return "[" + ", ".join(part.strip() for part in found[1].split(",")) + "]"

    return re.sub(r"\[([-+.\deE,\s]+)\]", joined, json.dumps(result, indent=1)) + "\n"


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
        heads=num_heads(parsed, hidden),
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
    return shlex.join(["opensora-accel", "bench", "offload", *shown])
