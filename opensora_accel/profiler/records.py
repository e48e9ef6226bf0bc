"""What a profiled run leaves behind: a file for each rank, with a line of JSON for the run and one for each step.

    profile/rank_00000.jsonl
      {"rank": 0, "world_size": 2, "coordinates": {"ulysses": 0}, "groups": {"ulysses": [0, 1]}, ..., "type": "run"}
      {"step": 7, "start_s": 12.5, "end_s": 14.0, "metrics": {"loss": 1.2, "tokens": 4680},
       "spans": [["attention", "blocks.0.attn1", "forward", 12.61, 12.74], ...],
       "calls": [["all-to-all", "ulysses", "ulysses", 12.61, 12.63, 0.02, 1048576, {"1": 1048576}], ...],
       "memory": [[12.5, {"parameters": 41943040, ...}], ...], "type": "step"}

All times are seconds on one clock, that of rank 0, counted from the start of the run. A rank that was killed leaves
whole lines: what is cut off at the end is dropped by `read_run`.

What the numbers of a step mean:

    span    work of one region on this rank; spans are nested or apart: a block's forward holds its attention's
    call    a collective, or one end of a message: from when it was started to when it was done, of which `exposed_s`
            is what compute waited for it.
    memory  live bytes by kind, whenever the sum has changed enough to be seen in a picture, and at its peak.
    masks   what this rank computed of masks whose pairs ranks share.
    starved where the device had done all that the host had given it, and so waited for the next kernel.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple

from opensora_accel.documents import Amount, Count, Duration, Name, Ranks, Seconds, open_plain, parse

# Regions of a step, in the order in which they are shown.
REGIONS = (
    "data",
    "encode",
    "block",
    "attention",
    "mlp",
    "communication",
    "copy out",
    "copy in",
    "optimizer",
    "save",
    "other",
)


# A step with a million spans has 60 MB.
_MOST_LINE_BYTES = 1 << 28

_NOBODY: Mapping[int, int] = {}


class Span(NamedTuple):
    """Work of one region: [start_s, end_s)."""

    region: Name
    # The name of the module, or what it is about.
    name: Name
    phase: Name
    start_s: Seconds
    end_s: Seconds


class CommunicationCall(NamedTuple):
    """A collective, or one end of a message, on one rank."""

    # As in `opensora_accel.observe.operators.CollectiveCall`: "all-reduce", "send", ...
    kind: Name
    # The axis of the mesh: "ulysses", "dp_shard", "mixed", ...; "" for a group that is none of the registered ones.
    axis: Name
    # Which of `RunRecord.groups`.
    group: Name
    start_s: Seconds
    end_s: Seconds
    # What compute waited for it.
    exposed_s: Seconds
    # What other ranks get from this one, and how much of it each (by global rank).
    sent_bytes: Count
    sent_to: Mapping[Ranks, Count] = _NOBODY
    # Whose message a "recv" takes, and its bytes.
    received_from: Mapping[Ranks, Count] = _NOBODY


class MaskedAttention(NamedTuple):
    """Attention by the slices of one mask in a step's forward, on this rank."""

    # As the mask prints itself; those that print alike count as one.
    mask: Name
    calls: Count
    # Pairs of queries and keys that this rank computed in them, of all samples, a head.
    pairs: Count
    # The mean of the ranks that shared the mask.
    mean_pairs: Amount


