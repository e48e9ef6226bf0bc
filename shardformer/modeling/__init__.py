"""What a policy puts into a model: norms, and attention over a split sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opensora_accel import lazy

if TYPE_CHECKING:
    from shardformer.modeling.attention import (
        Attention,
        redirect_attention,
        running_attention,
        running_redirection,
    )
    from shardformer.modeling.flash_attn import Lengths, redirect_flash_attn
    from shardformer.modeling.flex import redirect_flex_attention
    from shardformer.modeling.halo import add_halo
    from shardformer.modeling.linear_attention import redirect_linear_attention
    from shardformer.modeling.masks import Extent, Mask, MaskReader
    from shardformer.modeling.norms import SwapReport, swap_norms
    from shardformer.modeling.t5 import T5LayerNorm, replace_t5_norms

__all__ = [
    "Attention",
    "Extent",
    "Lengths",
    "Mask",
    "MaskReader",
    "SwapReport",
    "T5LayerNorm",
    "add_halo",
    "kernels",
    "redirect_attention",
    "redirect_flash_attn",
    "redirect_flex_attention",
    "redirect_linear_attention",
    "replace_t5_norms",
    "running_attention",
    "running_redirection",
    "swap_norms",
]

__getattr__, __dir__ = lazy.attach(__name__)
