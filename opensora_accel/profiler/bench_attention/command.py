"""The command: what is asked for, what is printed, what is written."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from opensora_accel.profiler.bench_attention.arguments import parse
from opensora_accel.profiler.bench_attention.bench import Bench, Settings, say_skipped
from opensora_accel.profiler.bench_attention.claims import claims
from opensora_accel.profiler.bench_attention.environments import INSTALLS, install, place_of
from opensora_accel.profiler.bench_attention.peers import SIDES, find_side
from opensora_accel.profiler.bench_attention.picture import draw
from opensora_accel.profiler.bench_attention.plan import chosen, of_ours
from opensora_accel.profiler.bench_attention.problem import Problem
from opensora_accel.profiler.bench_attention.report import claim_line, markdown, tables
from opensora_accel.profiler.bench_attention.results import NOT_OFFERED, PROGRAM, SKIPPED
from opensora_accel.profiler.bench_attention.side import Side
from opensora_accel.profiler.bench_offload.report import date, hardware, versions


def run(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 when a side of ours is wrong or fails. Claims that fail are printed and stored."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = parse(given)
    sides = chosen([*SIDES.values(), *map(find_side, parsed.also)], parsed.only)
    if parsed.install_peers:
        _install(sides, parsed.environments)
    bench = Bench(sides, _settings(parsed))
    say_skipped(bench)
    result = _head(parsed, given, bench)
    measure = {"errors": bench.errors, "bytes": bench.bytes, "times": bench.times}
    for part in measure:
        if part in parsed.part:
            result[part] = measure[part]()
            _show(part, result)
            # Of a quick run the times say nothing.
            times = [] if parsed.quick else result["times"]
            result["claims"] = claims(result["errors"], result["bytes"], times)
            _store(parsed, result)
    if result["claims"]:
        print("\n".join(["\nclaims:", *map(claim_line, result["claims"])]), flush=True)
    return 0 if _ours_are_right(result) else 1


def _install(sides: Sequence[Side], folder: Path) -> None:
    """What cannot be installed is skipped later."""
    for name in INSTALLS:
        wanted = [side for side in sides if side.environment == name]
        if wanted and place_of(wanted[0], folder) is None:
            try:
                install(name, folder, lambda text: print(text, file=sys.stderr, flush=True))
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"{name} was not installed: {error}", file=sys.stderr, flush=True)


def _settings(parsed: argparse.Namespace) -> Settings:
    timed = Problem(
        "full",
        queries=parsed.tokens,
        keys=parsed.tokens,
        heads=parsed.heads,
        kv_heads=parsed.heads,
        head_dim=parsed.head_dim,
        batch=parsed.batch,
        dtype=parsed.dtype,
    )
    return Settings(
        ranks=parsed.ranks,
        time_ranks=parsed.time_ranks,
        timed=timed,
        rounds=parsed.rounds,
        device=parsed.device,
        silence_s=parsed.timeout,
        environments=parsed.environments,
    )


def _head(parsed: argparse.Namespace, given: Sequence[str], bench: Bench) -> dict[str, Any]:
    return {
        "hardware": hardware(torch.device(parsed.device)),
        "load_average_at_start": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": versions() | bench.versions,
        "command": _command(given),
        "date": date(),
        "backend": "nccl" if parsed.device == "cuda" else "gloo",
        "skipped": bench.skipped,
        "errors": [],
        "bytes": [],
        "times": [],
        "claims": [],
    }


def _command(arguments: Sequence[str]) -> str:
    """As it can be typed elsewhere: of paths only the name."""
    shown = []
    for argument in arguments:
        option, equals, value = argument.rpartition("=")
        shown.append(option + equals + (Path(value).name if "/" in value else value))
    return f"{PROGRAM} {shlex.join(shown)}".strip()


def _show(part: str, result: dict[str, Any]) -> None:
    empty: dict[str, Any] = {"errors": [], "bytes": [], "times": []}
    for table in tables(empty | {part: result[part]}):
        print("\n".join(table.text()), flush=True)


def _store(parsed: argparse.Namespace, result: dict[str, Any]) -> None:
    """After every part: the next may take long."""
    # Lists of numbers on one line each, or the rounds would be most of the file's lines.
    text = re.sub(r"\[([-+.\deE,\s]+)\]", _joined, json.dumps(result, indent=1, ensure_ascii=False))
    for path, content in ((parsed.output, text + "\n"), (parsed.markdown, markdown(result))):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    if parsed.picture:
        parsed.picture.parent.mkdir(parents=True, exist_ok=True)
        draw(result, parsed.picture)


def _joined(found: re.Match[str]) -> str:
    return "[" + ", ".join(part.strip() for part in found[1].split(",")) + "]"


def _ours_are_right(result: dict[str, Any]) -> bool:
    """What is not offered, or has not been written yet, is not wrong."""
    rows = [row for row in result["errors"] if of_ours(row["side"])]
    return all(row.get("right") for row in rows if row["status"] not in (NOT_OFFERED, SKIPPED))
