"""What fits, how fast, and why: a training step is planned on a CPU, for as many GPUs as it will have.

plan = opensora_accel.planner.plan_for(build_model, inputs, world_size=8, num_tokens=4096, num_heads=12)
init_parallel(plan)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opensora_accel import lazy

if TYPE_CHECKING:
    from opensora_accel.planner.candidates import Frozen, Residents
    from opensora_accel.planner.jobs import Job, choose, choose_foreseen, plan_for
    from opensora_accel.planner.workload import Workload, workload_of_model

__all__ = [
    "Frozen",
    "Job",
    "Residents",
    "Workload",
    "calibrate",
    "choose",
    "choose_foreseen",
    "command",
    "correct",
    "plan_for",
    "workload_of_model",
]

__getattr__, __dir__ = lazy.attach(__name__)
