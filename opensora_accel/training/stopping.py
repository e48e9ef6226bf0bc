"""Ctrl-C and the launcher's or scheduler's signals end a run with a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

from opensora_accel.training.together import is_first_rank

_ONE_PRESS_S = 3.0
"""One Ctrl-C reaches a rank twice, from the terminal and from the launcher; what comes within this time is one."""


class StopRequest:
    """Within it, the first signal sets `requested`; a Ctrl-C that comes clearly later interrupts at once.

    SIGINT, SIGTERM, SIGHUP (the terminal is gone) and SIGUSR1 (a scheduler's warning) all ask for the same.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self) -> None:
        self.requested = False
        self._first_time = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in self._SIGNALS:
            # nohup: whoever has it ignored wants the run to outlive the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first_time = True, now
            if is_first_rank():
                _say(
                    f"{signal.Signals(number).name}: finishing this microbatch, then saving and stopping "
                    "(Ctrl-C again stops at once, without saving)"
                )
        elif number == signal.SIGINT and now - self._first_time > _ONE_PRESS_S:
            raise KeyboardInterrupt


def _say(line: str) -> None:
    # Not print(): the signal may have come within one, and that refuses to be entered twice.
    os.write(2, f"{line}\n".encode())
