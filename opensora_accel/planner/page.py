"""The report of a search as one HTML page: the Pareto picture, the best plan's step and memory, and why others lose.

It is made of the JSON document of `opensora-accel plan --json` and nothing else, as the profiler's page is of its own:
every number is a <data> element that names its place in the document. What the page says stands in plan.html.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from opensora_accel.pages import Value, charts, render

# Points and rows of many: the JSON has all.
MAX_POINTS, MAX_ROWS = 600, 40


def page(document: Mapping[str, Any]) -> str:
    """The whole page for a document of `document.document_of`."""
    root = Value(document)
    candidates, samples = list(root["candidates"]), document["memory"] or []
    points = [(each["memory_bytes"][1], each["seconds_per_sample"]) for each in document["candidates"]]
    # Of plans that are equal in both the last one is shown.
    at = {point: i for i, point in enumerate(points)}
    line = frontier(points)
    return render(
        "planner/plan.html",
        document=root,
        name=f"{root['model']} on {root['gpus']} × {root['hardware']}",
        pareto_chart=_pareto(document, line) if candidates else "",
        unbeaten=[candidates[at[point]] for point in line],
        timeline_chart=_timeline(document["timeline"]) if document["timeline"] else "",
        compute_chart=_compute(document["timeline"]) if document["timeline"] else "",
        memory_chart=charts.memory_timeline({"memory": samples}, "p-memory") if samples else "",
        memory_kinds=list(dict.fromkeys(kind for _time, sample in samples for kind in sample)),
        memory_samples=list(root["memory"])[:: -(-len(samples) // MAX_ROWS)] if samples else [],
        candidates=candidates[:MAX_ROWS],
    )


def _pareto(document: Mapping[str, Any], line: Sequence[tuple[float, float]]) -> Markup:
    """Time against memory of every plan, or of some of many and all that were traced."""
    candidates = document["candidates"]
    every = max(1, len(candidates) // MAX_POINTS)
    shown = [each for i, each in enumerate(candidates) if i % every == 0 or each["traced"]]
    chart = charts.Chart(height=4.2)
    gib = charts.GIB
    for name, colour, marker, chosen in (
        ("does not fit", "#c24f44", "x", [each for each in shown if not each["fits"]]),
        ("fits, estimated", "#8193ab", ".", [each for each in shown if each["fits"] and not each["traced"]]),
        ("fits, traced", "#3d7ab8", "o", [each for each in shown if each["fits"] and each["traced"]]),
    ):
        chart.axes.scatter(
            [each["memory_bytes"][1] / gib for each in chosen],
            [each["seconds_per_sample"] for each in chosen],
            s=14, c=colour, marker=marker, label=name, linewidths=0.8,
        )  # fmt: skip
    chart.axes.step(
        [x / gib for x, _y in line], [y for _x, y in line], where="post", color="#52a39b", linewidth=1.2
    )
    chart.axes.axvline(
        document["device_bytes"] / gib,
        color="#b28d3a",
        linestyle="--",
        linewidth=1.2,
        label="what a GPU has",
    )
    chart.axes.set(xlabel="memory of a GPU, at most (GiB)", ylabel="seconds a sample")
    chart.use_log_scales()
    chart.legend()
    return chart.svg("Seconds a sample against memory of a GPU; the table below has the numbers", "p-pareto")


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other point beats in both, by the first coordinate."""
    line: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not line or point[1] < line[-1][1]:
            line.append(point)
    return line


def _timeline(timeline: Mapping[str, Any]) -> Markup:
    """When each stream of a rank is busy, by phase."""
    lanes = timeline["lanes"]
    chart = charts.Chart(height=1.2 + 0.42 * len(lanes))
    colours = {"forward": "#3d7ab8", "recompute": "#52a39b", "backward": "#9b5f93", "optimizer": "#6d9150"}
    for i, lane in enumerate(lanes):
        for phase, start, length in lane["bars"]:
            colour, _ = chart.styles.setdefault(phase, (colours.get(phase, "#aeb4bb"), ""))
            chart.axes.broken_barh([(start, length)], (i - 0.36, 0.72), facecolor=colour)
    chart.axes.set_yticks(range(len(lanes)), [lane["name"] for lane in lanes])
    chart.axes.invert_yaxis()
    chart.axes.set(xlabel="seconds since the step's start", xlim=(0, timeline["seconds"]))
    chart.axes.grid(axis="y", visible=False)
    chart.legend()
    return chart.svg("Streams of one rank over a step; the table below has the numbers", "p-timeline")


def _compute(timeline: Mapping[str, Any]) -> Markup:
    """What compute consists of, a bar for each phase."""
    phases = list(dict.fromkeys(part["phase"] for part in timeline["compute"]))
    chart = charts.Chart(height=1.2 + 0.4 * len(phases))
    left = dict.fromkeys(phases, 0.0)
    for part in sorted(timeline["compute"], key=lambda part: part["operators"]):
        colour, hatch = chart.style(part["operators"], part["operators"])
        row = phases.index(part["phase"])
        chart.axes.barh(row, part["busy_s"], 0.72, left[part["phase"]], color=colour, hatch=hatch)
        left[part["phase"]] += part["busy_s"]
    chart.axes.set_yticks(range(len(phases)), phases)
    chart.axes.invert_yaxis()
    chart.axes.set(xlabel="seconds of compute")
    chart.axes.grid(axis="y", visible=False)
    chart.legend()
    return chart.svg(
        "Seconds of compute by phase and operators; the table below has the numbers", "p-compute"
    )
