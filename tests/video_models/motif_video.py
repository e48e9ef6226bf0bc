"""Motif-Video: double and single stream blocks, cross-attention to the text besides, and a decoder that has no text."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, text_mask


def motif_video(image: bool = False) -> nn.Module:
    from diffusers import MotifVideoTransformer3DModel

    return randomize(
        MotifVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=3,
            attention_head_dim=8,
            num_layers=1,
            num_single_layers=1 if image else 3,
            num_decoder_layers=0 if image else 2,
            mlp_ratio=2.0,
            text_embed_dim=16,
            image_embed_dim=10 if image else None,
            rope_axes_dim=(2, 2, 4),
            enable_text_cross_attention_dual=True,
            enable_text_cross_attention_single=True,
        )
    )


def inputs(image: bool = False) -> Inputs:
    """5 × 3 × 5 = 75 tokens and 7 of text, of which one caption has 4; 3 of an image."""
    return {
        "hidden_states": randn(2, 4, 5, 6, 10),
        "timestep": torch.tensor([100, 700]),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
        "encoder_attention_mask": text_mask((7, 4), 7).long(),
        **({"image_embeds": randn(2, 3, 10, seed=3)} if image else {}),
    }


MOTIF_VIDEO = {
    "Motif-Video": Case(motif_video, inputs, ("hidden_states", "encoder_hidden_states")),
    "Motif-Video, image, no decoder": Case(lambda: motif_video(image=True), lambda: inputs(image=True)),
}
