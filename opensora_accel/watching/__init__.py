"""A training loop that is watched: its first steps in depth, and then the whole of a run."""

from opensora_accel.watching.mistakes import REMEDIES, LoopMistake
from opensora_accel.watching.watch import watch

__all__ = ["REMEDIES", "LoopMistake", "watch"]
