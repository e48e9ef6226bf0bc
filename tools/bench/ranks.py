"""Ranks that measure: processes that the launcher starts, watches, and ends when they hang.

A peer may raise, abort or hang, and the run must go on. So the ranks are processes of their own. They are handed one
task after the other, and each writes what it finds to a file of its own, one line of JSON for each task. With P = 3
ranks and tasks t0, t1, t2, where rank 1 fails in t1:

    rank 0   found in t0              (waits for rank 1)
    rank 1   found in t0              why t1 failed, and ends
    rank 2   found in t0              (waits for rank 1)

t0 is done, as three files have its line; t1 raised. These ranks cannot be used again: the launcher ends them and starts
three new ones for t2.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]

# ---- the launcher's side

# How long ranks may take to import what they need and find each other, in addition to the first task.
START_S = 120.0
# How long the other ranks may take to say why they fail, once one has.
GRACE_S = 3.0
POLL_S = 0.05
REASON_LENGTH = 180


@dataclass(frozen=True)
class Job:
    """How ranks are started. For each task they call `run_task(world, task)` of the script."""

    script: str
    num_ranks: int
    device: str = "cpu"
    # A task that takes longer hangs.
    limit_s: float = 120.0
    python: str = sys.executable


@dataclass(frozen=True)
class Outcome:
    """What became of one task: "done" with what rank 0 found, or "raises", "aborts", "hangs" with the reason."""

    status: str
    reason: str = ""
    found: Any = None


def run_tasks(job: Job, tasks: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """An outcome for every task. After one that fails, the rest goes on with fresh ranks.

    Args:
        tasks: plain data, as it travels as JSON; the "label" of each is shown when it begins.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(tasks):
        with Ranks(job) as started:
            for task in tasks[len(outcomes) :]:
                harness.say(f"{job.num_ranks} ranks: {task['label']}")
                outcomes.append(started.run(task))
                if outcomes[-1].status != "done":
                    break
    return outcomes


class Ranks:
    """Ranks that wait for tasks, and take nothing of the processor while they wait.

    Several groups may be there at once and take turns, as where one rank is compared with four.
    """

    def __init__(self, job: Job):
        self._job, self._num_done = job, 0
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        (self._folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
        self._processes = [_start_rank(job, self._folder, rank) for rank in range(job.num_ranks)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: Any) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        self._temporary.cleanup()

    def run(self, task: Mapping[str, Any]) -> Outcome:
        """What becomes of a task. Ranks that have failed take no other."""
        line = (json.dumps(task) + "\n").encode()
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it could not start, which is told below
                process.stdin.write(line)
                process.stdin.flush()
        deadline = time.monotonic() + self._job.limit_s + (0 if self._num_done else START_S)
        is_failing = False
        while time.monotonic() < deadline:
            results = _read_results(self._job, self._folder)
            if min(map(len, results)) > self._num_done:
                self._num_done += 1
                return Outcome("done", found=results[0][-1])
            if all(process.poll() is not None for process in self._processes):
                break
            if any(process.poll() for process in self._processes) and not is_failing:
                is_failing, deadline = True, time.monotonic() + GRACE_S
            time.sleep(POLL_S)
        return _explain_failure(self._job, [process.poll() for process in self._processes], self._folder)


def _start_rank(job: Job, folder: Path, rank: int) -> subprocess.Popen[bytes]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        # What is measured is brought into another environment.
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "HF_HUB_OFFLINE": "1",
    }
    (folder / f"results{rank}").touch()
    with open(folder / f"stderr{rank}", "wb") as stderr:
        command = [job.python, __file__, str(folder), str(rank)]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr, env=environment
        )


def _read_results(job: Job, folder: Path) -> list[list[Any]]:
    """For each rank what it has found so far. A rank that is killed may leave half a line."""
    texts = [(folder / f"results{rank}").read_text(encoding="utf-8") for rank in range(job.num_ranks)]
    return [[json.loads(line) for line in text.splitlines(True) if line.endswith("\n")] for text in texts]


def _explain_failure(job: Job, codes: Sequence[int | None], folder: Path) -> Outcome:
    """The first reason that a rank gave which is more than having lost another; or an abort, or a hang."""

    def shorten(text: str) -> str:
        """One line, without where in whose source it was said."""
        line = " ".join(re.sub(r"\[enforce fail at [^]]*\]|what\(\):", "", text).split())
        return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 1] + "…"

    def last_words(rank: int) -> str:
        text = (folder / f"stderr{rank}").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return shorten(lines[-1]) if lines else "it said nothing"

    reasons = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("failed*"))]
    causes = [reason for reason in reasons if "gloo/transport" not in reason]
    ended = {rank: code for rank, code in enumerate(codes) if code}
    aborted = [rank for rank, code in ended.items() if code < 0]
    if aborted and not causes:
        rank = aborted[0]
        return Outcome("aborts", f"{signal.Signals(-ended[rank]).name}: {last_words(rank)}")
    if reasons:
        return Outcome("raises", shorten([*causes, *reasons][0]))
    if ended:
        return Outcome("raises", last_words(min(ended)))
    return Outcome("hangs", f"it was not done after {job.limit_s:g} s")


# ---- a rank's side


@dataclass(frozen=True)
class World:
    """The ranks that measure together."""

    rank: int
    num_ranks: int
    device: torch.device
    group: dist.ProcessGroup

    def largest(self, values: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """The same with the largest over all ranks in place of each number: the slowest, the busiest rank's."""
        table = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(table, dist.ReduceOp.MAX)
        return dict(zip(values, table.tolist(), strict=True))


def work_through(folder: Path, rank: int) -> None:
    """Does what comes, a task a line. One that fails ends the process: the others still wait for this rank."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    warnings.filterwarnings("ignore")
    try:
        run_task = importlib.import_module(job["script"]).run_task
        world = _join_world(job, rank, folder)
        with open(folder / f"results{rank}", "a", encoding="utf-8") as results:
            for line in sys.stdin:
                # No rank is in the next task while another still answers for this one.
                dist.barrier()
                results.write(json.dumps(run_task(world, json.loads(line))) + "\n")
                results.flush()
    except BaseException as error:  # noqa: BLE001 - whatever it was, it is this task's result
        (folder / f"failed{rank}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        os._exit(1)
    # Not by way of Python's own end, which may wait for what other ranks will never send.
    os._exit(0)


def _join_world(job: Mapping[str, Any], rank: int, folder: Path) -> World:
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


def count_traffic(run: Callable[[], Any]) -> dict[str, int]:
    """Calls of torch.distributed on this rank while `run` runs, and the bytes in them that other ranks get.

    Sizes that ranks tell each other (int64) are counted apart from data.

    Raises:
        ValueError: an operator communicates of which the recorder does not know what it sends.
    """
    from opensora_accel.observe import CollectiveRecorder

    with CollectiveRecorder() as recorder:
        run()
    found = dict.fromkeys(("collectives", "sends", "barriers", "sent_bytes", "sizes_bytes"), 0)
    for call in recorder.calls:
        if call.kind == "unknown":
            raise ValueError(f"{call.operator} is not counted; say in the verifier's recorder what it sends")
        if call.kind == "barrier":
            found["barriers"] += 1
        elif call.dtype == "int64":
            found["sizes_bytes"] += call.sent_bytes
        elif call.kind != "recv":
            found["sends" if call.kind == "send" else "collectives"] += 1
            found["sent_bytes"] += call.sent_bytes
    return found


if __name__ == "__main__":
    # Under its own name, so that a benchmark that imports it has the same classes.
    importlib.import_module("ranks").work_through(Path(sys.argv[1]), int(sys.argv[2]))
