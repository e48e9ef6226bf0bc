"""What fits, how fast, and why: a training step is planned on a CPU, for as many GPUs as it will have.

plan = opensora_accel.planner.plan_for(build_model, inputs, world_size=8, num_tokens=4096, num_heads=12)
init_parallel(plan)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from opensora_accel.plan import Plan

__all__ = ["plan_for"]


def plan_for(
    model: Callable[[], nn.Module],
    inputs: Callable[[nn.Module, torch.dtype], Mapping[str, Any]],
    *,
    world_size: int | None = None,
    hardware: str = "",
    num_tokens: int = 0,
    num_heads: int = 0,
    batch: int = 1,
    precision: str = "bf16",
) -> Plan:
    """The fastest Plan that fits, for a loop of one's own; prints why. Call it on one process, before any group.

    Args:
        model: builds it; called on tensors without values. Its class has a policy.
        inputs: of its forward for one microbatch, floating-point ones in the dtype that it is given; the first one
            holds the latents, and what the model returns has their shape.
        world_size: ranks; by default those that the launcher has started.
        hardware: as `opensora-accel plan --hardware` takes it; by default this machine.
        num_tokens, num_heads: of a sample, and of its attention: they limit the sequence axes. 0 does not.
        batch: samples of a data rank in one microbatch, which `inputs` has.

    Raises:
        ValueError: nothing fits, and what would help; a process group exists already; a wrong name.
    """
    import os

    from opensora_accel.planner.command import Job, choose
    from opensora_accel.planner.workload import of_model

    if not callable(model) or hasattr(model, "state_dict"):
        raise ValueError(
            f"plan_for takes a function that builds the model, as `lambda: Model(...)`; got {type(model).__name__}"
        )
    workload = of_model("the model", model, inputs, batch=batch, num_tokens=num_tokens, num_heads=num_heads)
    ranks = world_size if world_size is not None else int(os.environ.get("WORLD_SIZE", "1"))
    return choose(Job(((workload, 1.0),), precision), ranks, hardware)
