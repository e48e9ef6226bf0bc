"""What was recorded: calls and parameters of every rank."""

from __future__ import annotations

from dataclasses import dataclass

from opensora_accel.verify.communication.record import Call
from opensora_accel.verify.shapes import MeshShape


@dataclass(frozen=True)
class Parameter:
    """What is known of it once the step is done."""

    name: str
    num_elements: int
    """Of the whole parameter."""
    is_trained: bool
    """It asks for a gradient, and has one, or had one (of sharded ones, where any has: a step may clear them)."""
    shard_ranks: int | None = None
    """Ranks that hold a part of it each, where FSDP2 made it a DTensor."""
    padded_elements: int | None = None
    """What FSDP2 sends of it: the dim that is cut, filled up to a multiple of `shard_ranks`."""
    may_stay_gathered: bool = False
    """FSDP2 keeps it gathered after forward, as it does by default with the root module's own parameters."""
    has_gradient: bool = False
    """One was seen after a backward, or is there."""


@dataclass(frozen=True)
class RankRecord:
    """One rank's step."""

    rank: int
    calls: tuple[Call, ...]
    parameters: tuple[Parameter, ...]
    num_backwards: int


@dataclass(frozen=True)
class Record:
    """What every recorded rank has called, in order."""

    shape: MeshShape
    ranks: tuple[RankRecord, ...]
    notes: tuple[str, ...] = ()
    """What this record cannot tell."""
