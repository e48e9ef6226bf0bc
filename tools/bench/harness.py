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
import datetime
import importlib
import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WARM_UP_ROUNDS = 2
# In one CUDA graph.
GRAPH_CALLS = 8


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout holds the tables alone."""
    print(text, file=sys.stderr, flush=True)


# ---- options


def make_parser(script: str, description: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        prog=f"python tools/bench/{script}.py",
        description=description,
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


def parse_options(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    usual: Mapping[str, Mapping[str, Any]],
    is_alone: Callable[[argparse.Namespace], bool] = lambda given: False,
) -> argparse.Namespace:
    """The options; exits on what cannot be, before minutes have gone into measuring.

    Args:
        usual: the defaults of a run on "cpu" or "cuda", and of a "quick" one, which replace the parser's own.
        is_alone: whether what was chosen runs in this process, whatever --ranks says.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # Read twice: the defaults of the second reading depend on what is given in the first.
    given, _ = parser.parse_known_args(arguments)
    ranks = getattr(given, "ranks", [1])
    num_ranks, num_gpus = 1 if is_alone(given) else max(ranks), torch.cuda.device_count()
    device = given.device or ("cuda" if num_gpus >= num_ranks else "cpu")
    if device == "cuda" and num_gpus < num_ranks:
        parser.error(
            f"--device cuda needs {num_ranks} GPU(s), one for each rank, and there are {num_gpus}; "
            "use --device cpu, or fewer ranks"
        )
    if "ranks" in given and min(ranks) < 2:
        parser.error(f"--ranks must be at least 2: one rank has nobody to send to; got {min(ranks)}")
    parser.set_defaults(device=device, **usual.get(device, {}))
    if given.quick:
        parser.set_defaults(**usual["quick"])
    options = parser.parse_args(arguments)
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


def clock(function: Callable[[], Any], device: torch.device) -> Callable[[int], float]:
    """Tells the milliseconds of one call, on the mean of at least so many; on a GPU those of its kernels alone.

    Kernels of 0.1 ms end before the host, which takes as long for a backward in Python, has asked for the next. So
    several calls stand in a CUDA graph, whose own start, some 8 µs, they share.
    """
    if device.type != "cuda":
        return partial(time_ms, function, device)
    beside = torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        for _ in range(3):  # compiled, and tuned
            function()
    torch.cuda.current_stream(device).wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            function()

    def replay(_reads: Any = function) -> None:
        # The graph knows addresses alone: what lies there lives as long as the function.
        graph.replay()

    return lambda calls: time_ms(replay, device, -(-calls // GRAPH_CALLS)) / GRAPH_CALLS


def copy_bytes_per_s(device: torch.device) -> float:
    """What a GPU reads and writes in a second, as it copies 320 MiB."""
    source = torch.randn(32768, 5120, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copies = clock(lambda: target.copy_(source), device)
    times = [copies(10) for _ in range(15)]
    return 2 * source.nbytes / (spread(times)["median"] / 1e3)


def take_turns(turns: Mapping[str, Callable[[], float | None]], rounds: int) -> dict[str, list[float]]:
    """For each side, what its turn returned in every round; a turn may return None, which is left out."""
    names, times = list(turns), {name: list[float]() for name in turns}
    for number in range(-WARM_UP_ROUNDS, rounds):
        for at in range(len(names)):
            name = names[(number + at) % len(names)]
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


# ---- claims and tables

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
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return f"{value['median']:.4g} [{value['q1']:.4g}, {value['q3']:.4g}]"
    if path.endswith("_bytes"):
        return f"{value / 2**20:.2f}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_error(error: float | None, digits: int = 0) -> str:
    """None is an error that is not finite."""
    return "NaN" if error is None else f"{error:.{digits}e}"


def make_table(title: str, columns: Mapping[str, str], rows: Iterable[Row], notes: Sequence[str] = ()) -> str:
    """Markdown, padded so that it reads in a terminal too.

    Args:
        columns: the path of each column's value, by the column's name.
    """
    lines = [list(columns)]
    lines += [[show(look_up(row, path), path) for path in columns.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    text = [f"## {title}", ""]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join([*text, "", *(f"- {note}" for note in notes), ""])


# ---- result files


class Report:
    """One run: where and how it was made, its rows by name, its tables, its claims."""

    def __init__(self, options: argparse.Namespace, versions: Mapping[str, str] | None = None, **facts: Any):
        self._options = options
        self._tables: list[str] = []
        known = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
        self.result: dict[str, Any] = {
            "hardware": hardware(options.device),
            "load_average_at_start": os.getloadavg()[0],
            "versions": known | dict(versions or {}),
            "command": options.command,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "rounds": options.rounds,
            **facts,
            "claims": [],
        }

    def show(self, table: str) -> None:
        """Prints the table and saves all that is known: the next part may take long, and be interrupted."""
        self._tables.append(table)
        print(table, flush=True)
        self.save()

    def finish(self, draw: Callable[[dict[str, Any], Path], None] | None = None) -> None:
        """Shows the claims, saves all, and draws the picture that was asked for."""
        words = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}
        rows = [claim | {"told": words[claim["held"]]} for claim in self.result["claims"]]
        columns = {"": "told", "value": "value", "asked": "comparison", "of": "threshold", "claim": "claim"}
        self.show(make_table("Claims", columns, rows))
        picture = self._options.picture
        if picture and draw is not None:
            picture.parent.mkdir(parents=True, exist_ok=True)
            draw(self.result, picture)

    def save(self) -> None:
        """Writes all that is known to the files that were asked for."""
        result = self.result
        # Lists of numbers on one line each, or the rounds would be most of the file's lines.
        text = json.dumps(result, indent=1, ensure_ascii=False)
        text = re.sub(r"\[[-+.\deE,\s]+\]", lambda found: " ".join(found[0].split()), text) + "\n"
        names = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
        where = f"{result['hardware'].get('gpu') or result['hardware']['cpu']}, {os.cpu_count()} cores"
        title = Path(sys.argv[0]).stem.replace("_", " ").capitalize()
        tables = [
            f"# {title}, measured\n",
            f"Measured by `{result['command']}` on {where}; {names}; {result['date']}.\n",
            *self._tables,
        ]
        for path, content in ((self._options.output, text), (self._options.markdown, "\n".join(tables))):
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")


def hardware(device: str) -> dict[str, Any]:
    """What the run was measured on."""
    information = Path("/proc/cpuinfo")
    text = information.read_text(encoding="utf-8") if information.exists() else ""
    name = re.search(r"model name\s*:\s*(.*)", text)
    found: dict[str, Any] = {
        "cpu": name[1] if name else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "device": device,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return found
