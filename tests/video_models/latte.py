"""Latte: blocks over places and blocks over frames in turn."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, text_mask


def latte() -> nn.Module:
    from diffusers import LatteTransformer3DModel

    return randomize(
        LatteTransformer3DModel(
            num_attention_heads=3,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            cross_attention_dim=24,
            attention_bias=True,
            sample_size=6,
            patch_size=2,
            activation_fn="gelu-approximate",
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            caption_channels=16,
            video_length=5,
        )
    )


def inputs() -> Inputs:
    """5 frames of 3 × 3 places, and 7 tokens of text."""
    bias = (~text_mask((7, 4), 7)) * -10000.0
    return {
        "hidden_states": randn(2, 4, 5, 6, 6),
        "timestep": torch.tensor([100, 700]),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
        "encoder_attention_mask": bias.repeat_interleave(5, 0)[:, None],  # one for every frame
    }


LATTE = {"Latte": Case(latte, inputs, ("hidden_states", "encoder_hidden_states"))}
