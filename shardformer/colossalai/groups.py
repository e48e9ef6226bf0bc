"""Groups that a plugin of ColossalAI has made, in our registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from opensora_accel import parallel_states
from opensora_accel.plan import Plan
from shardformer.colossalai.config import NO_PIPELINE, check_mode, sequence_plan

_SETTERS: dict[str, Callable[[dist.ProcessGroup], None]] = {
    "dp_group": parallel_states.set_data_parallel_group,
    "sp_group": parallel_states.set_sequence_parallel_group,
    "tp_group": parallel_states.set_tensor_parallel_group,
    # Not dp_group: Open-Sora's answer under sequence parallelism, which resumes with another rank's optimizer state.
    "mixed_dp_group": parallel_states.set_mixed_parallel_group,
}


def register_groups(plugin: Any) -> None:
    """Registers the data, sequence, tensor and mixed groups of a ColossalAI plugin, and the axes they lie on.

    What was registered before is forgotten. Keep the plugin: its groups end with it. A plugin that has no groups
    (`TorchDDPPlugin`) has one: the world.

    Raises:
        ValueError: no process group yet; tensor parallelism or pipeline stages, whose ranks our policies do not
            know (the setters of `parallel_states` still take each group by itself).
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group yet; call colossalai.launch_from_torch() first")
    plan = _plan_of_plugin(plugin)  # which may refuse it: then nothing is forgotten
    parallel_states.reset()
    # The axes as well: joint attention and rings ask for them by name. The plugin's mesh has the order of ours.
    parallel_states.init_parallel(plan)
    for name, setter in _SETTERS.items():
        group = getattr(plugin, name, None)
        if group is not None:
            setter(group)


def _plan_of_plugin(plugin: Any) -> Plan:
    if getattr(plugin, "pp_size", 1) > 1:
        raise ValueError(f"pp_size={plugin.pp_size}: {NO_PIPELINE}")
    mode = plugin.sequence_parallelism_mode if getattr(plugin, "enable_sequence_parallelism", False) else None
    if mode is not None:
        check_mode(mode)
    if getattr(plugin, "tp_size", 1) > 1:
        raise ValueError(
            f"tp_size={plugin.tp_size}: our policies do not share these ranks with ColossalAI; use tp_size=1, or "
            "register each group by its setter in opensora_accel.parallel_states"
        )
    degree = getattr(plugin, "sp_size", 1)
    return sequence_plan(mode, degree).replace(dp_replicate=dist.get_world_size() // degree)
