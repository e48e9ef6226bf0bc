"""Norms, swapped by what they compute: `swap_norms(model)` and its report."""

from shardformer.modeling.norms.module import FusedT5LayerNorm, SwappedNorm
from shardformer.modeling.norms.report import Row, SwapReport
from shardformer.modeling.norms.swap import swap_norms

__all__ = ["FusedT5LayerNorm", "Row", "SwapReport", "SwappedNorm", "swap_norms"]
