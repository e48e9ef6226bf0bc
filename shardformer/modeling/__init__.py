"""What a policy puts into a model: norms, and attention over a split sequence."""

from shardformer.modeling.attention import redirect_attention
from shardformer.modeling.norms import SwapReport, swap_norms
from shardformer.modeling.t5 import T5LayerNorm

__all__ = ["NORMS", "SwapReport", "T5LayerNorm", "redirect_attention", "swap_norms"]

# By the names that a policy's `NormSwap.target` may have.
NORMS = {"T5LayerNorm": T5LayerNorm}
