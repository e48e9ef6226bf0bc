"""Puts the problems to the sides, each where it runs, and gathers the rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from opensora_accel.profiler.bench_attention.environments import Place, place_of, probe
from opensora_accel.profiler.bench_attention.launch import Launch, Outcome, run_tasks
from opensora_accel.profiler.bench_attention.plan import byte_tasks, error_tasks, time_tasks
from opensora_accel.profiler.bench_attention.problem import Problem
from opensora_accel.profiler.bench_attention.progress import progress
from opensora_accel.profiler.bench_attention.rank import Task
from opensora_accel.profiler.bench_attention.results import NOT_OFFERED, SKIPPED, Row, make_row
from opensora_accel.profiler.bench_attention.side import Side

Planned = Iterable[tuple[Task, str | None]]
"""Tasks, and why they are not run, if they are not."""
NO_ENVIRONMENT = "it has no environment here; --install-peers makes it"


@dataclass(frozen=True)
class Settings:
    ranks: Sequence[int]
    time_ranks: Sequence[int]
    timed: Problem
    rounds: int
    device: str
    silence_s: float
    environments: Path


class Bench:
    """The sides that were asked for, and which of them run here."""

    def __init__(self, sides: Sequence[Side], settings: Settings):
        self.sides, self.settings = sides, settings
        self.versions: dict[str, str | None] = {}
        self.skipped: dict[str, str] = {}
        self._places: dict[str, Place] = {}
        for place, residents in self._by_place().items():
            self._look_into(place, residents)

    def _by_place(self) -> dict[Place | None, list[Side]]:
        found: dict[Place | None, list[Side]] = {}
        for side in self.sides:
            found.setdefault(place_of(side, self.settings.environments), []).append(side)
        return found

    def _look_into(self, place: Place | None, residents: Sequence[Side]) -> None:
        names = [side.name for side in residents]
        if place is None:
            self.skipped |= dict.fromkeys(names, NO_ENVIRONMENT)
            return
        answers = probe(names, place)
        for side in residents:
            self._places[side.name] = place
            self.versions[side.package] = answers[side.name]["version"]
            reason = answers[side.name]["reason"]
            if reason is not None:
                self.skipped[side.name] = reason

    def errors(self) -> list[Row]:
        return self._untimed("errors", lambda side, ranks: error_tasks(side, ranks, self.settings.device))

    def bytes(self) -> list[Row]:
        return self._untimed("bytes", byte_tasks)

    def times(self) -> list[Row]:
        """Each pair in processes of its own, so that nothing of one peer is in the way of another."""
        rows: list[Row] = []
        for num_ranks in self.settings.time_ranks:
            for side in self.sides:
                planned = time_tasks(side, num_ranks, self.settings.timed, self.settings.rounds)
                rows += self._run(list(planned), num_ranks, f"times, {num_ranks} ranks")
        return rows

    def _untimed(self, title: str, plan: Callable[[Side, int], Planned]) -> list[Row]:
        """Side by side in the order of the table, each with its rank counts."""
        rows: list[Row] = []
        for num_ranks in self.settings.ranks:
            planned = [task for side in self.sides for task in plan(side, num_ranks)]
            rows += self._run(planned, num_ranks, f"{title}, {num_ranks} ranks")
        order = [side.name for side in self.sides]
        return sorted(rows, key=lambda row: order.index(row["side"]))

    def _run(self, planned: Sequence[tuple[Task, str | None]], num_ranks: int, title: str) -> list[Row]:
        outcomes: dict[Task, Outcome] = {}
        waiting: dict[Place, list[Task]] = {}
        for task, refusal in planned:
            reason = self.skipped.get(task.sides[-1])
            if refusal is not None:
                outcomes[task] = Outcome(NOT_OFFERED, refusal)
            elif reason is not None:
                outcomes[task] = Outcome(SKIPPED, reason)
            else:
                waiting.setdefault(self._places[task.sides[-1]], []).append(task)
        with progress(sum(map(len, waiting.values())), title) as note:
            for place, tasks in waiting.items():
                found = run_tasks(self._launch(place, num_ranks), tasks, note)
                outcomes |= dict(zip(tasks, found, strict=True))
        return [make_row(task, num_ranks, outcomes[task]) for task, _ in planned]

    def _launch(self, place: Place, num_ranks: int) -> Launch:
        device, silence_s = self.settings.device, self.settings.silence_s
        return Launch(num_ranks, place.python, place.settings, device, silence_s)


def say_skipped(bench: Bench) -> None:
    for name, reason in bench.skipped.items():
        print(f"{name} is skipped: {reason}", file=sys.stderr, flush=True)
