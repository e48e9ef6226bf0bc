"""What the benchmarks share: options, turns, claims, tables and result files.

A benchmark is one script of this folder. Its docstring says what it claims. It measures ours and the others in one run
and hands rows, tables and claims to a `Report`, which prints them and writes JSON, markdown and a picture.

Turns. A machine's speed drifts while one measures, so sides are never timed one after the other. They take turns, and
the order changes from round to round; with three sides a, b, c the rounds are abc, bca, cab. A ratio is taken of two
turns of the same round, and the median of these ratios counts, with its quartiles. With several ranks a barrier stands
before each turn, and the slowest rank's time counts.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WARM_UP_ROUNDS = 2
# note(text): told of each piece of work before it starts. A rank tells its launcher in this way that it lives.
Note = Callable[[str], None]


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout holds the tables alone."""
    print(text, file=sys.stderr, flush=True)


# ---- options


def make_parser(program: str, description: str | None, examples: str, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=program, description=description, epilog=examples, formatter_class=style
    )
    parser.allow_abbrev = False
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda where every rank has a GPU")
    add("--only", default="", metavar="TEXT", help="only what has TEXT in its name")
    add("--rounds", type=int, default=rounds, help=f"timed turns of each side (default: {rounds})")
    add("--quick", action="store_true", help="small and short: checks that all runs; its times say nothing")
    add("--output", type=Path, metavar="FILE", help="write all figures here, as JSON")
    add("--markdown", type=Path, metavar="FILE", help="write the tables here")
    add("--picture", type=Path, metavar="FILE", help="draw a PNG here, where the benchmark has a picture")
    return parser


def positive(text: str) -> int:
    """The type of an option.

    Raises:
        ArgumentTypeError: it is below 1.
    """
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return int(text)


def parse_options(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    quick: Mapping[str, Any],
    cpu: Mapping[str, Any] | None = None,
    cuda: Mapping[str, Any] | None = None,
    count_ranks: Callable[[argparse.Namespace], int] = lambda options: 1,
) -> argparse.Namespace:
    """The options; exits on what cannot be, before minutes have gone into measuring.

    Args:
        quick, cpu, cuda: the values of options that were left out: in a quick run, on a CPU, on a GPU.
        count_ranks: from the options, how many ranks run at once. Each needs a GPU of its own.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # What is None afterwards was left out: an option that was given its usual value must stay as it was given.
    options = parser.parse_args(arguments, argparse.Namespace(**dict.fromkeys(quick)))
    num_ranks, num_gpus = count_ranks(options), torch.cuda.device_count()
    options.device = options.device or ("cuda" if num_gpus >= num_ranks else "cpu")
    if options.device == "cuda" and num_gpus < num_ranks:
        parser.error(
            f"--device cuda needs {num_ranks} GPU(s), one for each rank, and there are {num_gpus}; "
            "use --device cpu, or fewer ranks"
        )
    defaults = {name: parser.get_default(name) for name in quick}
    defaults.update((cuda if options.device == "cuda" else cpu) or {})
    if options.quick:
        defaults.update(quick)
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, for quartiles; got {options.rounds}")
    if options.picture:
        try:
            importlib.import_module("matplotlib")
        except ModuleNotFoundError:
            parser.error("--picture needs matplotlib: pip install matplotlib, or leave --picture out")
    # The command as it can be typed elsewhere: a path is reduced to its name.
    shown = []
    for argument in arguments:
        option, equals, value = argument.rpartition("=")
        shown.append(option + equals + (Path(value).name if "/" in value else value))
    options.command = f"{parser.prog} {shlex.join(shown)}".strip()
    return options


# ---- turns


def time_ms(function: Callable[[], Any], device: torch.device, calls: int = 1) -> float:
    """Milliseconds of one call, on the mean of `calls`; all ranks start together where there are several."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    synchronize()
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        result = function()
    synchronize()
    elapsed_ms = (time.perf_counter() - start) * 1e3 / calls
    del result  # after the clock: freeing is not part of it
    return elapsed_ms


def take_turns(
    turns: Mapping[str, Callable[[], float | None]], rounds: int, note: Note = lambda text: None
) -> dict[str, list[float]]:
    """For each side, what its turn returned in every round; a turn may return None, which is left out."""
    names, times = list(turns), {name: list[float]() for name in turns}
    for number in range(-WARM_UP_ROUNDS, rounds):
        for at in range(len(names)):
            name = names[(number + at) % len(names)]
            note(f"{name}: round {number + 1}" if number >= 0 else f"{name}: warm-up")
            elapsed_ms = turns[name]()
            if number >= 0 and elapsed_ms is not None:
                times[name].append(elapsed_ms)
    return times


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, and the values themselves."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "rounds": [round(value, 4) for value in values]}


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Spread of the ratio of two sides' turns in the same round."""
    return spread([one / other for one, other in zip(above, below, strict=True)])


