"""Small meshes on which one axis cannot be taken for another: alone, beside a data axis, and that one alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opensora_accel import Plan

Meshes = tuple[Plan | Mapping[str, int], ...]


def plan(**fields: Any) -> Plan:
    return Plan(precision="fp64", **fields)


ULYSSES = (plan(dp_replicate=2, ulysses=2), plan(ulysses=3), plan(dp_replicate=3))
ULYSSES_BESIDE_DATA = (ULYSSES[0], ULYSSES[2])
"""For what fails where there is but one data rank, or on any mesh: ranks that fail take seconds to start anew."""
ULYSSES_TO_4 = (*ULYSSES, plan(ulysses=4))
RING = (plan(dp_replicate=2, ring=2), plan(ring=3), plan(dp_replicate=3))
BOTH = (plan(ring=2, ulysses=2), plan(ring=3), plan(ulysses=3), plan(dp_replicate=2))
SHARDED = tuple(
    plan(dp_shard=data, ulysses=ulysses, sharding="zero3") for data, ulysses in ((2, 2), (1, 3), (2, 1))
)
HYBRID = tuple(
    plan(dp_replicate=data, ulysses=ulysses, sharding="zero3") for data, ulysses in ((2, 2), (1, 3), (2, 1))
)
TENSOR = ({"data": 2, "tensor": 2}, {"data": 1, "tensor": 3}, {"data": 3, "tensor": 1})
TWO_RANKS = (plan(ulysses=2), plan(dp_replicate=2))
TRAINER = (*ULYSSES[:2], plan(dp_replicate=2))
"""Whose batch of 4 does not go to 3 ranks."""
