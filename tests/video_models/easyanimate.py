"""EasyAnimate: text first, the first blocks with weights of their own for it."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn


def easyanimate() -> nn.Module:
    from diffusers import EasyAnimateTransformer3DModel

    return randomize(
        EasyAnimateTransformer3DModel(
            num_attention_heads=3,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            patch_size=2,
            sample_width=10,
            sample_height=6,
            num_layers=2,
            mmdit_layers=1,
            time_embed_dim=8,
            text_embed_dim=16,
            text_embed_dim_t5=16,
            add_norm_text_encoder=True,
            after_norm=True,
        )
    )


def inputs() -> Inputs:
    return {
        "hidden_states": randn(2, 4, 5, 6, 10),
        "timestep": torch.tensor([100, 700]),
        "encoder_hidden_states": randn(2, 4, 16, seed=2),
        "encoder_hidden_states_t5": randn(2, 3, 16, seed=3),
    }


EASYANIMATE = {"EasyAnimate": Case(easyanimate, inputs, ("hidden_states", "encoder_hidden_states"))}
