"""What the benchmarks share: options, turns, claims, tables, result files, and the ranks that measure.

A benchmark is one script of this folder. Its docstring says what it claims. It measures ours and the others in one run
and hands rows, tables and claims to a `Report`, which prints them and writes JSON, markdown and a picture.

Turns. A machine's speed drifts while one measures, so sides are never timed one after the other. They take turns, and
the order changes from round to round; with three sides a, b, c the rounds are abc, bca, cab. A ratio is taken of two
turns of the same round, and the median of these ratios counts, with its quartiles. With several ranks a barrier stands
before each turn, and the slowest rank's time counts.

Ranks. A peer may raise, abort or hang, and the run must go on. So the ranks are processes of their own that work
through a list of tasks and write what they find to a pipe, one line of JSON for each event, which the launcher reads.
With P = 3 ranks and tasks t0, t1, t2, where rank 1 fails in t1:

    rank 0   start t0, done t0, start t1, …  (waits for rank 1)
    rank 1   start t0, done t0, start t1, failed: the reason
    rank 2   start t0, done t0, start t1, …  (waits for rank 1)

t0 is done, as all three ranks say so; t1 raised. Its ranks cannot be used again: the launcher ends them and starts
three new ones for t2.
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
import queue
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WARM_UP_ROUNDS = 2
Note = Callable[..., None]
"""note(what, detail): told of each piece of work before it starts."""

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
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--only", default="", metavar="TEXT", help="only what has TEXT in its name")
    add("--rounds", type=int, default=rounds, help=f"timed turns of each side (default: {rounds})")
    add("--quick", action="store_true", help="small and short: checks that all runs; its times say nothing")
    add("--output", type=Path, metavar="FILE", help="write all figures here, as JSON")
    add("--markdown", type=Path, metavar="FILE", help="write the tables here")
    add("--picture", type=Path, metavar="FILE", help="draw a PNG here, where the benchmark has a picture")
    return parser


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace, ranks: int = 1) -> None:
    """Exits on what cannot be, before minutes have gone into measuring."""
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


def slowest_rank(times: Mapping[str, list[float]], device: torch.device) -> dict[str, list[float]]:
    """The same with the largest over all ranks in place of each number."""
    table = torch.tensor(list(times.values()), dtype=torch.float64, device=device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return dict(zip(times, table.tolist(), strict=True))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, and the values themselves."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "rounds": [round(value, 4) for value in values]}


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Spread of the ratio of two sides' turns in the same round."""
    return spread([one / other for one, other in zip(above, below, strict=True)])


def show_spread(values: Mapping[str, Any], digits: int) -> str:
    return f"{values['median']:.{digits}f} [{values['q1']:.{digits}f}, {values['q3']:.{digits}f}]"


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


def claim_cells(claim: Mapping[str, Any]) -> list[str]:
    held = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}[claim["held"]]
    value = "–" if claim["value"] is None else f"{claim['value']:.4g}"
    return [held, value, f"{claim['claim']}: {claim['comparison']} {claim['threshold']:g}"]


@dataclass(frozen=True)
class Table:
    """Cells to read in a terminal or in a document."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def text(self) -> Iterator[str]:
        lines = [self.header, *self.rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(self.header))]
        yield f"\n{self.title}"
        for line in lines:
            yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        yield from (f"  {note}" for note in self.notes)

    def markdown(self) -> Iterator[str]:
        yield from (
            f"### {self.title}",
            "",
            f"| {' | '.join(self.header)} |",
            "|---" * len(self.header) + "|",
        )
        yield from (f"| {' | '.join(line)} |" for line in self.rows)
        yield ""
        if self.notes:
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

    def show_claims(self) -> None:
        if self.result["claims"]:
            cells = [claim_cells(claim) for claim in self.result["claims"]]
            print("\nclaims:\n" + "\n".join("  ".join([f"  {c[0]:<13}", f"{c[1]:>10}", c[2]]) for c in cells))

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
        claims = Table("Claims", ("", "value", "claim"), [claim_cells(claim) for claim in result["claims"]])
        for table in (*self.tables, claims):
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


# ---- pictures

# Colours that the colour-blind tell apart (Okabe and Ito, https://jfly.uni-koeln.de/color/).
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#8A8A8A"


@contextlib.contextmanager
def drawing(path: Path, width: float, height: float) -> Iterator[Any]:
    """Within it, a matplotlib figure of so many inches, which is then saved."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titleweight": "bold",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), dpi=140, facecolor="white")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path)


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
        row, started = bar.add_task(title, total=total, step=""), set()

        def update(what: str, detail: str = "") -> None:
            bar.update(row, completed=len(started), step=f"{what} {detail}")
            started.add(what)

        yield update


