"""HunyuanVideo: double and single stream blocks, text last, a mask over the text."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, text_mask


def hunyuan_video(image_condition_type: str | None = None) -> nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    return randomize(
        HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=3,
            attention_head_dim=8,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            patch_size=2,
            patch_size_t=1,
            text_embed_dim=16,
            pooled_projection_dim=10,
            rope_axes_dim=(2, 2, 4),
            image_condition_type=image_condition_type,
        )
    )


def inputs() -> Inputs:
    """5 × 3 × 5 = 75 tokens and 7 of text, of which one caption has 4."""
    return {
        "hidden_states": randn(2, 4, 5, 6, 10),
        "timestep": torch.tensor([100, 700]),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
        "encoder_attention_mask": text_mask((7, 4), 7).long(),
        "pooled_projections": randn(2, 10, seed=3),
        "guidance": torch.tensor([1000.0, 6000.0]),
    }


HUNYUAN_VIDEO = {
    "HunyuanVideo": Case(hunyuan_video, inputs, ("hidden_states", "encoder_hidden_states")),
    "HunyuanVideo, first frame given": Case(lambda: hunyuan_video("token_replace"), inputs),
}
