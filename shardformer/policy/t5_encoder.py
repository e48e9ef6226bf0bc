"""T5 and UMT5 text encoders (transformers): every RMSNorm becomes `shardformer.modeling.t5.T5LayerNorm`."""

from __future__ import annotations

from dataclasses import dataclass

from shardformer.policy.base import Blocks, NormSwap, Policy


@dataclass(frozen=True)
class T5EncoderPolicy(Policy):
    """Open-Sora's name. A text encoder sees the whole prompt on every rank, so nothing is split.

    apex's FusedRMSNorm accumulates in another order and needs a GPU; `T5LayerNorm` computes what T5 was trained
    with, on any device.
    """

    models: tuple[str, ...] = ("T5EncoderModel", "UMT5EncoderModel")
    blocks: tuple[Blocks, ...] = (Blocks("encoder.block"),)
    norm_swaps: tuple[NormSwap, ...] = (
        NormSwap(
            ("FusedRMSNorm", "MixedFusedRMSNorm", "T5LayerNorm", "UMT5LayerNorm", "RMSNorm"), "T5LayerNorm"
        ),
    )


T5_ENCODER = T5EncoderPolicy()
