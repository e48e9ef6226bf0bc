"""The reference trainer: real video files, a real diffusers transformer, any launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opensora_accel import lazy

if TYPE_CHECKING:
    from opensora_accel.training.config import ProfileOptions, TrainConfig, load_config
    from opensora_accel.training.planned import job_of
    from opensora_accel.training.pretrained import in_one_line
    from opensora_accel.training.sections import OptimConfig
    from opensora_accel.training.tiny_run import proof_of

__all__ = [
    "OptimConfig",
    "ProfileOptions",
    "TrainConfig",
    "cache_command",
    "command",
    "in_one_line",
    "job_of",
    "load_config",
    "new_command",
    "proof_of",
]

__getattr__, __dir__ = lazy.attach(__name__)
