"""What a run shows and records while it runs: a progress bar or lines, metrics.jsonl, trackers, offload.json."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import torch.distributed as dist

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER
from opensora_accel.communications import gather_objects
from opensora_accel.documents import read_text
from opensora_accel.observe import Forecast, differences
from opensora_accel.plan import Plan
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.disk_cache import Counts, DiskCache
from opensora_accel.training.output import METRICS, OFFLOAD, TENSORBOARD, write_text
from opensora_accel.training.pretrained import in_one_line
from opensora_accel.training.samples import SampledClip, gif_of

# Smoothing of the loss that a person sees; the files hold the loss of every step.
_SMOOTHING = 0.95


class Tracker:
    """Records each step on rank 0, and shows it. Everything is flushed, so that a killed run keeps its metrics.

    Args:
        config: the output gets metrics.jsonl (one object a step; those after `start` make way for the first one that is
            recorded), tensorboard/ and what other trackers keep.
        run_id: the same for a run that goes on, so that wandb and trackio show it as one.
        start, total: steps done before this run, and at its end.

    Raises:
        ValueError: a row of metrics.jsonl is none of a run, or a tracker cannot be started.
    """

    def __init__(self, config: TrainConfig, run_id: str, start: int, total: int):
        folder = Path(config.output)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS
        self._file: IO[str] | None = None
        self._kept = _rows_until(self._path, start)
        self._boards: list[_Board] = []
        for name in config.trackers:
            if name == "tensorboard":
                self._boards.append(_TensorBoard(folder / TENSORBOARD, start))
            else:
                self._boards.append(_Service(name, config, run_id))
        self._total, self._log_every = total, config.log_every
        self._start, self._start_time = start, time.monotonic()
        self._loss: float | None = None
        self._bar: Any = None
        if sys.stderr.isatty():  # in a file, a bar would be one long line of control characters
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=Console(stderr=True),
            )
            self._bar.add_task("training", total=total, completed=start, shown="")

    def __enter__(self) -> Tracker:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()
        for board in self._boards:
            board.close()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Records one step. `step` counts from 1; `metrics` has at least loss, tokens_per_s and memory_gib."""
        # JSON has no NaN: a step that was skipped has null.
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        if self._file is None:
            # Not earlier: rows of steps that are trained again stay until there is another one.
            write_text(self._path, self._kept)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        # At once, so that a run that is killed keeps every step, and others can read along.
        self._file.flush()
        for board in self._boards:
            board.step(step, metrics)
        loss = metrics["loss"]
        if math.isfinite(loss):  # a skipped step would stay in the mean for ever
            self._loss = loss if self._loss is None else _SMOOTHING * self._loss + (1 - _SMOOTHING) * loss
        speed, memory = metrics["tokens_per_s"], metrics["memory_gib"]
        mean = math.nan if self._loss is None else self._loss
        shown = f"smoothed loss {mean:.4f}  {speed:,.0f} tokens/s  {memory:.2f} GiB a rank"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, shown=shown)
        # Without a terminal a line now and then: the first step, the last, and every `log_every`-th.
        elif step % self._log_every == 0 or step in (self._start + 1, self._total):
            seconds_a_step = (time.monotonic() - self._start_time) / (step - self._start)
            left = int(seconds_a_step * (self._total - step))
            print(f"step {step}/{self._total}  {shown}  {left // 60}:{left % 60:02d} left", flush=True)

    def clips(self, step: int, samples: Sequence[SampledClip], paths: Sequence[Path]) -> None:
        """Shows clips that were sampled after a step; `paths` are those of their mp4 files."""
        for board in self._boards:
            board.clips(step, samples, paths)


class _Board(Protocol):
    """Where a run is looked at."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def clips(self, step: int, samples: Sequence[SampledClip], paths: Sequence[Path]) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides the points of steps that are trained again.
        self._writer = SummaryWriter(str(folder), purge_step=start + 1 if start else None)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def clips(self, step: int, samples: Sequence[SampledClip], paths: Sequence[Path]) -> None:
        """As moving GIFs: `add_video` makes the same of them, by a library (moviepy) that is not here."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for number, sample in enumerate(samples, start=1):
            gif, width, height = gif_of(sample)
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
            named = Summary.Value(tag=f"samples/{number}: {sample.caption[:60]}", image=image)
            assert self._writer.file_writer is not None
            self._writer.file_writer.add_summary(Summary(value=[named]), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Service:
    """wandb, or trackio, which has the same functions."""

    def __init__(self, name: str, config: TrainConfig, run_id: str):
        self._module = importlib.import_module(name)
        # trackio knows a run by its name.
        options = {"id": run_id} if name == "wandb" else {}
        try:
            self._module.init(
                project=config.tracker_project,
                name=f"{Path(config.output).name}-{run_id[:6]}",
                config=dataclasses.asdict(config),
                resume="allow",
                **options,
            )
        except Exception as error:  # whatever it raises where it has no account, or no network
            raise ValueError(
                f"{name} cannot be started ({in_one_line(error)}); set it up as its guide says, or leave it out of "
                "trackers"
            ) from error

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def clips(self, step: int, samples: Sequence[SampledClip], paths: Sequence[Path]) -> None:
        shown = zip(samples, paths, strict=True)
        videos = {
            f"samples/{number}": self._module.Video(str(path), caption=sample.caption, format="mp4")
            for number, (sample, path) in enumerate(shown, start=1)
        }
        self._module.log(videos, step=step)

    def close(self) -> None:
        self._module.finish()


def check_trackers(config: TrainConfig) -> None:
    """Checks that what `config.trackers` names is installed.

    Raises:
        ValueError: it is not.
    """
    for name in config.trackers:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"trackers names {name}, which is not installed; pip install 'opensora-accel[trackers]', or leave it "
                "out"
            )


