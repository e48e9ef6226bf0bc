"""The figures of a run as a table to read and as plain data to keep."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opensora_accel.profiler.bench_offload.measure import Measured
from opensora_accel.profiler.bench_offload.schemes import REFERENCE
from opensora_accel.profiler.bench_offload.workload import Case

CPU_ONLY = "accounting only: on a CPU host and device memory are one, so step times say nothing about hiding"

Results = Mapping[str, Measured]


def step_time_ratio(results: Results, name: str) -> float | None:
    """Median over the rounds of this scheme's step time by that of checkpointing alone in the same round."""
    if name not in results or REFERENCE not in results:
        return None
    pairs = list(zip(results[name].times_ms, results[REFERENCE].times_ms, strict=False))
    return statistics.median(ours / theirs for ours, theirs in pairs) if pairs else None


def case_to_dict(case: Case, results: Results) -> dict[str, Any]:
    schemes = {name: _scheme_to_dict(case, results, name) for name in results}
    return {"name": case.name, **case.to_dict(), "schemes": schemes}


def _scheme_to_dict(case: Case, results: Results, name: str) -> dict[str, Any]:
    result = results[name]
    figures: dict[str, Any] = {"status": result.status, "reason": result.reason}
    if result.status != "measured":
        return figures
    figures |= {
        "gradients_equal": True,
        "step_time_ms": _spread(result.times_ms),
        "tokens_per_s": _tokens_per_s(case, result),
        "step_time_ratio": step_time_ratio(results, name),
        "theory_bytes": result.theory_bytes,
        "copy_time_hidden_share": result.hidden_share,
        "decision": result.decision,
        "longest_tokens_extrapolated": result.longest,
        "longest_verified": result.verified,
        "longest_verified_total_bytes": result.verified_bytes,
    }
    if result.memory is not None:
        memory = result.memory
        names = ("baseline", "resident", "peak", "slot", "out", "in")
        figures |= {f"{key}_bytes": getattr(memory, f"{key}_bytes") for key in names}
        figures["timeline"] = memory.timeline()
    if result.queues is not None:
        figures["queues"] = result.queues.to_dict()
    return figures


def _spread(times_ms: Sequence[float]) -> dict[str, Any] | None:
    if len(times_ms) < 2:
        return None
    q1, median, q3 = statistics.quantiles(times_ms, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "rounds": [round(value, 4) for value in times_ms]}


def _tokens_per_s(case: Case, result: Measured) -> float | None:
    return None if result.median_ms is None else case.batch * case.tokens / result.median_ms * 1000


# ---- the table

COLUMNS = (
    ("scheme", 18),
    ("step ms [quartiles]", 24),
    ("tokens/s", 9),
    ("vs full", 7),
    ("resident", 9),
    ("peak", 9),
    ("slots", 9),
    ("out", 9),
    ("in", 9),
    ("theory", 9),
    ("hidden", 6),
    ("longest", 9),
)


def table(case: dict[str, Any]) -> Iterator[str]:
    """Lines; sizes are in MiB, the longest sequence is extrapolated."""
    yield f"{case['name']}  (one block input: {_mib(case['block_input_bytes'])} MiB; sizes below in MiB)"
    yield _line([name for name, _ in COLUMNS])
    for name, scheme in case["schemes"].items():
        yield _row(name, scheme)
    for name, scheme in case["schemes"].items():
        if scheme.get("decision"):
            yield f"{name}: {scheme['decision']}"


def _row(name: str, scheme: dict[str, Any]) -> str:
    if scheme["status"] != "measured":
        reason = f": {scheme['reason']}" if scheme["reason"] else ""
        return f"{name:<{COLUMNS[0][1]}}  {scheme['status']}{reason}"
    times, ratio, hidden = scheme["step_time_ms"], scheme["step_time_ratio"], scheme["copy_time_hidden_share"]
    longest = scheme["longest_tokens_extrapolated"]
    verified = {True: " ok", False: " NO", None: ""}[scheme["longest_verified"]]
    cells = [
        name,
        f"{times['median']:.1f} [{times['q1']:.1f}, {times['q3']:.1f}]" if times else "-",
        f"{scheme['tokens_per_s']:.0f}",
        "-" if ratio is None else f"{ratio:.3f}",
        *(_mib(scheme[f"{key}_bytes"]) for key in ("resident", "peak", "slot", "out", "in", "theory")),
        "-" if hidden is None else f"{hidden:.1%}",
        "-" if longest is None else f"{longest}{verified}",
    ]
    return _line(cells)


def _line(cells: Sequence[str]) -> str:
    aligned = [
        f"{cell:<{width}}" if index < 2 else f"{cell:>{width}}"
        for index, (cell, (_, width)) in enumerate(zip(cells, COLUMNS, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def claim_line(claim: dict[str, Any]) -> str:
    held = {True: "held", False: "FAILED", None: "not measurable here"}[claim["held"]]
    value = "-" if claim["value"] is None else f"{claim['value']:.4f}"
    return f"  {held:<20} {value:>8}  {claim['comparison']} {claim['threshold']:g}: {claim['claim']}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.2f}" if size_bytes < 100 * 2**20 else f"{size_bytes / 2**20:.0f}"


# ---- where it ran


def hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": _cpu_name(), "cores": os.cpu_count(), "device": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "driver": _driver()}
    return found


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}


def date() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.split()[0] if shown.split() else None
