"""The report as one HTML page: made from the numbers of its JSON and from nothing else.

Every number on the page is a <data> element that names its place in the JSON:

    <data value="0.765" data-path="runs/0/mean_step_s">765 ms</data>
"""

from __future__ import annotations

import html
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from opensora_accel.pages import (
    UNITS,
    Value,
    charts,
    figure,
    frame,
    integer,
    number,
    percent,
    ratio,
    seconds,
    size,
    speed,
    table,
)

# Rows that a table shows of many; the JSON has all.
MAX_RANKS, MAX_PAIRS = 64, 256
# Rows of the memory table: one of every so many samples of the picture.
MEMORY_ROWS = 40
_IN_STRETCHES = " The line is the median of each stretch of steps, the band its lowest and highest."


def page(document: Any) -> str:
    """The whole page for a document of `opensora_accel.profiler.report`."""
    root = Value(document)
    names = [run["name"].text() for run in root["runs"]]
    title = " and ".join(names)
    sections: list[tuple[str, str, Callable[[Value, str], str]]] = [
        ("findings", "What stands out", _findings),
        ("steps", "Where the step goes", _steps),
        ("memory", "Memory", _memory),
        ("communication", "Communication", _communication),
        ("offload", "Offload", _offload),
        ("training", "Loss, throughput, utilization", _training),
        ("settings", "Environment and Plan", _settings),
    ]
    body = []
    if "changes" in document:
        body.append(f'<section id="changes"><h2>What changed</h2>{_changes(root)}</section>')
    for identifier, heading, make in sections:
        runs = []
        for i, run in enumerate(root["runs"]):
            of = f'<h3 class="run">{run["name"].text()}</h3>' if len(names) > 1 else ""
            runs.append(f"<div>{of}{make(run, f'r{i}')}</div>")
        body.append(
            f'<section id="{identifier}"><h2>{heading}</h2><div class="runs '
            f'n{len(names)}">{"".join(runs)}</div></section>'
        )
    links = [("changes", "What changed")] if "changes" in document else []
    links += [(identifier, heading) for identifier, heading, _ in sections]
    label = f'<p class="label">{html.escape(document["label"])}</p>' if document.get("label") else ""
    return frame(
        f"Profile of {title}",
        f'<p class="kind">opensora-accel profile</p><h1>{title}</h1>{label}',
        links,
        "".join(body),
        "Every number here is in the JSON file beside this page, where its <code>data-path</code> says. "
        "Median (first to third quartile) over steps.",
    )


def _findings(run: Value, prefix: str) -> str:
    rows = [
        ("step", run["step_s"]["median"].show(seconds)),
        ("steps", run["num_steps"].show(integer)),
        ("ranks", run["num_ranks"].show(integer)),
        ("compute : communication", run["compute_to_communication"].show(ratio)),
    ]
    if run["tokens_per_s"]:
        rows.append(("tokens per second", run["tokens_per_s"]["median"].show(number)))
    if run["utilization"]["mfu"].data is not None:
        rows.append(("MFU", run["utilization"]["mfu"].show(percent)))
    if run["peak_rank"].data is not None:
        rank = next(rank for rank in run["ranks"] if rank["rank"].data == run["peak_rank"].data)
        rows.append(("memory peak", rank["peak"]["device_bytes"].show(size)))
    facts = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows)
    items = "".join(
        f'<li><p><span class="tag">{finding["kind"].text()}</span> '
        f"{'costs ' + finding['share'].show(percent) + ' of the step' if finding['share'].data else 'costs memory'}</p>"
        f"<p>{_sentence(finding['text'])}</p><p><strong>Try:</strong> {_sentence(finding['remedy'])}</p></li>"
        for finding in run["findings"]
    )
    found = f'<ol class="findings">{items}</ol>' if items else "<p>Nothing stands out.</p>"
    notes = "".join(f"<li>{note.text()}</li>" for note in run["notes"])
    return f'<dl class="facts">{facts}</dl>{found}<ul class="notes">{notes}</ul>'


def _sentence(value: Value) -> str:
    text = value.text()
    return f"{text[:1].upper()}{text[1:]}."


def _spread(value: Value, formatter: Callable[[float], str]) -> str:
    low, high = value["low"].show(formatter), value["high"].show(formatter)
    return f"{value['median'].show(formatter)} <small>({low} to {high})</small>"


def _name(rank: Value) -> str:
    place = ", ".join(f"{axis} {index}" for axis, index in rank["coordinates"].data.items())
    return f"rank {rank['rank'].data}" + (f" <small>{html.escape(place)}</small>" if place else "")


