"""What other libraries call, with this toolkit behind it, and `check_loop` for the loops that do.

Each library is imported on use only.
"""

from opensora_accel.integrations.check_loop import LoopMistake, check_loop

__all__ = ["LoopMistake", "check_loop"]
