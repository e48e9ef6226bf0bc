"""What is wrong with a record, in plain words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from opensora_accel.verify.communication.record import Call

_MOST_SOURCES = 4


@dataclass(frozen=True)
class Violation:
    """One promise that was not kept."""

    rule: str
    actual: str
    remedy: str
    sources: tuple[str, ...] = ()
    """Lines that the calls in question came from."""

    def __str__(self) -> str:
        lines = [
            f"{self.rule}; but {self.actual}; {self.remedy}",
            *(f"    at {line}" for line in self.sources),
        ]
        return "\n".join(lines)


def sources_of(calls: Iterable[Call]) -> tuple[str, ...]:
    """Each line once, the first few."""
    found = list(dict.fromkeys(call.source for call in calls))
    more = len(found) - _MOST_SOURCES
    return tuple([*found[:_MOST_SOURCES], *([f"and {more} more lines"] if more > 0 else [])])
