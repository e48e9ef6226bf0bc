"""The report as one HTML page: made from the numbers of its JSON and from nothing else.

Every number on the page is a <data> element that names its place in the JSON:

    <data value="0.765" data-path="runs/0/mean_step_s">765 ms</data>

What the page says stands in profile.html. Here is what it shows of each run: pictures, and rows where there are many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from opensora_accel.pages import Value, charts, render

# Rows that a table shows of many; the JSON has all.
MAX_RANKS, MAX_PAIRS = 64, 256
# Rows of the memory table: one of every so many samples of the picture.
MEMORY_ROWS = 40


def page(document: Any) -> str:
    """The whole page for a document of `opensora_accel.profiler.report`."""
    root = Value(document)
    shown = [
        {
            "fullest_rank": next((r for r in run["ranks"] if r["rank"].data == run["peak_rank"].data), None),
            "steps": _steps(run, f"r{i}"),
            "memory": _memory(run, f"r{i}"),
            "communication": _communication(run, f"r{i}"),
            "offload": run["offload"] and charts.offload_timeline(run["offload"].data, f"r{i}-offload"),
            "training": _training(run, f"r{i}"),
            "environment": _environment(run.data),
        }
        for i, run in enumerate(root["runs"])
    ]
    name = " and ".join(run["name"] for run in document["runs"])
    return render("profiler/profile.html", document=root, name=name, shown=shown)


def _steps(run: Value, prefix: str) -> dict[str, Any]:
    """The ranks that were furthest behind and the slowest steps, where there are more than a page holds."""
    ranks, steps = list(run["ranks"]), list(run["steps"])
    if len(ranks) > MAX_RANKS:
        ranks = sorted(ranks, key=lambda rank: -sum(rank["behind_s"].data.values()))[:MAX_RANKS]
    if len(steps) > charts.MAX_STEPS:
        steps = sorted(steps, key=lambda step: -step["seconds"].data)[: charts.MAX_STEPS]
        steps.sort(key=lambda step: step["step"].data)
    # By name, because a rank may lack a part that others have.
    times = [{charts.part_name(part.data): part["seconds"] for part in rank["parts"]} for rank in ranks]
    names = [charts.part_name(part) for part in run["parts"].data]
    return {
        "ranks": list(zip(ranks, times, strict=True)),
        "parts": list(dict.fromkeys([*names, *(name for each in times for name in each)])),
        "parts_chart": charts.step_breakdown([rank.data for rank in ranks], f"{prefix}-steps"),
        "steps": steps,
        "steps_chart": charts.over_steps(run["steps"].data, "seconds", "seconds", f"{prefix}-over"),
    }


def _memory(run: Value, prefix: str) -> dict[str, Any] | None:
    """One of so many samples, and the peak; the ranks with the highest peaks."""
    timeline = run["memory"].data
    if not timeline or not timeline["memory"]:
        return None
    samples = timeline["memory"]
    peak = max(range(len(samples)), key=lambda i: _device_bytes(samples[i][1]))
    rows = sorted({*range(0, len(samples), -(-len(samples) // MEMORY_ROWS)), peak})
    ranks = [rank for rank in run["ranks"] if rank["peak"]]
    ranks = sorted(ranks, key=lambda rank: -rank["peak"]["device_bytes"].data)[:MAX_RANKS]
    return {
        "chart": charts.memory_timeline(timeline, f"{prefix}-memory"),
        "kinds": _kinds(held for _time, held in samples),
        "samples": [(*run["memory"]["memory"][i], i == peak) for i in rows],
        "ranks": ranks,
        "peak_kinds": _kinds(rank["peak"]["bytes_by_kind"].data for rank in ranks),
    }


def _kinds(holdings: Iterable[Mapping[str, int]]) -> list[str]:
    return list(dict.fromkeys(kind for held in holdings for kind in held))


def _device_bytes(held: Mapping[str, int]) -> int:
    return sum(value for kind, value in held.items() if not kind.endswith("host"))


def _communication(run: Value, prefix: str) -> dict[str, Any] | None:
    if not run["axes"]:
        return None
    sent = run["sent"].data
    return {
        "axes_chart": charts.axes_bars(run["axes"].data, f"{prefix}-axes"),
        "sent_chart": charts.sent_matrix(sent, run["world_size"].data, f"{prefix}-sent"),
        "pairs": sorted(run["sent"], key=lambda pair: -pair[2].data)[:MAX_PAIRS],
    }


def _training(run: Value, prefix: str) -> dict[str, Any]:
    """The curves of what is known, and one step in so many for their tables."""
    steps = run["steps"].data
    every = max(1, -(-len(steps) // charts.MAX_STEPS))
    return {
        "charts": {
            field: charts.over_steps(steps, field, label, f"{prefix}-{field}")
            for field, label in (("loss", "loss"), ("tokens_per_s", "tokens per second"))
            if any(step[field] is not None for step in steps)
        },
        "every": every,
        "steps": list(run["steps"])[::every],
    }


def _environment(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    started = datetime.fromtimestamp(run["started_at"], timezone.utc)
    rows = [("started", f"{started:%Y-%m-%d %H:%M} UTC")] if run["started_at"] else []
    return [*rows, *run["environment"].items()]
