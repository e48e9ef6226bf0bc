"""Attention over ranks, ours beside everybody's: gradient errors, bytes and collectives, bytes kept, times."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `opensora-accel bench attention`; its exit status."""
    # Not at the top: ranks are modules of this package, and need none of the command.
    from opensora_accel.profiler.bench_attention.command import run

    return run(arguments)
