"""Starts the ranks, reads what they find, and ends those that hang. Whatever a side does, this goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opensora_accel.profiler.bench_attention.environments import lend
from opensora_accel.profiler.bench_attention.rank import Task

MODULE = "opensora_accel.profiler.bench_attention.rank"
START_S = 120.0
"""How long ranks may take to import what they need and find each other, before the first task."""
GRACE_S = 3.0
"""How long the other ranks may take to say what they found, once one has failed."""
POLL_S = 0.02
LOST = "gloo/transport"
"""In what a rank says whose neighbour is gone."""
REASON_LENGTH = 180

Note = Callable[[Task, str], None]


@dataclass(frozen=True)
class Outcome:
    """What became of one task: "done", or "raises", "aborts", "hangs" with the reason."""

    status: str
    reason: str = ""
    by_rank: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Launch:
    """How ranks are started."""

    num_ranks: int
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    silence_s: float = 60.0
    """Ranks that tell nothing for so long hang."""


def run_tasks(launch: Launch, tasks: Sequence[Task], note: Note) -> list[Outcome]:
    """An outcome for every task. After one that fails, the rest goes on in a fresh group of ranks."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(tasks):
        with tempfile.TemporaryDirectory() as folder:
            group = _Group(launch, tasks[len(outcomes) :], Path(folder), note)
            try:
                outcomes += group.outcomes()
            finally:
                group.end()
    return outcomes


class _Group:
    """Processes of one group, and what they have told so far."""

    def __init__(self, launch: Launch, tasks: Sequence[Task], folder: Path, note: Note):
        self._launch, self._tasks, self._folder, self._note = launch, tasks, folder, note
        job = {
            "num_ranks": launch.num_ranks,
            "device": launch.device,
            "tasks": [task.to_dict() for task in tasks],
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        self._path = lend(folder)
        self._results: list[dict[int, Any]] = [{} for _ in range(launch.num_ranks)]
        self._failures: list[tuple[float, int, str]] = []
        self._read_until = [0] * launch.num_ranks
        self._processes = [self._start(rank) for rank in range(launch.num_ranks)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        settings = {
            "PYTHONPATH": self._path,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "HF_HUB_OFFLINE": "1",
        }
        with open(self._folder / f"stderr{rank}", "wb") as stderr:
            return subprocess.Popen(
                [self._launch.python, "-m", MODULE, str(self._folder / "job.json"), str(rank)],
                env=os.environ | settings | self._launch.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def outcomes(self) -> list[Outcome]:
        """Of all tasks, or of those up to the first that failed."""
        failure = self._wait()
        finished = self._num_finished()
        done = [
            Outcome("done", by_rank=[results[number] for results in self._results])
            for number in range(finished)
        ]
        return done if failure is None or finished == len(self._tasks) else [*done, failure]

    def _wait(self) -> Outcome | None:
        """Until all is told, a rank has failed, or nothing is told any more; how the open task failed, if one is."""
        last_told, silence_s = time.monotonic(), max(START_S, self._launch.silence_s)
        while True:
            # Before what it told is read: a process may tell something just before it ends.
            codes = [process.poll() for process in self._processes]
            if self._read():
                last_told, silence_s = time.monotonic(), self._launch.silence_s
            if self._num_finished() == len(self._tasks):
                return None
            if self._failures or any(codes):
                return self._after_failure()
            if all(code is not None for code in codes):
                return Outcome("aborts", "the ranks ended before they had told what they found")
            if time.monotonic() - last_told > silence_s:
                return Outcome("hangs", f"nothing was heard of it for {silence_s:g} s")
            time.sleep(POLL_S)

    def _after_failure(self) -> Outcome:
        """An abort, or the first reason that a rank gave which is more than having lost another."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            self._read()
            time.sleep(POLL_S)
        self._read()
        reasons = [reason for _, _, reason in sorted(self._failures)]
        causes = [reason for reason in reasons if LOST not in reason]
        codes = [process.poll() for process in self._processes]
        aborted = next((rank for rank, code in enumerate(codes) if code is not None and code < 0), None)
        if aborted is not None and not causes:
            return Outcome("aborts", f"{_signal(codes[aborted])}: {self._last_words(aborted)}")
        if reasons:
            return Outcome("raises", _shorten([*causes, *reasons][0]))
        rank = next(rank for rank, code in enumerate(codes) if code)
        return Outcome("raises", self._last_words(rank))

    def _last_words(self, rank: int) -> str:
        text = (self._folder / f"stderr{rank}").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return _shorten(lines[-1]) if lines else "it said nothing"

    def _read(self) -> bool:
        """Takes in what has been told since; whether there was anything."""
        heard = False
        for rank in range(self._launch.num_ranks):
            path = self._folder / f"events{rank}"
            if not path.exists():
                continue
            content = path.read_bytes()
            complete = content.rfind(b"\n") + 1
            for line in content[self._read_until[rank] : complete].splitlines():
                self._hear(rank, json.loads(line))
                heard = True
            self._read_until[rank] = complete
        return heard

    def _hear(self, rank: int, event: dict[str, Any]) -> None:
        if "failed" in event:
            self._failures.append((event["at"], rank, event["reason"]))
        elif "done" in event:
            self._results[rank][event["done"]] = event["result"]
        elif rank == 0:
            number = event.get("start", self._num_done(0))
            self._note(self._tasks[number], event.get("alive", ""))

    def _num_done(self, rank: int) -> int:
        return len(self._results[rank])

    def _num_finished(self) -> int:
        """Tasks that every rank has done."""
        return min(map(len, self._results))

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()


def _signal(code: int | None) -> str:
    return signal.Signals(-(code or 0)).name


def _shorten(text: str) -> str:
    """One line, without where in whose source it was said."""
    line = " ".join(re.sub(r"\[enforce fail at [^]]*\]|what\(\):", "", text).split())
    return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 1] + "…"
