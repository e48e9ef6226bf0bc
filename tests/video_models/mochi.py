"""Mochi: joint attention per sample, over the caption's tokens without their padding."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, text_mask


def mochi() -> nn.Module:
    from diffusers import MochiTransformer3DModel

    return randomize(
        MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=3,
            attention_head_dim=8,
            num_layers=3,
            pooled_projection_dim=12,
            in_channels=4,
            text_embed_dim=16,
            time_embed_dim=8,
            max_sequence_length=7,
        )
    )


def inputs() -> Inputs:
    return {
        "hidden_states": randn(2, 4, 5, 6, 10),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
        "timestep": torch.tensor([100, 700]),
        "encoder_attention_mask": text_mask((7, 4), 7),
    }


MOCHI = {"Mochi": Case(mochi, inputs, ("hidden_states", "encoder_hidden_states"))}
