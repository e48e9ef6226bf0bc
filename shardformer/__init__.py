"""Applies a Plan to a model from outside: sequence parallelism, checkpointing, sharding, norms."""

from shardformer.engine import blocks_of, shard, unshard
from shardformer.policy.base import Policy

__all__ = ["Policy", "blocks_of", "shard", "unshard"]
