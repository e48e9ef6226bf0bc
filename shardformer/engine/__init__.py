"""Applies a policy table to a model, and undoes it. Knows nothing of any one model."""

from shardformer.engine.apply import DTYPES, blocks_of, norms_of, parallelize, shard, unshard

__all__ = ["DTYPES", "blocks_of", "norms_of", "parallelize", "shard", "unshard"]
