"""Ctrl-C and the launcher's SIGTERM end a run after the step in progress, with a checkpoint."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Within it, the first signal sets `requested`; a second one interrupts at once."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A terminal and a launcher may both send one: only a repeated Ctrl-C is impatience.
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
