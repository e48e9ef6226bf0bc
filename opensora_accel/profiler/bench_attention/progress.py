"""Progress on stderr: a bar on a terminal, a line for every side elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from opensora_accel.profiler.bench_attention.launch import Note
from opensora_accel.profiler.bench_attention.rank import Task


@contextlib.contextmanager
def progress(num_tasks: int, title: str) -> Iterator[Note]:
    """Within it, a function that is told of each task as it starts, and of its rounds."""
    bar = _bar() if sys.stderr.isatty() else None
    if bar is None:
        yield _Lines(title)
        return
    with bar:
        row = bar.add_task(title, total=num_tasks, step="")
        started: set[Task] = set()

        def note(task: Task, text: str) -> None:
            bar.update(row, completed=len(started), step=f"{describe(task)} {text}")
            started.add(task)

        yield note


def describe(task: Task) -> str:
    return f"{' and '.join(task.sides)}: {task.problem.name}"


class _Lines:
    def __init__(self, title: str) -> None:
        self._title = title
        self._last: tuple[str, ...] = ()

    def __call__(self, task: Task, text: str) -> None:
        if task.sides != self._last:
            self._last = task.sides
            print(f"{self._title}: {' and '.join(task.sides)}", file=sys.stderr, flush=True)


def _bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[step]}"))
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
