"""The report of a search as one HTML page: the Pareto picture, the best plan's step and memory, and why others lose.

It is made of the JSON document of `opensora-accel plan --json` and nothing else, as the profiler's page is of its own:
every number is a <data> element that names its place in the document.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from opensora_accel.pages import Value, charts, figure, frame, integer, number, percent, seconds, size, table

# Points and rows of many: the JSON has all.
MAX_POINTS, MAX_ROWS = 600, 40


def page(document: Mapping[str, Any]) -> str:
    """The whole page for a document of `command.document_of`."""
    root = Value(document)
    title = f"{root['model'].text()} on {root['gpus'].data} × {root['hardware'].text()}"
    sections = [
        ("best", "The best plan", _best(root)),
        ("pareto", "Time against memory", _pareto(root)),
        ("timeline", "Its step", _timeline(root)),
        ("memory", "Its memory", _memory(root)),
        ("why", "Why, and what else", _why(root)),
        ("candidates", "Candidates", _candidates(root)),
        ("hardware", "Hardware, and where its figures are from", _hardware(root)),
    ]
    body = "".join(
        f'<section id="{name}"><h2>{heading}</h2>{text}</section>' for name, heading, text in sections
    )
    return frame(
        f"Plan of {title}",
        f'<p class="kind">opensora-accel plan</p><h1>{title}</h1><p class="label">simulated, nothing was measured</p>',
        [(name, heading) for name, heading, _text in sections],
        body,
        "Every number here is in the JSON document (<code>--json</code>), where its <code>data-path</code> says. "
        "Intervals are from the fast to the slow end of what is uncertain.",
    )


def _interval(value: Value, formatter: Any) -> str:
    return f"{value[0].show(formatter)} to {value[1].show(formatter)}"


def _best(root: Value) -> str:
    if not root["best"]:
        return "<p>No plan fits. The candidates below come nearest; each says what it lacks.</p>"
    best = root["best"]
    facts = [
        ("step", _interval(best["step_time_s"], seconds)),
        ("seconds a sample", best["seconds_per_sample"].show(number)),
        ("samples a step", best["samples"].show(integer)),
        ("memory of a GPU", _interval(best["memory_bytes"], size)),
        ("of", root["device_bytes"].show(size)),
        ("host memory of a rank", best["host_bytes"].show(size)),
    ]
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    fields = [[html.escape(str(name)), html.escape(str(value))] for name, value in best["plan"].data.items()]
    told, placement = (html.escape(document_text(root, name)) for name in ("bound", "placement"))
    placed = f" Its axes: {placement}." if placement else ""
    return (
        f'<dl class="facts">{shown}</dl><p>The step is {told}.{placed}</p>'
        f"<details><summary>All fields of the plan</summary>{table('Plan', ['field', 'value'], fields)}</details>"
    )


def document_text(root: Value, name: str) -> str:
    return str(root["explanation"].data.get(name, "")) if root["explanation"] else ""


def _pareto(root: Value) -> str:
    points = list(enumerate(root["candidates"].data))
    if not points:
        return "<p>The rules exclude every plan.</p>"
    every = max(1, len(points) // MAX_POINTS)
    shown = [each for i, each in points if i % every == 0 or each["traced"]]
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
    line = frontier([(each["memory_bytes"][1], each["seconds_per_sample"]) for _i, each in points])
    chart.axes.step(
        [x / gib for x, _y in line], [y for _x, y in line], where="post", color="#52a39b", linewidth=1.2
    )
    chart.axes.axvline(
        root["device_bytes"].data / gib,
        color="#b28d3a",
        linestyle="--",
        linewidth=1.2,
        label="what a GPU has",
    )
    chart.axes.set(xlabel="memory of a GPU, at most (GiB)", ylabel="seconds a sample")
    chart.use_log_scales()
    chart.legend()
    indices = {(each["memory_bytes"][1], each["seconds_per_sample"]): i for i, each in points}
    rows = []
    for point in line:
        each = root["candidates"][indices[point]]
        rows.append(
            [_plan(each), each["memory_bytes"][1].show(size), each["seconds_per_sample"].show(number),
             "traced" if each["traced"].data else "estimated", "fits" if each["fits"].data else "does not fit"]
        )  # fmt: skip
    numbers = table(
        "Plans that no other one beats in both", ["plan", "memory at most", "seconds a sample", "", ""], rows
    )
    return figure(
        chart.svg("Seconds a sample against memory of a GPU; the table below has the numbers", "p-pareto"),
        "Each point is a plan. The line joins those that no other plan beats in both; what stands right of the broken "
        "line does not fit. Further left and down is better.",
        numbers,
    )


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other point beats in both, by the first coordinate."""
    found: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found


