"""How much compute stands beside the communication. A model, not a measurement."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from opensora_accel.links import Link
from opensora_accel.sharding import Collective

# Compute over communication below which a step is likely to wait: nothing overlaps all of the time.
LEAST_RATIO = 3.0


def balance_of(flops: float, collectives: Iterable[Collective], link: Link, flops_per_s: float) -> Balance:
    """Seconds of compute at `flops_per_s`, and of the collectives over a link, one after another."""
    return Balance(flops / flops_per_s, sum(each.time_s(link) for each in collectives))


@dataclass(frozen=True)
class Balance:
    """Seconds of compute beside seconds of communication, on one rank."""

    compute_s: float
    communication_s: float

    @property
    def ratio(self) -> float:
        return self.compute_s / self.communication_s if self.communication_s else math.inf

    @property
    def is_bound(self) -> bool:
        """Whether there is too little compute to hide the communication behind."""
        return self.ratio < LEAST_RATIO

    def __str__(self) -> str:
        warning = f" · warning: under {LEAST_RATIO:g}:1, it will be waited for" if self.is_bound else ""
        return (
            f"compute {1e3 * self.compute_s:.3g} ms, communication {1e3 * self.communication_s:.3g} ms "
            f"(modelled, forward and backward): {self.ratio:.3g}:1{warning}"
        )
