"""What a `ShardConfig` asks for, as a Plan, and what of it our policies do not do."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from opensora_accel import parallel_states
from opensora_accel.plan import Plan

logger = logging.getLogger(__name__)

NO_PIPELINE = "our policies do not cut a model into pipeline stages; use pp_size=1"


def plan_of(config: Any, plan: Plan | None) -> Plan:
    """The plan that was given, or else the one that the `ShardConfig` asks for.

    Raises:
        ValueError: the plan that was given does not fit the `ShardConfig`.
    """
    degree = config.sequence_parallel_size
    if plan is None:
        return sequence_plan(config.sequence_parallelism_mode, degree)
    if plan.sequence != degree:
        raise ValueError(
            f"the plan has {plan.sequence} sequence ranks and the ShardConfig {degree}; give both the same: "
            'enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all" and a '
            "sequence_parallel_process_group (HybridParallelPlugin: sp_size)"
        )
    if plan.is_sharded:
        raise ValueError(
            f'sharding="{plan.sharding}" is FSDP2, and parameters that ColossalAI wraps are ColossalAI\'s to shard; '
            'use sharding="none"'
        )
    return plan


def sequence_plan(mode: str | None, degree: int) -> Plan:
    """Which axis ColossalAI's mode is; None is no sequence parallelism."""
    return Plan(ring=degree) if mode == "ring_attn" else Plan(ulysses=degree)


def check_config(config: Any) -> None:
    """Refuses what our policies do not do, so that no option is ignored silently.

    Raises:
        ValueError: the `ShardConfig` asks for pipeline stages, tensor parallelism, fp8 or its own checkpointing.
    """
    if config.pipeline_stage_manager is not None:
        raise ValueError(NO_PIPELINE)
    if config.enable_tensor_parallelism and config.tensor_parallel_size > 1:
        raise ValueError(
            f"tensor parallelism over {config.tensor_parallel_size} ranks: ColossalAI's optimizers and checkpoints "
            "would take our shares of a parameter for the whole; use tp_size=1 (in a ShardConfig "
            "enable_tensor_parallelism=False) and put the ranks on sp_size, or shardformer.shard(model, Plan(tp=…)) "
            "without a plugin"
        )
    if config.enable_sequence_parallelism:
        check_mode(config.sequence_parallelism_mode)
    if config.fp8_communication:
        raise ValueError("fp8_communication would change the gradients, which are exact here; leave it False")
    if config.gradient_checkpoint_config is not None:
        raise ValueError(
            "gradient_checkpoint_config is for ColossalAI's own policies; use "
            'colossalai_policy(plan=Plan(checkpoint="full"))'
        )
    for option in ("enable_jit_fused", "enable_fused_normalization", "enable_flash_attention"):
        if getattr(config, option):
            logger.warning("%s=True fuses nothing in our policies: the same numbers, unfused", option)


def check_mode(mode: str) -> None:
    """Refuses modes that spread tokens over the ranks of tensor parallelism.

    Raises:
        ValueError: the mode is another one than Ulysses or the ring.
    """
    if mode not in ("all_to_all", "ring_attn"):
        raise ValueError(
            f'sequence_parallelism_mode="{mode}" spreads tokens over the ranks of tensor parallelism; use '
            '"all_to_all" (Ulysses) or "ring_attn"'
        )


def check_group(config: Any, plan: Plan) -> None:
    """Checks that ColossalAI's sequence group is the registered one, over which tokens are spread.

    Raises:
        ValueError: it is another one, or none is registered.
    """
    if plan.sequence == 1:
        return
    theirs = dist.get_process_group_ranks(config.sequence_parallel_process_group)
    group = parallel_states.get_sequence_parallel_group()
    ours = None if group is None else dist.get_process_group_ranks(group)
    if ours != theirs:
        registered = "none is registered" if ours is None else f"ranks {ours} are registered"
        raise ValueError(
            f"the ShardConfig's sequence group has ranks {theirs}, but {registered}; call "
            "shardformer.colossalai.register_groups(plugin), or opensora_accel.init_parallel(plan) without a plugin"
        )