def _timeline(root: Value) -> str:
    timeline = root["timeline"]
    if not timeline:
        return "<p>No plan was traced.</p>"
    lanes = list(timeline["lanes"])
    chart = charts.Chart(height=1.2 + 0.42 * len(lanes))
    colours = {"forward": "#3d7ab8", "recompute": "#52a39b", "backward": "#9b5f93", "optimizer": "#6d9150"}
    for i, lane in enumerate(lanes):
        for phase, start, length in lane["bars"].data:
            colour, _ = chart.styles.setdefault(phase, (colours.get(phase, "#aeb4bb"), ""))
            chart.axes.broken_barh([(start, length)], (i - 0.36, 0.72), facecolor=colour)
    chart.axes.set_yticks(range(len(lanes)), [lane["name"].data for lane in lanes])
    chart.axes.invert_yaxis()
    chart.axes.set(xlabel="seconds since the step's start", xlim=(0, timeline["seconds"].data))
    chart.axes.grid(axis="y", visible=False)
    chart.legend()
    rows = [
        [
            lane["name"].text(),
            lane["busy_s"].show(seconds),
            lane["share"].show(percent),
            lane["exposed_s"].show(seconds),
        ]
        for lane in lanes
    ]
    numbers = table(
        "Streams of one rank in one step", ["stream", "busy", "of the step", "compute waits for it"], rows
    )
    return figure(
        chart.svg("Streams of one rank over a step; the table below has the numbers", "p-timeline"),
        "One microbatch on rank 0, simulated. A bar of a lower row that stands over a gap in the row of compute is "
        "waited for.",
        numbers,
    )


def _memory(root: Value) -> str:
    samples = root["memory"]
    if not samples:
        return "<p>No plan was traced.</p>"
    kinds = list(dict.fromkeys(kind for _time, sample in samples.data for kind in sample))
    stretch = -(-len(samples.data) // MAX_ROWS)
    rows = [
        [
            samples[i][0].show(seconds),
            *[samples[i][1][kind].show(size) if kind in samples[i][1].data else "–" for kind in kinds],
        ]
        for i in range(0, len(samples.data), stretch)
    ]
    return figure(
        charts.memory_timeline({"memory": samples.data}, "p-memory"),
        "Live bytes by kind, without what the allocator and the libraries take. The broken line is host memory.",
        table("Live bytes by kind over the step", ["since the start", *kinds], rows),
    )


def _why(root: Value) -> str:
    told = root["explanation"]
    if not told:
        return "<p>No plan fits.</p>"
    filled = table(
        f"What fills the memory at the peak ({told['peak'].data})",
        ["kind", "bytes"],
        [[html.escape(kind), told["bytes_by_kind"][kind].show(size)] for kind in told["bytes_by_kind"].data],
    )
    whole = sum(told["seconds_by_kind"].data.values()) or 1.0
    waited = table(
        "What the step consists of, followed back from its end",
        ["what", "seconds", "of the step"],
        [
            [html.escape(kind), told["seconds_by_kind"][kind].show(seconds), f"{value / whole:.1%}"]
            for kind, value in told["seconds_by_kind"].data.items()
        ],
    )
    near = table(
        "Plans one choice away",
        ["change", "why not"],
        [[each["change"].text(), each["why"].text()] for each in told["neighbours"]],
    )
    helps = f"<p><strong>What helps most:</strong> {told['helps'].text()}.</p>" if told["helps"].data else ""
    rules = "".join(f"<li>{html.escape(rule)}</li>" for rule in root["excluded"].data)
    excluded = f"<p>Excluded by rules:</p><ul>{rules}</ul>" if rules else ""
    return f"{helps}{filled}{waited}{near}{excluded}"


def _candidates(root: Value) -> str:
    rows = [
        [
            _plan(each), _interval(each["memory_bytes"], size), _interval(each["step_time_s"], seconds),
            each["samples"].show(integer), each["seconds_per_sample"].show(number),
            "traced" if each["traced"].data else "estimated", each["reason"].text() or "the best",
        ]
        for each, _ in zip(root["candidates"], range(MAX_ROWS), strict=False)
    ]  # fmt: skip
    head = ["plan", "memory", "step", "samples", "seconds a sample", "", "why it is not the best"]
    return table(f"The first of {len(root['candidates'].data)} candidates", head, rows)


def _plan(candidate: Value) -> str:
    return html.escape(candidate["text"].data)


def _hardware(root: Value) -> str:
    rows = [[html.escape(name), html.escape(text)] for name, text in root["sources"].data.items()]
    return table("Where each figure is from", ["figure", "source"], rows)
