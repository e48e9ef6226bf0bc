"""Open-Sora's `GLOBAL_ACTIVATION_MANAGER`: a front of the engine that moves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from opensora_accel.offload.engine import OffloadEngine


class ActivationManager:
    """Stands for `engine`, with which hand-written calls of `checkpoint` move; every other name is the engine's.

    That is an engine set up by hand, by `setup_buffer` or `setup_arena`. Where none is, `checkpoint_blocks` makes one
    for its blocks and shows it here.
    """

    def __init__(self) -> None:
        self.engine = OffloadEngine()

    @contextlib.contextmanager
    def show(self, engine: OffloadEngine) -> Iterator[OffloadEngine]:
        """Within it this stands for another engine."""
        before, self.engine = self.engine, engine
        try:
            yield engine
        finally:
            self.engine = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    # What users also set is named, since an assignment does not pass through `__getattr__`.

    @property
    def enable(self) -> bool:
        """Whether anything moves; it can be switched off and on again."""
        return self.engine.enable

    @enable.setter
    def enable(self, value: bool) -> None:
        self.engine.enable = value

    @property
    def memory_target_bytes(self) -> int | None:
        """Device memory that "auto" may fill; None stands for 90 % of the device's."""
        return self.engine.memory_target_bytes

    @memory_target_bytes.setter
    def memory_target_bytes(self, value: int | None) -> None:
        self.engine.memory_target_bytes = value


GLOBAL_ACTIVATION_MANAGER = ActivationManager()