# ---- ranks: the launcher's side

START_S = 120.0
"""How long ranks may take to import what they need and find each other, before the first task."""
GRACE_S = 3.0
"""How long the other ranks may take to say what they found, once one has failed."""
REASON_LENGTH = 180


@dataclass(frozen=True)
class Job:
    """How ranks are started. For each task they call `run_task(world, task, note)` of the script."""

    script: str
    num_ranks: int
    device: str = "cpu"
    silence_s: float = 60.0
    """Ranks that say nothing for so long hang."""
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of one task: "done", or "raises", "aborts", "hangs" with the reason."""

    status: str
    reason: str = ""
    by_rank: Sequence[Any] = ()


def run_tasks(
    job: Job, tasks: Sequence[Mapping[str, Any]], note: Callable[[int, str], None]
) -> list[Outcome]:
    """An outcome for every task. After one that fails, the rest goes on in a fresh group of ranks.

    Args:
        tasks: plain data, as it travels as JSON.
        note: told the number of the task that runs, and what it says about itself.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(tasks):
        first = len(outcomes)
        with tempfile.TemporaryDirectory() as folder:
            outcomes += _run_group(job, tasks[first:], Path(folder), lambda at, text: note(first + at, text))  # noqa: B023
    return outcomes


def _run_group(
    job: Job, tasks: Sequence[Any], folder: Path, note: Callable[[int, str], None]
) -> list[Outcome]:
    """Outcomes of all tasks, or of those up to the first that fails."""
    (folder / "job.json").write_text(json.dumps(asdict(job) | {"tasks": tasks}), encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": _lend_package(folder),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "HF_HUB_OFFLINE": "1",
    }
    events: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
    processes = [
        _start_rank(job, rank, folder, environment | job.environment, events) for rank in range(job.num_ranks)
    ]
    results: list[list[Any]] = [[] for _ in processes]
    failures, codes, deadline = [], dict[int, int](), None
    patience_s = max(START_S, job.silence_s)
    try:
        while len(codes) < job.num_ranks and min(map(len, results)) < len(tasks):
            try:
                rank, event = events.get(timeout=patience_s)
            except queue.Empty:
                break
            if "done" in event:
                results[rank].append(event["done"])
            elif "failed" in event:
                failures.append(event["failed"])
            elif "ended" in event:
                codes[rank] = event["ended"]
            elif rank == 0:
                note(event["start"], event["note"])
            patience_s = job.silence_s
            if failures or any(codes.values()):
                deadline = deadline or time.monotonic() + GRACE_S
                patience_s = max(0.0, deadline - time.monotonic())
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    done = [
        Outcome("done", by_rank=found) for found in zip(*results, strict=False)
    ]  # what every rank has done
    if len(done) == len(tasks):
        return done
    if not failures and not codes:
        return [*done, Outcome("hangs", f"nothing was heard of it for {job.silence_s:g} s")]
    return [*done, _failure(failures, codes, folder)]


def _failure(failures: Sequence[str], codes: Mapping[int, int], folder: Path) -> Outcome:
    """An abort, or the first reason that a rank gave which is more than having lost another."""
    causes = [reason for reason in failures if "gloo/transport" not in reason]
    aborted = next((rank for rank, code in codes.items() if code < 0), None)
    if aborted is not None and not causes:
        return Outcome("aborts", f"{signal.Signals(-codes[aborted]).name}: {_last_words(folder, aborted)}")
    if failures:
        return Outcome("raises", _shorten([*causes, *failures][0]))
    return Outcome("raises", _last_words(folder, max(codes, key=lambda rank: codes[rank])))


