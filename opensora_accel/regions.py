"""Named regions of a training step, and what is shared in them, for a profiler that listens.

    with region("copy out", "blocks.3"):
        ...
    attends(deal, place=3, num_samples=2)  # this rank's share of a mask

Without a listener that is one look at a variable and nothing else. There is one listener at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Shares(Protocol):
    """What each of several ranks has of a mask."""

    @property
    def mask(self) -> Any:
        """`AttentionSlices`."""

    @property
    def areas(self) -> Sequence[int]:
        """Every rank's pairs of queries and keys."""


class Listener(Protocol):
    """Whoever wants to know of regions."""

    def region(self, kind: str, name: str, phase: str) -> AbstractContextManager[None]:
        """Around the work of a region."""

    def attends(self, shares: Shares, place: int, num_samples: int) -> None:
        """Attention by a mask's slices begins."""


_listener: Listener | None = None
_NOTHING = nullcontext()


def listen(listener: Listener | None) -> None:
    """From now on `listener` hears of regions; None ends that.

    Raises:
        ValueError: another one listens.
    """
    global _listener
    if listener is not None and _listener is not None:
        raise ValueError("a profiler runs already; there can be one at a time")
    _listener = listener


def region(kind: str, name: str = "", phase: str = "") -> AbstractContextManager[None]:
    """Around work of one kind (`opensora_accel.profiler.records.REGIONS`)."""
    return _NOTHING if _listener is None else _listener.region(kind, name, phase)


def attends(shares: Shares, place: int, num_samples: int) -> None:
    """Attention by a mask's slices begins, on the rank at `place` of those that share it."""
    if _listener is not None:
        _listener.attends(shares, place, num_samples)
