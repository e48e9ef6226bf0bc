"""What is planned for: a model at its true size, and its training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """A model, its step, and the sizes of a batch."""

    name: str
    num_blocks: int
    num_heads: int
    num_tokens: int
    text_tokens: int
    # Samples of each data rank.
    batch: int = 1


def named_workload(name: str, *, frames: int, height: int, width: int, batch: int = 1) -> Workload:
    """A published model by its name ("wan2.1-14b")."""
    raise NotImplementedError
