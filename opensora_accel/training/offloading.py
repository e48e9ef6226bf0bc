"""What offload did in a run: printed when "auto" decides, and kept in offload.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER


class OffloadReport:
    """Of one rank. Nothing is written by a run that moves nothing.

    Args:
        path: of the JSON file: every decision of `offload="auto"`, and the counters of the run so far.
    """

    def __init__(self, path: Path, memory_target_gib: float):
        self._path = path
        self._first = self._shown = len(MANAGER.decisions)
        MANAGER.memory_target_bytes = int(memory_target_gib * 2**30) if memory_target_gib else None
        MANAGER.reset_counters()

    def show_decisions(self) -> None:
        """Prints those that were taken since the last call, and writes the file."""
        for decision in MANAGER.decisions[self._shown :]:
            print(f"offload: {decision.reason}", flush=True)
        if len(MANAGER.decisions) > self._shown:
            self._shown = len(MANAGER.decisions)
            self.write()

    def write(self) -> None:
        if not MANAGER.enable:
            return
        record = {
            "decisions": [decision.to_dict() for decision in MANAGER.decisions[self._first :]],
            "counters": dataclasses.asdict(MANAGER.counters),
            "slot_bytes": MANAGER.slot_bytes,
            "arena_bytes": MANAGER.arena.size_bytes if MANAGER.arena is not None else 0,
        }
        self._path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
