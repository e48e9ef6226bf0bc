"""`opensora-accel report`: where the time, the memory and the bytes of a profiled run went, on one page.

The page is one file that loads nothing, with pictures as SVG; a JSON file beside it has every number on it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opensora_accel.files import check_folder_of, replacing
from opensora_accel.observe import Forecast, MeasuredParts
from opensora_accel.profiler.against import against, text_of
from opensora_accel.profiler.analyse import analyse
from opensora_accel.profiler.compare import changes, settings_changed
from opensora_accel.profiler.findings import findings_of
from opensora_accel.profiler.run_page import is_run, write_run_page

_DESCRIPTION = """\
Reads what profiled runs wrote (a folder with rank_*.jsonl each) and makes one page of it: what stands out and what to
do about it, where the step goes on every rank, memory by kind, communication by axis and between ranks, offload, loss
and throughput. The page is one file that needs no network and no JavaScript; a JSON file beside it has every number.

The output of a training run becomes a page too: its losses, sampled clips, sizes of clips and cache, in run.html."""

_EXAMPLES = """\
examples:
  opensora-accel report runs/a/profile                         writes runs/a/profile/report.html and report.json
  opensora-accel report runs/a/profile runs/b/profile --compare --out compared.html
                                                               side by side, with what changed, the most first
  opensora-accel report runs/a/profile --against plan.json     beside the forecast of its plan
  ... --correct my_hardware.json                               and writes hardware by which it would have been foreseen
  opensora-accel report runs/a                                 writes runs/a/run.html

