"""Applies a policy table to a model, and undoes it. Knows nothing of any one model."""

from shardformer.engine.agreement import Summary, is_real, named_values, summarise
from shardformer.engine.apply import (
    blocks_of,
    frozen_dtype,
    norms_of,
    parallelize,
    run_blocks,
    run_packed,
    shard,
    unshard,
    weight_dtype,
)
from shardformer.engine.decisions import sum_over_tokens

__all__ = [
    "Summary",
    "blocks_of",
    "frozen_dtype",
    "is_real",
    "named_values",
    "norms_of",
    "parallelize",
    "run_blocks",
    "run_packed",
    "shard",
    "sum_over_tokens",
    "summarise",
    "unshard",
    "weight_dtype",
]