def _rows_until(path: Path, step: int) -> str:
    """The rows of a run up to a step. What comes after it will be trained again: there is to be one row a step."""
    if not os.path.lexists(path):
        return ""
    kept = []
    for number, line in enumerate(read_text(path, inside=path.parent).splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            continue  # a run was killed while it wrote
        try:
            is_kept = json.loads(line)["step"] <= step
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}:{number} is no row of a run ({error}); take the line out, or the file away"
            ) from error
        if is_kept:
            kept.append(line)
    return "".join(kept)


class OffloadLog:
    """What offload did on this rank: each decision of `offload="auto"` as it is taken, and all of it in offload.json.

    A run that moves nothing writes nothing.
    """

    def __init__(self, folder: Path, memory_target_gib: float):
        self._path = folder / OFFLOAD
        self._first = self._shown = len(MANAGER.decisions)
        MANAGER.memory_target_bytes = int(memory_target_gib * 2**30) if memory_target_gib else None
        MANAGER.reset_counters()

    def show_decisions(self) -> None:
        """Prints the decisions that were taken since the last call, and writes the file."""
        for decision in MANAGER.decisions[self._shown :]:
            print(f"offload: {decision.reason}", flush=True)
        if len(MANAGER.decisions) > self._shown:
            self._shown = len(MANAGER.decisions)
            self.write()

    def write(self) -> None:
        """Writes every decision, and the counters of the run so far."""
        if not MANAGER.enable:
            return
        record = {
            "decisions": [decision.to_dict() for decision in MANAGER.decisions[self._first :]],
            "counters": dataclasses.asdict(MANAGER.counters),
            "slot_bytes": MANAGER.slot_bytes,
            "arena_bytes": MANAGER.arena.size_bytes if MANAGER.arena is not None else 0,
        }
        self._path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


class StepTimes:
    """Step times beside what was foreseen of them, in one line after `SHOWN` steps, of which the first warms up."""

    SHOWN = 20

    def __init__(self, forecast: Forecast):
        self._forecast = forecast
        self._seconds: list[float] = []

    @classmethod
    def of(cls, forecast: Forecast | None, plan: Plan, num_blocks: int) -> StepTimes | None:
        """None where there is no forecast; where it is of another plan or model, that is printed."""
        if forecast is None:
            return None
        unlike = differences(forecast.plan, plan.to_dict())
        if forecast.num_blocks != num_blocks:
            unlike.append(f"blocks: {forecast.num_blocks} → {num_blocks}")
        if unlike:
            print(
                f"step times are not held against the forecast, which is of another run: {', '.join(unlike)}",
                flush=True,
            )
            return None
        return cls(forecast)

    def add(self, seconds: float) -> None:
        """A step took so long."""
        self._seconds.append(seconds)
        if len(self._seconds) != self.SHOWN:
            return
        median, (low, expected, high) = statistics.median(self._seconds[1:]), self._forecast.step_s
        line = (
            f"a step takes {median:.3g} s (median of steps 2 to {self.SHOWN}); forecast {expected:.3g} s ({low:.3g} to "
            f"{high:.3g}) on {self._forecast.hardware}: {median / expected:.2f} times as long as expected"
        )
        if not low <= median <= high:
            line += "; `opensora-accel profile --against PLAN` tells where it differs"
        print(line, flush=True)


def show_cache(cache: DiskCache | None, output: Path) -> None:
    """Tells what all ranks have found in a folder and stored there, and adds it to the folder's list of runs.

    Communication: an object all-gather, where there is a folder; every rank has to call.
    """
    if cache is None:
        return
    counts = sum(gather_objects(cache.counts), Counts())
    if dist.get_rank() == 0:
        cache.note_run({"output": os.path.abspath(output), **dataclasses.asdict(counts)})
        print(
            f"cache {cache.folder}: {counts.hits} clips and captions read ({counts.read_bytes / 1e6:.1f} MB), "
            f"{counts.misses} computed, {counts.stored} stored ({counts.stored_bytes / 1e6:.1f} MB), by all ranks",
            flush=True,
        )
