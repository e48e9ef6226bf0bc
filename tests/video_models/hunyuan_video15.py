"""HunyuanVideo 1.5: double stream blocks, three kinds of text tokens, a mask over queries and keys."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, text_mask


def hunyuan_video15() -> nn.Module:
    from diffusers import HunyuanVideo15Transformer3DModel

    return randomize(
        HunyuanVideo15Transformer3DModel(
            in_channels=5,
            out_channels=4,
            num_attention_heads=3,
            attention_head_dim=8,
            num_layers=2,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            patch_size=1,
            patch_size_t=1,
            text_embed_dim=16,
            text_embed_2_dim=10,
            image_embed_dim=6,
            rope_axes_dim=(2, 2, 4),
        )
    )


def inputs(image: bool = True) -> Inputs:
    """5 × 3 × 5 = 75 tokens; 6 tokens of one encoder, 4 of the other and 3 of the image, some of them padding."""
    return {
        "hidden_states": randn(2, 5, 5, 3, 5),
        "timestep": torch.tensor([100.0, 700.0]),
        "encoder_hidden_states": randn(2, 6, 16, seed=2),
        "encoder_attention_mask": text_mask((6, 4), 6).long(),
        "encoder_hidden_states_2": randn(2, 4, 10, seed=3),
        "encoder_attention_mask_2": text_mask((2, 4), 4).long(),
        "image_embeds": randn(2, 3, 6, seed=4) * image,
    }


HUNYUAN_VIDEO15 = {
    "HunyuanVideo 1.5": Case(hunyuan_video15, lambda: inputs(image=False)),
    "HunyuanVideo 1.5, image": Case(hunyuan_video15, inputs, ("hidden_states", "encoder_hidden_states")),
}
