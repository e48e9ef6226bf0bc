"""The page of a training run: loss, clips, buckets, what the cache gave, and how the run was configured.

It is made from what the run wrote and lies beside it, because it shows the clips where they are:

    runs/bunny/config.json  metrics.jsonl  samples/step_000300/clip_1.mp4  …  ──►  runs/bunny/run.html

The trainer writes it whenever it samples and at its end; `opensora-accel report runs/bunny` does at any time. What it
says stands in run.html beside this file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
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
from opensora_accel.pages import charts, render

# In the output of a run.
CONFIG, METRICS, SAMPLES, PAGE = "config.json", "metrics.jsonl", "samples", "run.html"
# Samplings that are shown of many: the first, the last, and others evenly between.
_MAX_SAMPLINGS = 6
# In one sampling: clips that are shown, and bytes of their captions.
_MAX_CLIPS, _MOST_CAPTION_BYTES = 64, 1 << 20
_CURVES = (
    ("loss", "Loss", "The mean over all data ranks. A step that was skipped has none."),
    (
        "validation/loss",
        "Validation loss",
        "Of clips that no step trains, at fixed times and noise, with averaged weights.",
    ),
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
        ModuleNotFoundError: matplotlib, jinja2 or pydantic is not installed.
    """
    config = read_json(folder / CONFIG, dict[str, Any], inside=folder)
    num_steps = checked(config, _Config, str(folder / CONFIG)).steps
    steps = _read_steps(folder)
    text = render(
        "profiler/run.html",
        name=folder.resolve().name,
        trained=_trained(steps, num_steps),
        curves=list(_curves(steps)),
        clips=_clips(folder),
        buckets=_buckets(steps),
        cache=_cache(steps),
        options=list(_options("", config)),
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


def _trained(steps: Sequence[Mapping[str, Any]], num_steps: int) -> dict[str, Any] | None:
    if not steps:
        return None
    losses = [row["loss"] for row in steps if row["loss"] is not None]
    return {
        "last_step": steps[-1]["step"],
        "num_steps": num_steps,
        "loss": statistics.median(losses[-max(1, len(losses) // 20) :]) if losses else None,
        "median_step_s": statistics.median(row["step_s"] for row in steps),
        "time_s": sum(row["step_s"] for row in steps),
        "tokens": sum(row["tokens"] for row in steps),
        "skipped": [row["step"] for row in steps if row["loss"] is None],
    }


def _curves(steps: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those that have a number in any step; of many steps, one in so many for the table."""
    (loss, *others), experts = _CURVES, _experts(steps)
    for field, label, what in (loss, *experts, *others):
        # Some have a number at some steps alone.
        points = [{"step": row["step"], field: row[field], "warm_up": False} for row in steps if field in row]
        every = max(1, -(-len(points) // charts.MAX_STEPS))
        if all(point[field] is None for point in points):
            continue
        # Inside a sentence, where GiB stays what it is.
        inside = label[0].lower() + label[1:]
        yield {
            "label": label,
            "axis_label": inside,
            "what": what,
            "chart": charts.over_steps(points, field, inside, f"run-{field.replace('/', '-')}"),
            "every": every,
            "points": [(point["step"], point[field]) for point in points[::every]],
        }


def _experts(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The losses of two experts, of a run that trains both."""
    names = [field for field in (steps[0] if steps else {}) if field.startswith("loss/")]
    return [(name, f"Loss, {name.removeprefix('loss/')} expert", "At its own times alone.") for name in names]


def _clips(folder: Path) -> dict[str, Any] | None:
    """The latest clips, and those of some samplings before, by caption."""
    found = {
        int(path.parent.name.removeprefix("step_")): path
        for path in (folder / SAMPLES).glob("step_*/captions.txt")
        if path.parent.name.removeprefix("step_").isdecimal() and is_plain(path, folder)
    }
    if not found:
        return None
    taken, last = sorted(found), len(found) - 1
    picks = [
        taken[i] for i in sorted({round(i * last / (_MAX_SAMPLINGS - 1)) for i in range(_MAX_SAMPLINGS)})
    ]
    rows = []
    captions = read_text(found[taken[-1]], folder, _MOST_CAPTION_BYTES).splitlines()[:_MAX_CLIPS]
    for index, caption in enumerate(captions, start=1):
        clips = [(step, found[step].parent / f"clip_{index}.mp4") for step in picks]
        places = [
            (step, clip.relative_to(folder).as_posix()) for step, clip in clips if is_plain(clip, folder)
        ]
        rows.append((caption, places))
    return {"num_shown": len(picks), "num_samplings": len(found), "rows": rows}


def _buckets(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int, float]]:
    """How often each size came, and its share of the clips; nothing where none was given."""
    counts: dict[str, list[int]] = {}
    for row in steps:
        for name, value in row.items():
            if name.startswith("clips/") and value is not None:
                counts.setdefault(name.removeprefix("clips/"), []).append(int(value))
    total = sum(map(sum, counts.values()))
    if not total:
        return []
    most_first = sorted(counts.items(), key=lambda item: -sum(item[1]))
    return [(size, len(of_steps), sum(of_steps), sum(of_steps) / total) for size, of_steps in most_first]


def _cache(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    with_it = [row for row in steps if None not in (row.get("cache_hits"), row.get("cache_misses"))]
    if not with_it:
        return None
    hits = sum(row["cache_hits"] for row in with_it)
    asked = hits + sum(row["cache_misses"] for row in with_it)
    return {"hits": hits, "asked": asked, "share": hits / asked if asked else None}


def _options(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """What is set, each with its dotted name."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _options(f"{name}.{key}" if name else key, inner)
    elif value not in ("", [], {}, None):
        yield name, json.dumps(value, ensure_ascii=False)
