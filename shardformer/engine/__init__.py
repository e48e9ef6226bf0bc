"""Applies a policy table to a model, and undoes it. Knows nothing of any one model."""

from shardformer.engine.apply import blocks_of, norms_of, run_blocks, shard, unshard

__all__ = ["blocks_of", "norms_of", "run_blocks", "shard", "unshard"]
