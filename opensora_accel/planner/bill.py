"""What a number of samples takes of GPU-hours and money.

A step of 64 samples that takes 3.0 to 4.5 s on 64 GPUs makes 100,000 samples in 1,563 steps: 83 to 125 GPU-hours, which
cost 208 to 313 at 2.5 an hour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opensora_accel.planner.candidates import Candidate


@dataclass(frozen=True)
class Bill:
    """Of a Plan, from the fast to the slow end of its step; `cost` in the unit of the price, None without one."""

    samples: int
    steps: int
    gpu_hours: tuple[float, float]
    cost: tuple[float, float] | None

    @classmethod
    def of(cls, candidate: Candidate, samples: int, price: float | None) -> Bill:
        """`price`: of one GPU for an hour."""
        steps = math.ceil(samples / candidate.samples)
        low, high = (steps * seconds * candidate.plan.world_size / 3600 for seconds in candidate.step_time_s)
        return cls(samples, steps, (low, high), None if price is None else (low * price, high * price))

    def __str__(self) -> str:
        of_money = "" if self.cost is None else f", cost {interval(self.cost)}"
        return (
            f"{self.samples:,} samples: {self.steps:,} steps, {interval(self.gpu_hours)} GPU-hours{of_money}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "steps": self.steps,
            "gpu_hours": list(self.gpu_hours),
            "cost": None if self.cost is None else list(self.cost),
        }


def interval(bounds: tuple[float, float] | None) -> str:
    """`208 to 313`; of nothing, nothing."""
    if bounds is None:
        return ""
    low, high = (f"{each:,.0f}" if each >= 10 else f"{each:.2g}" for each in bounds)
    return low if low == high else f"{low} to {high}"


def prices(given: Sequence[str], hardware: Sequence[str]) -> Mapping[str, float]:
    """`["2.5"]`, or `["h100x8=2.5", "a100x8=1.2"]`, by the name of the hardware.

    Raises:
        ValueError: no price, one that is not above 0, or one of hardware that is not asked for.
    """
    found: dict[str, float] = {}
    for text in given:
        name, equals, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not 0 < price < math.inf or (equals and name not in hardware):
            raise ValueError(
                "--price is what a GPU costs for an hour, 2.5 or "
                f"{hardware[0]}=2.5, each name one of --hardware; got {text!r}"
            )
        found |= {name: price} if equals else dict.fromkeys(hardware, price)
    return found
