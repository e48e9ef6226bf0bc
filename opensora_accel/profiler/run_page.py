"""The page of a training run: loss, clips, buckets, what the cache gave, and how the run was configured.

It is made from what the run wrote and lies beside it, because it shows the clips where they are:

    runs/bunny/config.json  metrics.jsonl  samples/step_000300/clip_1.mp4  …  ──►  runs/bunny/run.html

The trainer writes it whenever it samples and at its end; `opensora-accel report runs/bunny` does at any time.
"""

from __future__ import annotations

import dataclasses
import html
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_accel.documents import (
    Count,
    Duration,
    Finite,
    checked,
    is_plain,
    parse,
    read_json,
    read_text,
)
from opensora_accel.files import replacing
from opensora_accel.pages import figure, frame, integer, number, percent, seconds, table

# In the output of a run.
CONFIG, METRICS, SAMPLES, PAGE = "config.json", "metrics.jsonl", "samples", "run.html"
# Samplings that are shown of many: the first, the last, and others evenly between.
_MAX_SAMPLINGS = 6
# In one sampling: clips that are shown, and bytes of their captions.
_MAX_CLIPS, _MOST_CAPTION_BYTES = 64, 1 << 20
_CURVES = (
    ("loss", "Loss", "The mean over all data ranks. A step that was skipped has none."),
    ("grad_norm", "Gradient norm", "Over all parameters and ranks, before clipping."),
    ("lr", "Learning rate", "Of the step that follows these gradients."),
    ("tokens_per_s", "Tokens per second", "Tokens of all data ranks over the time of a step."),
    (
        "memory_gib",
        "Memory of a rank in GiB",
        "The most that was allocated on rank 0's GPU, or held by its process.",
    ),
)


@dataclass(frozen=True)
class _Config:
    """What the page needs of a run's configuration; the rest is listed as it is."""

    steps: Count


@dataclass(frozen=True)
class _Step:
    """What every row of metrics.jsonl has; the rest of it are numbers too."""

    step: Count
    loss: Finite | None
    step_s: Duration
    tokens: Finite


def is_run(folder: Path) -> bool:
    """Whether a training run wrote this folder."""
    return (folder / METRICS).is_file() and (folder / CONFIG).is_file()


def write_run_page(folder: Path) -> Path:
    """Writes run.html into the folder of a training run; the file.

    Raises:
        ValueError: its metrics or its configuration are damaged, or are no plain files in the folder.
        OSError: a file cannot be read or written.
        ModuleNotFoundError: matplotlib or pydantic is not installed.
    """
    config = read_json(folder / CONFIG, dict[str, Any], inside=folder)
    num_steps = checked(config, _Config, str(folder / CONFIG)).steps
    steps = _read_steps(folder)
    made = {
        "summary": ("In short", _summary(steps, num_steps)),
        "curves": ("Over the steps", _curves(steps)),
        "clips": ("Sampled clips", _clips(folder)),
        "buckets": ("Sizes of clips", _buckets(steps)),
        "cache": ("Cache", _cache(steps)),
        "configuration": ("Configuration", _configuration(config)),
    }
    sections = {name: each for name, each in made.items() if each[1]}
    body = "".join(
        f'<section id="{name}"><h2>{heading}</h2>{text}</section>'
        for name, (heading, text) in sections.items()
    )
    name = html.escape(folder.resolve().name)
    text = frame(
        f"Run {name}",
        f'<p class="kind">opensora-accel train</p><h1>{name}</h1>',
        [(name, heading) for name, (heading, _) in sections.items()],
        body,
        f"Made from {CONFIG}, {METRICS} and {SAMPLES} beside this page, which shows the clips from there.",
    )
    page = folder / PAGE
    # In the place of a link, not through it.
    with replacing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return page


