"""What a run shows while it runs: a progress bar or lines, metrics.jsonl, tensorboard. Rank 0 only."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from opensora_accel.training.files import write_text
from opensora_accel.training.output import METRICS, TENSORBOARD

_SMOOTHING = 0.95
"""Of the loss shown to a person; the files hold every step's own."""


class Tracker:
    """Records each step; everything is flushed, so that a killed run keeps its metrics.

    Args:
        folder: gets metrics.jsonl (one object a step; those after `start` are dropped) and tensorboard/.
        start, total: steps done before this run, and at its end.
        log_every: steps between lines where stderr is no terminal.
    """

    def __init__(self, folder: Path, start: int, total: int, log_every: int):
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        _forget_after(folder / METRICS, start)
        self._file = (folder / METRICS).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / TENSORBOARD), purge_step=start + 1 if start else None)
        self._total, self._log_every = total, log_every
        self._start, self._start_time = start, time.monotonic()
        self._loss: float | None = None
        self._bar = _make_bar(start, total) if sys.stderr.isatty() else None

    def __enter__(self) -> Tracker:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._file.close()
        self._board.close()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """`step` counts from 1; `metrics` has at least loss, tokens_per_s and memory_gib."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        loss = metrics["loss"]
        if math.isfinite(loss):  # a skipped step would stay in the mean for ever
            self._loss = loss if self._loss is None else _SMOOTHING * self._loss + (1 - _SMOOTHING) * loss
        speed, memory = metrics["tokens_per_s"], metrics["memory_gib"]
        mean = math.nan if self._loss is None else self._loss
        shown = f"loss {mean:.4f}  {speed:,.0f} tokens/s  {memory:.2f} GiB a rank"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, shown=shown)
        elif step % self._log_every == 0 or step in (self._start + 1, self._total):
            print(f"step {step}/{self._total}  {shown}  {self._time_left(step)} left", flush=True)

    def _time_left(self, step: int) -> str:
        done = step - self._start
        seconds = (time.monotonic() - self._start_time) / done * (self._total - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _forget_after(path: Path, step: int) -> None:
    """Drops the rows of steps that will be trained again, so that there is one row a step."""
    if not path.is_file():
        return
    kept = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            continue  # a run was killed while it wrote
        try:
            row_step = json.loads(line)["step"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path}:{number} is no row of a run ({error}); take the line out, or the file away"
            ) from error
        if row_step <= step:
            kept.append(line)
    write_text(path, "".join(kept))


def _make_bar(start: int, total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=Console(stderr=True),
    )
    bar.add_task("training", total=total, completed=start, shown="")
    return bar
