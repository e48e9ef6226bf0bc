"""The table of T5's encoder in the form that Open-Sora's own ShardFormer code takes."""

from __future__ import annotations

from dataclasses import dataclass

from shardformer.colossalai.policy import ShardFormerMethods
from shardformer.policy.base import Blocks, NormSwap, Policy
from shardformer.policy.t5 import T5_ENCODER
from shardformer.policy.tensors import TensorRegion


@dataclass(frozen=True)
class T5EncoderPolicy(ShardFormerMethods, Policy):
    """For `shardformer.shard(model, plan, policy=…)`, and for ColossalAI's `ShardFormer.optimize(model, policy=…)`."""

    models: tuple[str, ...] = T5_ENCODER.models
    blocks: tuple[Blocks, ...] = T5_ENCODER.blocks
    tensors: tuple[TensorRegion, ...] = T5_ENCODER.tensors
    norms: tuple[str, ...] = T5_ENCODER.norms
    norm_swaps: tuple[NormSwap, ...] = T5_ENCODER.norm_swaps