def _read_steps(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; without the last one of a run that was killed while it wrote."""
    rows: list[dict[str, Any]] = []
    if not os.path.lexists(folder / METRICS):
        return rows  # of a run that went on at its end, in another folder
    lines = read_text(folder / METRICS, inside=folder).splitlines(keepends=True)
    for at, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        source = f"{folder / METRICS}:{at} is no step of a run"
        row = parse(line, dict[str, Finite | None], source)
        rows.append({**row, **dataclasses.asdict(checked(row, _Step, source))})
    return rows


def _summary(steps: Sequence[Mapping[str, Any]], num_steps: int) -> str:
    if not steps:
        return "<p>No step has been trained yet.</p>"
    skipped = [row["step"] for row in steps if row["loss"] is None]
    losses = [row["loss"] for row in steps if row["loss"] is not None]
    last = losses[-max(1, len(losses) // 20) :]
    facts = {
        "steps": f"{steps[-1]['step']:,} of {num_steps:,}",
        "loss, median of the last twentieth": number(statistics.median(last)) if last else "–",
        "median step": seconds(statistics.median(row["step_s"] for row in steps)),
        "time in steps": seconds(sum(row["step_s"] for row in steps)),
        "tokens": f"{sum(row['tokens'] for row in steps):,.0f}",
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    told = ""
    if skipped:
        more = f" and {len(skipped) - 20} more" if len(skipped) > 20 else ""
        shown = ", ".join(map(str, skipped[:20])) + more
        told = f"<p>Skipped, because their gradients were no use: steps {shown}.</p>"
    return f'<dl class="facts">{listed}</dl>{told}'


def _curves(steps: Sequence[Mapping[str, Any]]) -> str:
    from opensora_accel.pages import charts

    every = max(1, -(-len(steps) // charts.MAX_STEPS))
    parts = []
    for field, label, text in _CURVES:
        points = [{"step": row["step"], field: row.get(field), "warm_up": False} for row in steps]
        if all(point[field] is None for point in points):
            continue
        rows = [
            [integer(point["step"]), "–" if point[field] is None else number(point[field])]
            for point in points[::every]
        ]
        which = f"of one step in {every}" if every > 1 else "of every step"
        if every > 1:
            text += " The line is the median of each stretch of steps, the band its lowest and highest."
        # Inside a sentence, where GiB stays what it is.
        inside = label[0].lower() + label[1:]
        picture = charts.over_steps(points, field, inside, f"run-{field}")
        parts.append(figure(picture, f"{label}. {text}", table(f"{label} {which}", ["step", inside], rows)))
    return "".join(parts)


def _clips(folder: Path) -> str:
    """The latest clips, and those of some samplings before, each caption's side by side."""
    found = {
        int(path.parent.name.removeprefix("step_")): path
        for path in (folder / SAMPLES).glob("step_*/captions.txt")
        if path.parent.name.removeprefix("step_").isdecimal() and is_plain(path, folder)
    }
    if not found:
        return ""
    taken, last = sorted(found), len(found) - 1
    picks = [
        taken[i] for i in sorted({round(i * last / (_MAX_SAMPLINGS - 1)) for i in range(_MAX_SAMPLINGS)})
    ]
    rows = []
    captions = read_text(found[taken[-1]], folder, _MOST_CAPTION_BYTES).splitlines()[:_MAX_CLIPS]
    for index, caption in enumerate(captions, start=1):
        cells = []
        for step in picks:
            clip = found[step].parent / f"clip_{index}.mp4"
            if is_plain(clip, folder):
                place = html.escape(clip.relative_to(folder).as_posix())
                cells.append(
                    # Controls would lie over a clip of these sizes; the link opens it with a player's.
                    f'<figure class="clip"><video src="{place}" autoplay loop muted playsinline '
                    f'aria-label="clip {index} after step {step}"></video>'
                    f'<figcaption><a href="{place}">step {step:,}</a></figcaption></figure>'
                )
        rows.append(f'<h3>{html.escape(caption)}</h3><div class="clips">{"".join(cells)}</div>')
    shown = f"{len(picks)} of {len(found)} samplings. " if len(picks) < len(found) else ""
    return f"<p>{shown}Where there is a source, it is on the left.</p>{''.join(rows)}"


def _buckets(steps: Sequence[Mapping[str, Any]]) -> str:
    """How often each size came; nothing where there is one."""
    counts: dict[str, list[int]] = {}
    for row in steps:
        for name, value in row.items():
            if name.startswith("clips/") and value is not None:
                counts.setdefault(name.removeprefix("clips/"), []).append(int(value))
    total = sum(map(sum, counts.values()))
    if not total:
        return ""
    rows = [
        [html.escape(size), f"{len(of_steps):,}", f"{sum(of_steps):,}", percent(sum(of_steps) / total)]
        for size, of_steps in sorted(counts.items(), key=lambda item: -sum(item[1]))
    ]
    head = ["frames × height × width", "steps", "clips of all data ranks", "share of the clips"]
    return table("What each size was trained with", head, rows)


def _cache(steps: Sequence[Mapping[str, Any]]) -> str:
    with_it = [row for row in steps if None not in (row.get("cache_hits"), row.get("cache_misses"))]
    if not with_it:
        return ""
    hits = sum(row["cache_hits"] for row in with_it)
    asked = hits + sum(row["cache_misses"] for row in with_it)
    share = percent(hits / asked) if asked else "–"
    return f"<p>Rank 0 asked its cache_folder for {asked:,.0f} clips and captions and found {hits:,.0f}: {share}.</p>"


def _configuration(config: Mapping[str, Any]) -> str:
    rows = []

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                add(f"{name}.{key}" if name else key, inner)
        elif value not in ("", [], {}, None):
            rows.append([html.escape(name), html.escape(json.dumps(value, ensure_ascii=False))])

    add("", dict(config))
    return f"<details><summary>All options</summary>{table('Options', ['option', 'value'], rows)}</details>"
