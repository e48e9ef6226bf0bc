"""Named regions of a training step: what a part of it is doing, for a profiler that listens.

    with region("copy out", "blocks.3"):
        ...

Without a listener that is one look at a variable and nothing else. There is one listener at a time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Listener(Protocol):
    """Whoever wants to know of regions."""

    def region(self, kind: str, name: str, phase: str) -> AbstractContextManager[None]:
        """Around the work of a region."""


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
