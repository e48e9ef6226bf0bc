"""Applies a Plan to a model from outside: sequence parallelism, checkpointing, sharding, norms."""

from shardformer.engine import blocks_of, norms_of, parallelize, run_blocks, shard, unshard
from shardformer.engine.decisions import sum_over_tokens
from shardformer.engine.tokens import local_tokens
from shardformer.lora import save_lora
from shardformer.modeling import SwapReport, swap_norms
from shardformer.policy.base import Policy

__all__ = [
    "Policy",
    "SwapReport",
    "blocks_of",
    "local_tokens",
    "norms_of",
    "parallelize",
    "run_blocks",
    "save_lora",
    "shard",
    "sum_over_tokens",
    "swap_norms",
    "unshard",
]