class MemorySample(NamedTuple):
    """Live bytes by kind (`KINDS`) at one time. Those on the host are not part of the device's."""

    time_s: Seconds
    bytes_by_kind: Mapping[Name, Count]
    # What CUDA's allocator says: what it has of the device, and what of that lies free between pieces in use.
    reserved_bytes: Count | None = None
    fragmented_bytes: Count | None = None

    @property
    def device_bytes(self) -> int:
        return sum(size for kind, size in self.bytes_by_kind.items() if not kind.endswith("host"))


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step on one rank."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    step: Count
    start_s: Seconds
    end_s: Seconds
    # Numbers that the loop gave: loss, tokens (of this rank), grad_norm, ...
    metrics: Mapping[Name, float] = field(default_factory=dict)
    spans: Sequence[Span] = ()
    calls: Sequence[CommunicationCall] = ()
    memory: Sequence[MemorySample] = ()
    masks: Sequence[MaskedAttention] = ()
    # [start, end) each; None where that is not known, as on a CPU.
    starved: Sequence[tuple[Seconds, Seconds]] | None = None
    # What makes its times other than those of the run: that memory or a trace is followed, or was in the step before.
    slowed_by: Name = ""
    type: Literal["step"] = "step"

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class RunRecord:
    """What one rank knows of a run, before its steps."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    rank: Ranks
    world_size: Ranks
    # This rank's place on each axis of the mesh.
    coordinates: Mapping[Name, Ranks] = field(default_factory=dict)
    # Global ranks of every group that this rank is in.
    groups: Mapping[Name, Sequence[Ranks]] = field(default_factory=dict)
    # `Plan.to_dict()`, or nothing.
    plan: Mapping[str, Any] = field(default_factory=dict)
    # class, num_parameters, num_blocks.
    model: Mapping[str, Any] = field(default_factory=dict)
    # host, device, torch, backend, ...
    environment: Mapping[str, str] = field(default_factory=dict)
    # Floating-point operations of a step that the model needs, and those with recomputation; of this rank.
    model_flops: Amount | None = None
    hardware_flops: Amount | None = None
    # Operations of this rank's device a second, and where that number is from.
    peak_flops: Amount | None = None
    peak_flops_source: str = ""
    # Bytes per second of the links, by axis, measured or given.
    link_bytes_per_s: Mapping[Name, Amount] = field(default_factory=dict)
    # Regions whose spans run beside compute, on queues of their own: a GPU's copies. They take no time of the step.
    beside_compute: Sequence[Name] = field(default_factory=list)
    # How far this rank's clock may be off rank 0's.
    clock_error_s: Duration = 0.0
    # Seconds since 1970 at the run's start.
    started_at: Seconds = 0.0
    type: Literal["run"] = "run"


class RecordWriter:
    """Writes one rank's file: the run's line before the first step's, a step's whenever it is done.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, run: RunRecord):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank_{run.rank:05d}.jsonl").open("w", encoding="utf-8")
        # It may still be changed until the first step is written.
        self.run = run
        self._has_begun = False

    def step(self, step: StepRecord) -> None:
        self._begin()
        # Spans, calls and samples are rows without names, because there are hundreds of them a step.
        self._write({field.name: getattr(step, field.name) for field in dataclasses.fields(step)})

    def close(self) -> None:
        self._begin()
        self._file.close()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._write(dataclasses.asdict(self.run))

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
        # At once, so that a run that is killed keeps its steps.
        self._file.flush()


def rank_files(folder: Path) -> list[Path]:
    """The files of all ranks, in order.

    Raises:
        ValueError: there is none.
    """
    files = sorted(folder.glob("rank_*.jsonl"))
    if not files:
        raise ValueError(
            f"{folder} has no rank_*.jsonl; give the folder that a profiled run wrote (opensora-accel profile, or "
            "profile(model, plan, folder))"
        )
    return files


def read_rank(path: Path) -> tuple[RunRecord, Iterator[StepRecord]]:
    """One rank's run, and its steps as they are asked for, so that a large file is never held whole.

    Raises:
        ValueError: the file is none of a profiled run; from the iterator, with the number of a line that is damaged.
        ModuleNotFoundError: pydantic is not installed.
    """
    file = open_plain(path, inside=path.parent)
    try:
        run = parse(_line(file), RunRecord, f"{path} is no record of a profiled run")
        if run.rank >= run.world_size:
            raise ValueError(f"{path} is no record of a profiled run: rank {run.rank} of {run.world_size}")
    except BaseException:
        file.close()
        raise

    def steps() -> Iterator[StepRecord]:
        number = 1
        with file:
            while line := _line(file):
                number += 1
                if not line.endswith(b"\n"):
                    return  # the rank was killed while it wrote
                yield _finite(parse(line, StepRecord, f"{path}:{number} is no step of a profiled run"))

    return run, steps()


def _line(file: BinaryIO) -> bytes:
    line = file.readline(_MOST_LINE_BYTES)
    if len(line) == _MOST_LINE_BYTES:
        raise ValueError(
            f"{file.name} has a line of more than {_MOST_LINE_BYTES:,} bytes, which no step of a profiled run has"
        )
    return line


def _finite(step: StepRecord) -> StepRecord:
    """Without metrics that are no number: a loss that has left the numbers is no point of a curve."""
    if all(map(math.isfinite, step.metrics.values())):
        return step
    kept = {name: value for name, value in step.metrics.items() if math.isfinite(value)}
    return dataclasses.replace(step, metrics=kept)
