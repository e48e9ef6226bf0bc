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
# note(what, detail): told of each piece of work before it starts.
Note = Callable[..., None]

# ---- options


def make_parser(program: str, description: str, examples: str, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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


def choose_device(options: argparse.Namespace, ranks: int = 1) -> bool:
    """Fills in the device, which other defaults hang on; whether it is CUDA."""
    options.device = options.device or ("cuda" if torch.cuda.device_count() >= ranks else "cpu")
    return bool(options.device == "cuda")


def check_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, defaults: Mapping[str, Any], ranks: int = 1
) -> None:
    """Fills in what was left out, and exits on what cannot be, before minutes have gone into measuring."""
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, for quartiles; got {options.rounds}")
    if options.device == "cuda" and torch.cuda.device_count() < ranks:
        parser.error(
            f"--device cuda needs {ranks} GPU(s), one for each rank, and there are {torch.cuda.device_count()}; "
            "use --device cpu, or fewer ranks"
        )
    if options.picture:
        try:
            importlib.import_module("matplotlib")
        except ModuleNotFoundError:
            parser.error("--picture needs matplotlib: pip install matplotlib, or leave --picture out")


# ---- turns


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_ms(function: Callable[[], Any], device: torch.device, calls: int = 1) -> float:
    """Milliseconds of one call, on the mean of `calls`; all ranks start together where there are several."""
    synchronize(device)
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        result = function()
    synchronize(device)
    elapsed_ms = (time.perf_counter() - start) * 1e3 / calls
    del result  # after the clock: freeing is not part of it
    return elapsed_ms


def take_turns(
    turns: Mapping[str, Callable[[], float | None]], rounds: int, note: Note
) -> dict[str, list[float]]:
    """For each side, what its turn returned in every round; a turn may return None, which is left out."""
    names, times = list(turns), {name: list[float]() for name in turns}
    for number in range(-WARM_UP_ROUNDS, rounds):
        for at in range(len(names)):
            name = names[(number + at) % len(names)]
            note("times", f"{name}: {f'round {number + 1}' if number >= 0 else 'warm-up'}")
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
        yield from (*(f"- {note}" for note in self.notes), "")


class Report:
    """One run: where and how it was made, its rows by name, its tables, its claims."""

    def __init__(self, options: argparse.Namespace, program: str, given: Sequence[str], **facts: Any) -> None:
        self._options = options
        self.tables: list[Table] = []
        self.result: dict[str, Any] = {
            "hardware": hardware(torch.device(options.device)),
            "load_average_at_start": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "versions": versions() | facts.pop("versions", {}),
            "command": _command(program, given),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **facts,
            "claims": [],
        }

    def show(self, table: Table) -> None:
        self.tables.append(table)
        print("\n".join(table.text()), flush=True)

    def finish(self, draw: Callable[[dict[str, Any], Path], None] | None = None) -> None:
        """Shows the claims, and saves all."""
        words = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}
        rows = [claim | {"told": words[claim["held"]]} for claim in self.result["claims"]]
        columns = {"": "told", "value": "value", "asked": "comparison", "of": "threshold", "claim": "claim"}
        if rows:
            self.show(Table.of("Claims", columns, rows))
        self.save(draw)

    def save(self, draw: Callable[[dict[str, Any], Path], None] | None = None) -> None:
        """Writes what was asked for. Called after each part: the next one may take long, and be interrupted."""
        options = self._options
        # Lists of numbers on one line each, or the rounds would be most of the file's lines.
        text = json.dumps(self.result, indent=1, ensure_ascii=False)
        text = re.sub(r"\[[-+.\deE,\s]+\]", lambda found: " ".join(found[0].split()), text) + "\n"
        for path, content in ((options.output, text), (options.markdown, self._markdown())):
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
        if options.picture and draw is not None:
            options.picture.parent.mkdir(parents=True, exist_ok=True)
            draw(self.result, options.picture)

    def _markdown(self) -> str:
        result, names = self.result, ", ".join(f"{k} {v}" for k, v in self.result["versions"].items() if v)
        where = f"{result['hardware'].get('gpu') or result['hardware']['cpu']}, {os.cpu_count()} cores"
        lines = [f"Measured by `{result['command']}` on {where}; {names}; {result['date']}.\n"]
        for table in self.tables:
            lines += table.markdown()
        return "\n".join(lines)


def _command(program: str, given: Sequence[str]) -> str:
    """As it can be typed elsewhere: of a path only the name."""
    shown = []
    for argument in given:
        option, equals, value = argument.rpartition("=")
        shown.append(option + equals + (Path(value).name if "/" in value else value))
    return f"{program} {shlex.join(shown)}".strip()


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


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}


# ---- progress


@contextlib.contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Note]:
    """Within it, a `Note`: a bar on a terminal, elsewhere a line for each new `what`. Both go to stderr."""
    last = [""]

    def print_line(what: str, detail: str = "") -> None:
        if what != last[0]:
            last[0] = what
            print(f"{title}: {what}", file=sys.stderr, flush=True)

    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield print_line
        return
    if not sys.stderr.isatty():
        yield print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[step]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        row, started = bar.add_task(title, total=total, step=""), set[str]()

        def update(what: str, detail: str = "") -> None:
            bar.update(row, completed=len(started), step=f"{what} {detail}")
            started.add(what)

        yield update