how to read the page: docs/profiling.md"""


def write_report(
    folders: Sequence[Path],
    out: Path,
    compare: bool = False,
    label: str = "",
    against_plan: Path | None = None,
) -> dict[str, Any]:
    """Writes the page to `out` and its numbers beside it, with the ending .json; returns the numbers.

    Args:
        folders: of one or more profiled runs.
        out: a file that ends in .html.
        compare: show what changed from the first of two runs to the second.
        label: stands under the title.
        against_plan: the file of a plan whose forecast, which lies beside it, the one run is held against.

    Raises:
        ValueError: a folder has no records, or they are damaged; comparing other than two; `out` is no .html.
        OSError: a file cannot be written.
        ModuleNotFoundError: matplotlib, jinja2 or pydantic is not installed.
    """
    if compare and len(folders) != 2:
        raise ValueError(
            f"--compare needs two runs, and there are {len(folders)}: give the earlier one first"
        )
    if out.suffix != ".html":
        raise ValueError(f"the page's file must end in .html (its numbers go to .json); got {out}")
    # Before the files are read, which takes a while.
    from opensora_accel.profiler.page import page

    forecast = Forecast.of_plan(against_plan) if against_plan is not None else None
    if forecast is not None and len(folders) != 1:
        raise ValueError(f"--against is for one run, and there are {len(folders)}")
    runs = [analyse(folder) for folder in folders]
    names = [_distinct_name(folder, folders) for folder in folders]
    document: dict[str, Any] = {
        "label": label,
        "runs": [
            {
                **dataclasses.asdict(run),
                "name": name,
                "findings": [dataclasses.asdict(finding) for finding in findings_of(run)],
            }
            for run, name in zip(runs, names, strict=True)
        ],
    }
    if compare:
        document["settings"] = [dataclasses.asdict(row) for row in settings_changed(*runs)]
        document["changes"] = [dataclasses.asdict(row) for row in changes(*runs)]
    if forecast is not None and against_plan is not None:
        document["against"] = dataclasses.asdict(against(runs[0], forecast, against_plan))
        # Forms that are tuples have names in the page.
        for row in document["against"]["rows"]:
            if row["forecast"] is not None:
                row["forecast"] = row["forecast"]._asdict()
    # As it is in the file: ranks that are names become text, tuples become lists.
    text = json.dumps(document, indent=1)
    document = json.loads(text)
    for path, content in ((out.with_suffix(".json"), text), (out, page(document))):
        # In the place of a link, not through it.
        with replacing(path) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return document


def _distinct_name(folder: Path, folders: Sequence[Path]) -> str:
    """As little of the path as tells it from the others; "profile" alone says nothing."""
    parts = folder.resolve().parts
    length = 2 if parts[-1] == "profile" else 1
    while (
        length < len(parts)
        and sum(other.resolve().parts[-length:] == parts[-length:] for other in folders) > 1
    ):
        length += 1
    return "/".join(parts[-length:])


def _summary(run: Mapping[str, Any], most: int = 4) -> Iterator[str]:
    """What the devices waited for, the path that bounds the step, whom others waited for, calls, kernels."""
    idle = sorted((each for each in run["idle"] if each["mean_s"]), key=lambda each: -each["mean_s"])
    texts = {
        "the devices wait for": [
            f"{each['cause']} {each['share']:.1%} (rank {each['rank']}: {each['most_s']:.3g} s)"
            for each in idle
        ],
        "the step is made of": [
            f"{each['what']} {each['share']:.1%} (rank {each['rank']})" for each in run["critical_path"]
        ],
        "others wait for": [
            f"rank {each['rank']}, {each['waiting_ranks']} of them {each['mean_s']:.3g} s each over "
            f"{each['axis'] or 'no axis'}"
            for each in run["late_ranks"]
        ],
        "calls": [
            f"{each['calls']:,.4g} × {each['kind']} over {each['axis'] or 'no axis'} of "
            f"{each['from_bytes'] >> 10:,} KiB or more, {each['share']:.1%} of the step"
            for each in run["sizes"]
        ],
        "kernels": [
            f"{each['kind']} {each['share']:.1%}" for each in (run["kernels"] or {}).get("by_kind", ())
        ],
    }
    for what, rows in texts.items():
        if rows:
            yield f"  {what}: {'; '.join(rows[:most])}"


# Writes a hardware file that is corrected by what was measured; a line for each correction.
Correct = Callable[[Path, Forecast, MeasuredParts], list[str]]


def main(arguments: Sequence[str], correct: Correct | None = None) -> int:
    """`opensora-accel report`; returns the exit status.

    Args:
        correct: what `--correct` does, which the planner knows.

    Raises:
        ValueError: an output of a training run is given with an option, or beside a folder that is none.
    """
    parser = argparse.ArgumentParser(
        "opensora-accel report",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a profiled run, or output of a training run",
    )
    parser.add_argument(
        "--compare", action="store_true", help="show what changed from the first run to the second"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page; by default RUN/report.html of the last run"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="PLAN",
        help="hold the run against the forecast that lies beside this plan",
    )
    parser.add_argument(
        "--correct", type=Path, metavar="HARDWARE",
        help="with --against: write a hardware file (.json) that is corrected by the run, for plan --hardware",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.correct is not None:
        if options.against is None:
            raise ValueError("--correct follows from --against PLAN; give both")
        check_folder_of(options.correct)
    of_training = [folder for folder in options.runs if is_run(folder)]
    if of_training:
        if options.compare or options.out or options.against or len(of_training) < len(options.runs):
            raise ValueError(
                f"{of_training[0]} is the output of a training run, whose page is run.html in it; leave --compare, "
                f"--out, --against and profiles out, or give its profile, {of_training[0] / 'profile'}"
            )
        for folder in of_training:
            print(f"the page: {write_run_page(folder)}")
        return 0
    out = options.out or options.runs[-1] / "report.html"
    document = write_report(options.runs, out, options.compare, against_plan=options.against)
    for run in document["runs"]:
        count = len(run["findings"])
        print(
            f"{run['name']}: {run['num_ranks']} ranks, {run['num_steps']} steps; {count or 'no'} finding(s)"
        )
        for number, finding in enumerate(run["findings"], start=1):
            print(f"  {number}. {finding['text']}\n     try: {finding['remedy']}")
        for line in _summary(run):
            print(line)
    if "against" in document:
        print(text_of(document["against"]))
    if options.correct is not None and correct is not None:
        parts = MeasuredParts(*document["against"]["measured"])
        print(f"corrected in {options.correct}, for the next plan --hardware {options.correct}:")
        for line in correct(options.correct, Forecast.of_plan(options.against), parts):
            print(f"  {line}")
    print(f"the page: {out} ({out.stat().st_size / 1e6:.1f} MB); its numbers: {out.with_suffix('.json')}")
    return 0
