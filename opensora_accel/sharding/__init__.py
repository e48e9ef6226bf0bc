"""What a sharded einsum communicates, forward and backward, derived from its letters. Imports no torch."""

from opensora_accel.sharding.chain import Chain
from opensora_accel.sharding.collectives import FREE, Collective, Figures, Pending, einsum_flops, local_sizes
from opensora_accel.sharding.einsum import Derivation, ShardingError, derive, derive_gradients
from opensora_accel.sharding.equation import Equation
from opensora_accel.sharding.placement import (
    Invariant,
    Partial,
    Placement,
    Replicate,
    Shard,
    dual,
    parse_placement,
)

__all__ = [
    "FREE",
    "Chain",
    "Collective",
    "Derivation",
    "Equation",
    "Figures",
    "Invariant",
    "Partial",
    "Pending",
    "Placement",
    "Replicate",
    "Shard",
    "ShardingError",
    "derive",
    "derive_gradients",
    "dual",
    "einsum_flops",
    "local_sizes",
    "parse_placement",
]