def _steps(run: Value, prefix: str) -> str:
    # The latest first, where there are more than a page holds.
    ranks = list(run["ranks"])
    more = ""
    if len(ranks) > MAX_RANKS:
        ranks.sort(key=lambda rank: -sum(rank["behind_s"].data.values()))
        more = f" Of {len(ranks)} ranks, these {MAX_RANKS} were furthest behind."
        ranks = ranks[:MAX_RANKS]
    names = list(
        dict.fromkeys(charts.part_name(part.data) for rank in [run, *ranks] for part in rank["parts"])
    )
    rows = []
    for rank in ranks:
        cells = {charts.part_name(part.data): _spread(part["seconds"], seconds) for part in rank["parts"]}
        rows.append(
            [_name(rank), _spread(rank["step_s"], seconds), *[cells.get(name, "–") for name in names]]
        )
    parts = table("Exclusive time of every part of the step, by rank", ["rank", "step", *names], rows)
    picture = figure(
        charts.step_breakdown([rank.data for rank in ranks], f"{prefix}-steps"),
        "Each bar is one rank's mean step. Every instant belongs to the innermost region, or to “exposed” "
        "where compute "
        "waits for communication of an axis. Upright lines are recomputation, slanted ones backward, "
        "crossed ones exposed communication. "
        f"Bars of unlike length in one colour show where ranks differ.{more}",
        parts,
    )
    late = table(
        "Whose time it was: the mean step of every rank",
        [
            "rank",
            "data",
            "work",
            "network",
            "waited for others",
            "behind the median",
            "late steps: data",
            "work",
            "network",
        ],
        [
            [
                _name(rank),
                *[rank[key].show(seconds) for key in ("data_s", "work_s", "network_s", "waited_s")],
                " ".join(
                    f"{cause} {rank['behind_s'][cause].show(seconds)}" for cause in rank["behind_s"].data
                ),
                *[rank["late_steps"][cause].show(integer) for cause in rank["late_steps"].data],
            ]
            for rank in ranks
        ],
    )
    slowest = list(run["steps"])
    which, more = "Every step", ""
    if len(slowest) > charts.MAX_STEPS:
        which, more = f"The {charts.MAX_STEPS} slowest of {len(slowest)} steps", _IN_STRETCHES
        slowest = sorted(slowest, key=lambda step: -step["seconds"].data)[: charts.MAX_STEPS]
        slowest.sort(key=lambda step: step["step"].data)
    steps = table(
        which,
        ["step", "time", "furthest behind", "by", "because of"],
        [
            [
                step["step"].show(integer) + (" <small>warm-up</small>" if step["warm_up"] else ""),
                step["seconds"].show(seconds),
                f"rank {step['slowest_rank'].show(integer)}",
                step["behind_s"].show(seconds) if not step["warm_up"] else "–",
                step["cause"].text() or "not late",
            ]
            for step in slowest
        ],
    )
    timing = figure(
        charts.over_steps(run["steps"].data, "seconds", "seconds", f"{prefix}-over"),
        "Time of every step, from the first rank's start to the last one's end. Single high points are "
        "stragglers or saves; "
        f"the table names the rank and why.{more}",
        steps,
    )
    whose = f"<details><summary>Whose time it was, and who was late</summary>{late}</details>"
    return picture + whose + timing


