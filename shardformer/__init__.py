"""Applies a Plan to a model from outside: sequence parallelism, checkpointing, sharding, norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opensora_accel import lazy
from shardformer.engine import (
    blocks_of,
    norms_of,
    parallelize,
    run_blocks,
    shard,
    sum_over_tokens,
    unshard,
)
from shardformer.policy import Policy
from shardformer.spread import local_tokens

if TYPE_CHECKING:
    from shardformer.clipping import clip_grad_norm_
    from shardformer.lora import save_lora
    from shardformer.modeling import swap_norms

__all__ = [
    "Policy",
    "blocks_of",
    "clip_grad_norm_",
    "local_tokens",
    "norms_of",
    "packing",
    "parallelize",
    "run_blocks",
    "save_lora",
    "shard",
    "sum_over_tokens",
    "swap_norms",
    "unshard",
]

# What every model needs is loaded here, what a Plan may ask for where it does.
__getattr__, __dir__ = lazy.attach(__name__)
