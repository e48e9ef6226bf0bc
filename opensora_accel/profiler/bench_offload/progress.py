"""Progress on stderr: a bar on a terminal, a line for every case elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from opensora_accel.profiler.bench_offload.measure import Note


@contextlib.contextmanager
def progress(case: str) -> Iterator[Note]:
    """Within it, a function that is told what comes next."""
    bar = _bar() if sys.stderr.isatty() else None
    if bar is None:
        print(f"{case} ...", file=sys.stderr, flush=True)
        yield _Lines()
        return
    with bar:
        task = bar.add_task(case, total=None, step="")
        yield lambda text: bar.update(task, step=text)


class _Lines:
    """One line for each kind of work, not for each round."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str) -> None:
        kind = text.partition(": ")[2].partition(" ")[0]
        if kind != self._last:
            self._last = kind
            print(f"  {text.partition(': ')[2]}", file=sys.stderr, flush=True)


def _bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (SpinnerColumn(), TextColumn("{task.description}  {task.fields[step]}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