def _memory(run: Value, prefix: str) -> str:
    timeline = run["memory"]
    if not timeline or not timeline["memory"]:
        return "<p>The run recorded no memory.</p>"
    samples = list(timeline["memory"])
    kinds = list(dict.fromkeys(kind for sample in samples for kind in sample[1].data))
    peak = max(range(len(samples)), key=lambda i: _device_bytes(samples[i].data[1]))
    stretch = -(-len(samples) // MEMORY_ROWS)
    shown = sorted({*range(0, len(samples), stretch), peak})
    numbers = table(
        "Live bytes by kind over the step; the peak is marked",
        ["since the start", *kinds],
        [
            [
                samples[i][0].show(seconds) + (" <small>peak</small>" if i == peak else ""),
                *[samples[i][1][kind].show(size) if kind in samples[i][1].data else "–" for kind in kinds],
            ]
            for i in shown
        ],
    )
    picture = figure(
        charts.memory_timeline(timeline.data, f"{prefix}-memory"),
        f"Step {timeline['step'].show(integer)} of rank {timeline['rank'].show(integer)}, which has the "
        "highest peak of the "
        "run. Areas are stacked, so the upper edge is what the device holds; the broken line is host "
        "memory, which is not "
        "part of it.",
        numbers,
    )
    ranks = [rank for rank in run["ranks"] if rank["peak"]]
    ranks = sorted(ranks, key=lambda rank: -rank["peak"]["device_bytes"].data)[:MAX_RANKS]
    kinds = list(dict.fromkeys(kind for rank in ranks for kind in rank["peak"]["bytes_by_kind"].data))
    peaks = table(
        "The peak of every rank, and what it held",
        ["rank", "peak", "in", "step", "on the host", *kinds],
        [
            [
                _name(rank),
                rank["peak"]["device_bytes"].show(size),
                html.escape(
                    " ".join(filter(None, (rank["peak"].data[key] for key in ("region", "phase", "name"))))
                ),
                rank["peak"]["step"].show(integer),
                rank["peak"]["host_bytes"].show(size),
                *[
                    rank["peak"]["bytes_by_kind"][kind].show(size)
                    if kind in rank["peak"]["bytes_by_kind"].data
                    else "–"
                    for kind in kinds
                ],
            ]
            for rank in ranks
        ],
    )
    return f"{picture}<details><summary>The peak of every rank</summary>{peaks}</details>"


def _device_bytes(sample: dict[str, int]) -> int:
    return sum(value for kind, value in sample.items() if not kind.endswith("host"))


def _communication(run: Value, prefix: str) -> str:
    if not run["axes"]:
        return "<p>The ranks did not communicate.</p>"
    axes = table(
        "Communication by axis, per step and rank",
        [
            *(
                "axis",
                "calls",
                "sent",
                "time",
                "exposed",
                "exposed share",
                "after the last rank came",
                "of it exposed",
            ),
            *("bandwidth", "after the last rank came", "link"),
        ],
        [
            [
                axis["axis"].text() or "no axis",
                axis["calls"].show(number),
                axis["sent_bytes"].show(size),
                axis["seconds"].show(seconds),
                axis["exposed_s"].show(seconds),
                axis["exposed_share"].show(percent),
                axis["transfer_s"].show(seconds),
                axis["exposed_transfer_share"].show(percent),
                axis["bytes_per_s"].show(speed),
                axis["transfer_bytes_per_s"].show(speed),
                axis["link_bytes_per_s"].show(speed),
            ]
            for axis in run["axes"]
        ],
    )
    bars = figure(
        charts.axes_bars(run["axes"].data, f"{prefix}-axes"),
        "Time in which each axis communicates. Plain is hidden under compute, crossed is what compute waits "
        "for the network, "
        "and upright lines are waiting for ranks that come late. Compute : communication is "
        f"{run['compute_to_communication'].show(ratio)}; under 3 : 1 the network is the limit.",
        axes,
    )
    pairs = sorted(range(len(run["sent"].data)), key=lambda i: -run["sent"].data[i][2])[:MAX_PAIRS]
    sent = table(
        "Bytes from rank to rank in a step, the most first",
        ["from", "to", "sent"],
        [
            [
                f"rank {run['sent'][i][0].show(integer)}",
                f"rank {run['sent'][i][1].show(integer)}",
                run["sent"][i][2].show(size),
            ]
            for i in pairs
        ],
    )
    left_out = len(run["sent"].data) - len(pairs)
    matrix = figure(
        charts.sent_matrix(run["sent"].data, run["world_size"].data, f"{prefix}-sent"),
        "A row is the sender, a column the receiver. Rings are lines beside the diagonal, all-to-alls "
        "squares, gradients the "
        "even background. Empty squares sent nothing."
        + (
            f" The table leaves out the {left_out} smallest pairs; the JSON has them." if left_out > 0 else ""
        ),
        sent,
    )
    kinds = table(
        "How often, and how much: calls by axis and kind, per step and rank",
        ["axis", "kind", "calls", "sent", "steps that have it"],
        [
            [
                kind["axis"].text() or "no axis",
                kind["kind"].text(),
                kind["calls"].show(number),
                kind["sent_bytes"].show(size),
                kind["steps"].show(integer),
            ]
            for kind in run["kinds"]
        ],
    )
    return bars + kinds + matrix + _congested(run)


def _congested(run: Value) -> str:
    if not run["congested"]:
        return "<p>No call fell under half of the median bandwidth of its kind, axis and size.</p>"
    rows = [
        [
            f"rank {call['rank'].show(integer)}"
            + (f" to {call['peer'].show(integer)}" if call["peer"].data is not None else ""),
            f"{call['kind'].text()} over {call['axis'].text() or 'no axis'}",
            call["step"].show(integer),
            call["sent_bytes"].show(size),
            call["seconds"].show(seconds),
            call["median_s"].show(seconds),
            call["bytes_per_s"].show(speed),
            call["median_bytes_per_s"].show(speed),
        ]
        for call in run["congested"]
    ]
    head = ["rank", "call", "step", "sent", "time", "median", "bandwidth", "median bandwidth"]
    listed = table("Congested calls, those that lost most time first", head, rows)
    return (
        f"<p>{run['num_congested'].show(integer)} calls fell under half of the median bandwidth of their "
        "kind, axis and "
        f"size.</p><details><summary>The congested calls</summary>{listed}</details>"
    )


def _offload(run: Value, prefix: str) -> str:
    timeline = run["offload"]
    if not timeline:
        return "<p>Nothing was copied to the host or back.</p>"
    lanes = table(
        "Compute and copies of one step",
        ["what", "time", "not under compute", "pieces drawn"],
        [
            [
                lane["name"].text(),
                lane["seconds"].show(seconds),
                lane["exposed_s"].show(seconds) if lane["name"].data != "compute" else "–",
                str(len(lane["intervals"].data)),
            ]
            for lane in timeline["lanes"]
        ],
    )
    return figure(
        charts.offload_timeline(timeline.data, f"{prefix}-offload"),
        f"The last step of rank {timeline['rank'].show(integer)} (step {timeline['step'].show(integer)}). A "
        "copy that stands "
        "under compute is hidden; one that stands over a gap in the row of compute is waited for.",
        lanes,
    )


def _training(run: Value, prefix: str) -> str:
    shown, which, more = list(run["steps"]), "of every step", ""
    if len(shown) > charts.MAX_STEPS:
        every = -(-len(shown) // charts.MAX_STEPS)
        shown, which, more = shown[::every], f"of one step in {every}", _IN_STRETCHES
    parts = []
    for field, label, text in (
        (
            "loss",
            "Loss",
            "The mean of the ranks' losses. A profile is short: it shows that the run was sane.",
        ),
        ("tokens_per_s", "Tokens per second", "Tokens of all ranks over the time of the step."),
    ):
        if all(step[field] is None for step in run["steps"].data):
            continue
        rows = [
            [
                step["step"].show(integer) + (" <small>warm-up</small>" if step["warm_up"] else ""),
                step[field].show(number),
            ]
            for step in shown
        ]
        numbers = table(f"{label} {which}", ["step", label.lower()], rows)
        picture = charts.over_steps(run["steps"].data, field, label.lower(), f"{prefix}-{field}")
        parts.append(figure(picture, f"{text}{more}", numbers))
    used = run["utilization"]
    mfu, hfu = used["mfu"].show(percent), used["hfu"].show(percent)
    why = f"<p>Not known: {used['why_not'].text()}.</p>" if used["why_not"] else ""
    source = f" ({used['peak_flops_source'].text()})" if used["peak_flops_source"] else ""
    parts.append(
        f"<p>MFU = model_flops ÷ (peak_flops × median step) = {mfu}; HFU = hardware_flops ÷ (peak_flops × "
        "median step) "
        f"= {hfu}. All ranks together: model_flops {used['model_flops'].show(_flops)}, hardware_flops "
        f"{used['hardware_flops'].show(_flops)} (with recomputation) a step, peak_flops "
        f"{used['peak_flops'].show(_flops)} a "
        f"second{source}.</p>{why}"
    )
    return "".join(parts)


def _flops(value: float) -> str:
    return f"{value / 1e12:,.4g} T"


def _settings(run: Value, prefix: str) -> str:
    started = datetime.fromtimestamp(run["started_at"].data, timezone.utc)
    rows = [["started", f"{started:%Y-%m-%d %H:%M} UTC"]] if run["started_at"] else []
    rows += [
        [html.escape(str(name)), html.escape(str(value))] for name, value in run["environment"].data.items()
    ]
    parts = [table("Environment", ["what", "value"], rows)]
    for key, caption in (("plan", "Plan"), ("model", "Model")):
        values = [[html.escape(str(name)), html.escape(str(value))] for name, value in run[key].data.items()]
        parts.append(table(caption, ["field", "value"], values))
    return "".join(parts)


def _changes(root: Value) -> str:
    before, after = (run["name"].text() for run in root["runs"])
    settings = [
        [f"{row['group'].text()}: {row['name'].text()}", row["before"].text(), row["after"].text()]
        for row in root["settings"]
    ]
    rows = []
    for change in root["changes"]:
        unit = UNITS[change["unit"].data]
        more = "▲ more" if change["difference"].data > 0 else "▼ less"
        rows.append(
            [
                f"{change['group'].text()}: {change['name'].text()}",
                change["before"].show(unit),
                change["after"].show(unit),
                f"{more} {change['difference'].show(unit)}",
                change["weight"].show(percent),
            ]
        )
    head = ["what", before, after, "change", "of the whole"]
    text = (
        "<p>The largest change first: each as a share of the whole that it is part of, which is the longer "
        "step, the higher "
        "peak, or all bytes.</p>"
    )
    set_differently = (
        table("Set differently", ["what", before, after], settings)
        if settings
        else "<p>Plan, environment and model are the same.</p>"
    )
    return set_differently + text + table("What came of it", head, rows)
