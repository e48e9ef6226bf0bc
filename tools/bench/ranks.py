"""Ranks that measure: processes which the launcher starts, listens to, and ends when they hang.

A peer may raise, abort or hang, and the run must go on. So the ranks are processes of their own that work
through a list of tasks and write what they find to a pipe, one line of JSON for each event, which the launcher reads.
With P = 3 ranks and tasks t0, t1, t2, where rank 1 fails in t1:

    rank 0   start t0, done t0, start t1, …  (waits for rank 1)
    rank 1   start t0, done t0, start t1, failed: the reason
    rank 2   start t0, done t0, start t1, …  (waits for rank 1)

t0 is done, as all three ranks say so; t1 raised. Its ranks cannot be used again: the launcher ends them and starts
three new ones for t2.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# ---- the launcher's side

# How long ranks may take to import what they need and find each other, before the first task.
START_S = 120.0
# How long the other ranks may take to say what they found, once one has failed.
GRACE_S = 3.0
REASON_LENGTH = 180


@dataclass(frozen=True)
class Job:
    """How ranks are started. For each task they call `run_task(world, task, note)` of the script."""

    script: str
    num_ranks: int
    device: str = "cpu"
    # Ranks that say nothing for so long hang.
    silence_s: float = 60.0
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of one task: "done", or "raises", "aborts", "hangs" with the reason."""

    status: str
    reason: str = ""
    by_rank: Sequence[Any] = ()


def run_tasks(job: Job, tasks: Sequence[Mapping[str, Any]], begin: Callable[[int], None]) -> list[Outcome]:
    """An outcome for every task. After one that fails, the rest goes on in a fresh group of ranks.

    Args:
        tasks: plain data, as it travels as JSON.
        begin: told the number of each task when it begins.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(tasks):
        first = len(outcomes)
        with tempfile.TemporaryDirectory() as folder:
            outcomes += _run_group(job, tasks[first:], Path(folder), lambda at: begin(first + at))  # noqa: B023
    return outcomes


def _run_group(job: Job, tasks: Sequence[Any], folder: Path, begin: Callable[[int], None]) -> list[Outcome]:
    """Outcomes of all tasks, or of those up to the first that fails."""
    (folder / "job.json").write_text(json.dumps(asdict(job) | {"tasks": tasks}), encoding="utf-8")
    events: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
    processes = _start_ranks(job, folder, events)
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
            elif "begun" in event and rank == 0:
                begin(event["begun"])
            patience_s = job.silence_s
            if failures or any(codes.values()):
                deadline = deadline or time.monotonic() + GRACE_S
                patience_s = max(0.0, deadline - time.monotonic())
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    # Not strict: what every rank has done.
    done = [Outcome("done", by_rank=found) for found in zip(*results, strict=False)]
    if len(done) < len(tasks):
        silent = Outcome("hangs", f"nothing was heard of it for {job.silence_s:g} s")
        done.append(_failure(failures, codes, folder) if failures or codes else silent)
    return done


def _start_ranks(job: Job, folder: Path, events: queue.Queue[Any]) -> list[subprocess.Popen[bytes]]:
    """For each rank a process, and a thread that puts what it says into the queue, and last its exit status."""
    import opensora_accel

    # This package is brought into another environment, and nothing that is installed beside it.
    (folder / "path").mkdir()
    (folder / "path" / "opensora_accel").symlink_to(Path(opensora_accel.__file__).resolve().parent)
    paths = [str(folder / "path"), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "HF_HUB_OFFLINE": "1",
        **job.environment,
    }

    def listen(rank: int, reading: int, process: subprocess.Popen[bytes]) -> None:
        with os.fdopen(reading, encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):  # a process that is killed may leave half a line
                    events.put((rank, json.loads(line)))
        events.put((rank, {"ended": process.wait()}))

    processes = []
    for rank in range(job.num_ranks):
        reading, writing = os.pipe()
        command = [job.python, __file__, str(folder / "job.json"), str(rank), str(writing)]
        nowhere = subprocess.DEVNULL
        with open(folder / f"stderr{rank}", "wb") as stderr:
            process = subprocess.Popen(
                command, stdin=nowhere, stdout=nowhere, stderr=stderr, env=environment, pass_fds=[writing]
            )
        os.close(writing)
        threading.Thread(target=listen, args=(rank, reading, process), daemon=True).start()
        processes.append(process)
    return processes


def _failure(failures: Sequence[str], codes: Mapping[int, int], folder: Path) -> Outcome:
    """An abort, or the first reason that a rank gave which is more than having lost another."""

    def shorten(text: str) -> str:
        """One line, without where in whose source it was said."""
        line = " ".join(re.sub(r"\[enforce fail at [^]]*\]|what\(\):", "", text).split())
        return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 1] + "…"

    def last_words(rank: int) -> str:
        text = (folder / f"stderr{rank}").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return shorten(lines[-1]) if lines else "it said nothing"

    causes = [reason for reason in failures if "gloo/transport" not in reason]
    aborted = next((rank for rank, code in codes.items() if code < 0), None)
    if aborted is not None and not causes:
        return Outcome("aborts", f"{signal.Signals(-codes[aborted]).name}: {last_words(aborted)}")
    if failures:
        return Outcome("raises", shorten([*causes, *failures][0]))
    if not any(codes.values()):
        return Outcome("aborts", "the ranks ended before they had told what they found")
    return Outcome("raises", last_words(max(codes, key=lambda rank: codes[rank])))


# ---- a rank's side


@dataclass(frozen=True)
class World:
    """The ranks that measure together."""

    rank: int
    num_ranks: int
    device: torch.device
    group: dist.ProcessGroup


def serve(job_file: Path, rank: int, writing: int) -> None:
    """Works through the tasks of a job. A task that fails ends the process: the others still wait for this rank."""
    job = json.loads(job_file.read_text(encoding="utf-8"))
    warnings.filterwarnings("ignore")
    with os.fdopen(writing, "w", encoding="utf-8") as events:

        def tell(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        try:
            run_task = importlib.import_module(job["script"]).run_task
            world = _join_world(job, rank, job_file.parent)
            for number, task in enumerate(job["tasks"]):
                tell(begun=number)
                # No rank is in the next task while another still answers for this one.
                dist.barrier()
                # What a task notes says no more to the launcher than that this rank lives.
                tell(done=run_task(world, task, lambda text: tell(note=text)))
        except BaseException as error:  # noqa: BLE001 - whatever it was, it is this task's result
            tell(failed=f"{type(error).__name__}: {error}")
            # Not by way of Python's own end, which waits for what other ranks will never send.
            os._exit(1)
        dist.barrier()
    dist.destroy_process_group()


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


def slowest_rank(times: Mapping[str, list[float]], device: torch.device) -> dict[str, list[float]]:
    """The same with the largest over all ranks in place of each number."""
    table = torch.tensor(list(times.values()), dtype=torch.float64, device=device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return dict(zip(times, table.tolist(), strict=True))


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
    importlib.import_module("ranks").serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
