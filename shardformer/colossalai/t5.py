"""The table of T5's encoder in the form that Open-Sora's own ShardFormer code takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from shardformer.colossalai.policy import ShardFormerMethods
from shardformer.policy import Blocks, Policy, TensorRegion, tables_named

(_TABLE,) = tables_named("T5EncoderModel")


@dataclass(frozen=True)
class T5EncoderPolicy(ShardFormerMethods, Policy):
    """For `shardformer.shard(model, plan, policy=…)`, and for ColossalAI's `ShardFormer.optimize(model, policy=…)`."""

    models: tuple[str, ...] = _TABLE.models
    blocks: tuple[Blocks, ...] = _TABLE.blocks
    tensors: tuple[TensorRegion, ...] = _TABLE.tensors
    norms: tuple[str, ...] = _TABLE.norms
    replacements: tuple[Callable[[nn.Module], Callable[[], None]], ...] = _TABLE.replacements
