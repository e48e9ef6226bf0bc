"""What a policy puts into a model: norms, and attention over a split sequence."""

from shardformer.modeling.attention import redirect_attention
from shardformer.modeling.norms import FusedT5LayerNorm, SwapReport, swap_norms
from shardformer.modeling.t5 import T5LayerNorm

__all__ = ["NORMS", "FusedT5LayerNorm", "SwapReport", "T5LayerNorm", "redirect_attention", "swap_norms"]

NORMS: dict[str, type[T5LayerNorm] | type[FusedT5LayerNorm]] = {
    "T5LayerNorm": T5LayerNorm,
    "FusedT5LayerNorm": FusedT5LayerNorm,
}
"""By the names that a policy's `NormSwap.target` may have."""