# ---- claims, tables, result files

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "at most": lambda value, threshold: value <= threshold,
    "at least": lambda value, threshold: value >= threshold,
    "above": lambda value, threshold: value > threshold,
    "exactly": lambda value, threshold: abs(value - threshold) < 1e-9,
    "1, to within": lambda value, threshold: abs(value - 1) <= threshold,
}


def make_claim(what: str, value: float | None, comparison: str, threshold: float) -> dict[str, Any]:
    """A claim that holds or does not; where the value is None it was not measured, and NaN never holds."""
    held = None if value is None else COMPARISONS[comparison](value, threshold)
    value = None if value is None or math.isnan(value) else value
    return {"claim": what, "comparison": comparison, "threshold": threshold, "value": value, "held": held}


Row = Mapping[str, Any]


def look_up(row: Any, path: str) -> Any:
    """`row["a"]["b"]` for "a.b"; None where there is no such thing, as in a row that was skipped."""
    for key in path.split("."):
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def show(value: Any, path: str = "") -> str:
    """A cell: bytes in MiB, a spread as median and quartiles, nothing as a dash."""
    if value is None or value == []:
        return "–"
    if isinstance(value, Mapping):
        return f"{value['median']:.4g} [{value['q1']:.4g}, {value['q3']:.4g}]"
    if path.endswith("_bytes"):
        return f"{value / 2**20:.2f}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Table:
    """Cells to read in a terminal or in a document."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    @classmethod
    def of(
        cls, title: str, columns: Mapping[str, str], rows: Iterable[Row], notes: Sequence[str] = ()
    ) -> Table:
        """A table of plain data; `columns` has the path of each column's value by the column's name."""
        cells = [[show(look_up(row, path), path) for path in columns.values()] for row in rows]
        return cls(title, list(columns), cells, notes)

    def text(self) -> Iterator[str]:
        lines = [self.header, *self.rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(self.header))]
        yield f"\n{self.title}"
        for line in lines:
            yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        yield from (f"  {note}" for note in self.notes)

    def markdown(self) -> Iterator[str]:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        yield from (f"### {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines), "")
        yield from (f"- {note}" for note in self.notes)
        yield ""


class Report:
    """One run: where and how it was made, its rows by name, its tables, its claims."""

    def __init__(self, options: argparse.Namespace, versions: Mapping[str, str] | None = None, **facts: Any):
        self._options = options
        self._tables: list[Table] = []
        known = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
        self.result: dict[str, Any] = {
            "hardware": hardware(torch.device(options.device)),
            "load_average_at_start": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "versions": {**known, **(versions or {})},
            "command": options.command,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **facts,
            "claims": [],
        }

    def show(self, table: Table) -> None:
        """Prints the table and saves all that is known: the next part may take long, and be interrupted."""
        self._tables.append(table)
        print("\n".join(table.text()), flush=True)
        self._save()

    def finish(self, draw: Callable[[dict[str, Any], Path], None] | None = None) -> None:
        """Shows the claims, saves all, and draws the picture that was asked for."""
        words = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}
        rows = [claim | {"told": words[claim["held"]]} for claim in self.result["claims"]]
        columns = {"": "told", "value": "value", "asked": "comparison", "of": "threshold", "claim": "claim"}
        if rows:
            self.show(Table.of("Claims", columns, rows))
        self._save()
        picture = self._options.picture
        if picture and draw is not None:
            picture.parent.mkdir(parents=True, exist_ok=True)
            draw(self.result, picture)

    def _save(self) -> None:
        result = self.result
        # Lists of numbers on one line each, or the rounds would be most of the file's lines.
        text = json.dumps(result, indent=1, ensure_ascii=False)
        text = re.sub(r"\[[-+.\deE,\s]+\]", lambda found: " ".join(found[0].split()), text) + "\n"
        names = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
        where = f"{result['hardware'].get('gpu') or result['hardware']['cpu']}, {os.cpu_count()} cores"
        lines = [f"Measured by `{result['command']}` on {where}; {names}; {result['date']}.\n"]
        for table in self._tables:
            lines += table.markdown()
        contents = ((self._options.output, text), (self._options.markdown, "\n".join(lines)))
        for path, content in contents:
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")


def hardware(device: torch.device) -> dict[str, Any]:
    """What the run was measured on."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    found: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "device": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "driver": None}
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
            found["driver"] = shown.strip().partition("\n")[0]
    return found
