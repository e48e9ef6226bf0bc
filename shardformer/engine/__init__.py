"""Applies a policy table to a model, and undoes it. Knows nothing of any one model."""

from shardformer.engine.agreement import Summary, is_real, named_values, summarise
from shardformer.engine.apply import (
    blocks_of,
    norms_of,
    parallelize,
    run_blocks,
    shard,
    unshard,
    weight_dtype,
)
from shardformer.spread import uncompiled

__all__ = [
    "Summary",
    "blocks_of",
    "is_real",
    "named_values",
    "norms_of",
    "parallelize",
    "run_blocks",
    "shard",
    "summarise",
    "uncompiled",
    "unshard",
    "weight_dtype",
]
