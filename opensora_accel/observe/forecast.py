"""What the planner has foreseen of a plan's step, in a file beside the plan, so that a run can be held against it.

    plan.json             dp_replicate=1, ulysses=2, ...
    plan.forecast.json    step_s [1.8, 2.0, 2.3]; attention, backward: [0.5, 0.6, 0.7]; all-to-all over ulysses: ...

Three numbers are the low end, what is expected, and the high end. Parts are named as the profiler names the parts of a
measured step (`profiler/records.py`): on the stream that computes they, what is waited for and idle time add up to the
step. The planner writes such a file, the profiler and the trainer read it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from opensora_accel.documents import Amount, Count, Duration, Name, parse, read_text
from opensora_accel.files import replacing
from opensora_accel.plan import MESH_AXES, Plan

# In the place of a region: the device has nothing to do, because the host has not started it yet.
IDLE = "idle"
# A forecast has a line for each part, whatever the size of the model.
_MOST_BYTES = 1 << 22
_MEMBERS = {
    "data": ("dp_replicate", "dp_shard"),
    "sequence": ("ring", "ulysses"),
    "shard": ("dp_shard", "ring", "ulysses"),
    "mixed": ("dp_replicate", "dp_shard", "ring", "ulysses"),
    "tensor": ("tp",),
    "world": MESH_AXES,
}


class Three(NamedTuple):
    """The low end of what is uncertain, what is expected, and the high end."""

    low: Duration
    expected: Duration
    high: Duration


class ForeseenPart(NamedTuple):
    """A part of the step on the stream that computes."""

    # block, attention, mlp, optimizer, other; exposed where a collective is waited for; copy out and copy in where
    # copies are; idle.
    region: Name
    # Of the mesh, where the region is "exposed".
    axis: Name
    phase: Name
    seconds: Three
    # What is expected of its kernels by what bounds them: gemm, attention, memory; and host, what starts them.
    by_kernel: Mapping[Name, Duration]


class ForeseenCalls(NamedTuple):
    """Collectives of one kind over one axis: a rank's, in a step."""

    axis: Name
    kind: Name
    # As a hardware file names it: "all-to-all 2/8" is of groups of 2 ranks on nodes of 8.
    group: Name
    calls: Amount
    sent_bytes: Amount
    seconds: Three
    # Of them what compute waits for.
    exposed: Three


class ForeseenCopies(NamedTuple):
    """Copies to the host ("copy out") or back ("copy in"): a rank's, in a step."""

    region: Name
    copies: Amount
    num_bytes: Amount
    seconds: Three


class MeasuredParts(NamedTuple):
    """What a run says of its forecast: the part of it that a hardware file is corrected by."""

    # The run, its start in seconds since 1970, and how many steps were counted.
    name: str
    started_at: float
    num_steps: int
    # Of parts that both know: what is foreseen of their kernels by class, and the seconds that were measured.
    parts: Sequence[tuple[Mapping[str, float], float]]
    # By `ForeseenCalls.group`: seconds that are foreseen, and those that were measured.
    calls: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Forecast:
    """A step as it was foreseen."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    # `digest_of` the plan, by which a plan that was changed since is known.
    plan_digest: Name
    plan: dict[str, Any]
    # By name, and the file that `--hardware` named, or "".
    hardware: Name
    hardware_file: Name
    # The day, as 2026-11-29.
    date: Name
    # What is trained, and the sizes of its clips.
    model: Name
    num_blocks: Count
    world_size: Count
    # Of an optimizer step, over all ranks; and its passes.
    samples: Count
    accumulation: Count
    step_s: Three
    memory_bytes: tuple[Count, Count]
    # At the peak.
    bytes_by_kind: Mapping[Name, Count]
    parts: Sequence[ForeseenPart]
    calls: Sequence[ForeseenCalls]
    copies: Sequence[ForeseenCopies]
    # Corrections that the hardware had: kernels by class, and collectives by `ForeseenCalls.group`.
    slowness: Mapping[Name, Amount] = field(default_factory=dict)
    collective_slowness: Mapping[Name, Amount] = field(default_factory=dict)
    # What the host takes to start an operator, by the hardware's field.
    host_s: Mapping[Name, Duration] = field(default_factory=dict)

    @staticmethod
    def beside(plan_file: Path) -> Path:
        """Where the forecast of a plan's file lies."""
        return plan_file.with_suffix(".forecast.json")

    def save(self, plan_file: Path) -> Path:
        """Writes it beside the plan's file; the path."""
        path = self.beside(plan_file)
        with replacing(path) as temporary:
            text = json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False)
            temporary.write_text(text + "\n", encoding="utf-8")
        return path

    @classmethod
    def of_plan(cls, plan_file: Path) -> Forecast:
        """The forecast that lies beside a plan's file.

        Raises:
            ValueError: there is none, it is damaged, or it is of another plan; what to do.
            OSError: a file cannot be read.
        """
        plan, path = Plan.load(plan_file), cls.beside(plan_file)
        again = f"plan again (opensora-accel plan ... --output {plan_file}), which writes both"
        if not path.exists():
            raise ValueError(f"there is no forecast beside {plan_file}, which would be {path}; {again}")
        try:
            forecast: Forecast = parse(read_text(path, most_bytes=_MOST_BYTES), cls, str(path))
        except ValueError as error:
            raise ValueError(f"no forecast of a plan: {error}; {again}") from error
        if forecast.plan_digest != digest_of(plan):
            unlike = ", ".join(differences(forecast.plan, plan.to_dict())) or "a field"
            raise ValueError(f"{path} is the forecast of another plan than {plan_file} ({unlike}); {again}")
        return forecast


def digest_of(plan: Plan) -> str:
    """The SHA-256 sum of a plan's fields."""
    return hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """`ulysses: 2 → 4` for each field that differs."""
    names = dict.fromkeys([*before, *after])
    return [
        f"{name}: {before.get(name)} → {after.get(name)}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def axes_named(name: str, plan: Mapping[str, Any]) -> str:
    """One name for the axes of a group, whoever named it: "mixed", "mixed (dp_shard × ulysses)", "dp_shard × ulysses".

    The profiler names a group by the first of the mesh's groups with its ranks, the verifier by its axes: with one data
    rank, the group "mixed" is the one of ulysses.
    """
    word, _, listed = name.partition(" (")
    members = (
        tuple(listed.rstrip(")").split(" × ")) if listed else _MEMBERS.get(word, tuple(word.split(" × ")))
    )
    used = [axis for axis in MESH_AXES if axis in members and plan.get(axis, 1) != 1]
    return " × ".join(used) or name