def _start_rank(
    job: Job, rank: int, folder: Path, environment: Mapping[str, str], events: queue.Queue[Any]
) -> subprocess.Popen[bytes]:
    """A process, and a thread that puts what it says into the queue, and last its exit status."""
    reading, writing = os.pipe()
    command = [job.python, __file__, str(folder / "job.json"), str(rank), str(writing)]
    with open(folder / f"stderr{rank}", "wb") as stderr:
        streams: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": stderr,
        }
        process = subprocess.Popen(command, env=environment, pass_fds=[writing], **streams)
    os.close(writing)

    def listen() -> None:
        with os.fdopen(reading, encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):  # a process that is killed may leave half a line
                    events.put((rank, json.loads(line)))
        events.put((rank, {"ended": process.wait()}))

    threading.Thread(target=listen, daemon=True).start()
    return process


def _lend_package(folder: Path) -> str:
    """A value of PYTHONPATH that brings this package into another environment, and nothing installed beside it."""
    import opensora_accel

    (folder / "path").mkdir()
    (folder / "path" / "opensora_accel").symlink_to(Path(opensora_accel.__file__).resolve().parent)
    return os.pathsep.join([str(folder / "path"), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])


def _last_words(folder: Path, rank: int) -> str:
    text = (folder / f"stderr{rank}").read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return _shorten(lines[-1]) if lines else "it said nothing"


def _shorten(text: str) -> str:
    """One line, without where in whose source it was said."""
    line = " ".join(re.sub(r"\[enforce fail at [^]]*\]|what\(\):", "", text).split())
    return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 1] + "…"


# ---- ranks: a rank's side


@dataclass(frozen=True)
class World:
    """The ranks that measure together."""

    rank: int
    num_ranks: int
    device: torch.device
    group: dist.ProcessGroup


def serve(job_file: Path, rank: int, writing: int) -> None:
    """Works through the tasks of a job. A task that fails ends the process: the others still wait for this rank."""
    job, folder = json.loads(job_file.read_text(encoding="utf-8")), job_file.parent
    warnings.filterwarnings("ignore")
    with os.fdopen(writing, "w", encoding="utf-8") as events:

        def tell(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        try:
            run_task = importlib.import_module(job["script"]).run_task
            world = start_world(job, rank, folder)
            for number, task in enumerate(job["tasks"]):
                tell(start=number, note="")
                # No rank is in the next task while another still answers for this one.
                dist.barrier()

                def note(what: str, detail: str = "", number: int = number) -> None:
                    tell(start=number, note=f"{what} {detail}")

                tell(done=run_task(world, task, note))
        except BaseException as error:  # noqa: BLE001 - whatever it was, it is this task's result
            tell(failed=f"{type(error).__name__}: {error}")
            # Not by way of Python's own end, which waits for what other ranks will never send.
            os._exit(1)
        dist.barrier()
    dist.destroy_process_group()


def start_world(job: Mapping[str, Any], rank: int, folder: Path) -> World:
    torch.set_num_threads(1)
    on_cuda = job["device"] == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    # A file store: a TCP store's server listens on every interface of the machine.
    store = dist.FileStore(str(folder / "store"), job["num_ranks"])
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=job["num_ranks"])
    assert dist.group.WORLD is not None
    return World(rank, job["num_ranks"], device, dist.group.WORLD)


def count_traffic(run: Callable[[], Any]) -> dict[str, Any]:
    """Calls of torch.distributed on this rank while `run` runs, and the bytes in them that other ranks get.

    Sizes that ranks tell each other (int64) are counted apart from data. `uncounted` are operators whose bytes the
    recorder does not know.
    """
    from opensora_accel.verify.communication.record import Recorder

    with Recorder() as recorder:
        run()
    found: dict[str, Any] = dict.fromkeys(("collectives", "sends", "barriers", "size_exchanges"), 0)
    found |= {"sizes_bytes": 0, "sent_bytes": 0, "uncounted": []}
    for call in recorder.calls:
        if call.kind == "barrier":
            found["barriers"] += 1
        elif call.kind == "unknown":
            found["collectives"] += 1
            found["uncounted"].append(call.operator)
        elif call.kind != "recv" and call.dtype == "int64":
            found["size_exchanges"] += 1
            found["sizes_bytes"] += call.sent_bytes
        elif call.kind != "recv":
            found["sends" if call.kind == "send" else "collectives"] += 1
            found["sent_bytes"] += call.sent_bytes
    return found


if __name__ == "__main__":
    # Under its own name, so that a benchmark that imports it has the same classes.
    importlib.import_module("harness").serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
