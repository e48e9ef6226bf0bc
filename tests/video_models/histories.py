"""Models that put the clip's past before its tokens: FramePack and Helios."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, text_mask, wan_like


def framepack() -> nn.Module:
    from diffusers import HunyuanVideoFramepackTransformer3DModel

    return randomize(
        HunyuanVideoFramepackTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=3,
            attention_head_dim=8,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=16,
            pooled_projection_dim=10,
            rope_axes_dim=(2, 2, 4),
            has_image_proj=True,
            image_proj_dim=6,
            has_clean_x_embedder=True,
        )
    )


def framepack_inputs() -> Inputs:
    """45 tokens of 3 frames, after 15 + 15, 6 and 2 of the past."""
    return {
        "hidden_states": randn(2, 4, 3, 6, 10),
        "timestep": torch.tensor([100, 700]),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
        "encoder_attention_mask": text_mask((7, 4), 7).long(),
        "pooled_projections": randn(2, 10, seed=3),
        "image_embeds": randn(2, 3, 6, seed=4),
        "guidance": torch.tensor([1000.0, 6000.0]),
        "indices_latents": torch.arange(9, 12),
        "latents_clean": randn(2, 4, 2, 6, 10, seed=5),
        "indices_latents_clean": torch.tensor([0, 8]),
        "latents_history_2x": randn(2, 4, 2, 6, 10, seed=6),
        "indices_latents_history_2x": torch.tensor([6, 7]),
        "latents_history_4x": randn(2, 4, 4, 6, 10, seed=7),
        "indices_latents_history_4x": torch.arange(2, 6),
    }


def helios(amplify: bool = False, heads: int = 3) -> nn.Module:
    from diffusers import HeliosTransformer3DModel

    return randomize(
        HeliosTransformer3DModel(
            **wan_like(heads=heads),
            rope_dim=(4, 4, 4),
            guidance_cross_attn=not amplify,
            zero_history_timestep=not amplify,
            is_amplify_history=amplify,
        )
    )


def helios_inputs(past: bool = True) -> Inputs:
    inputs: Inputs = {
        "hidden_states": randn(2, 4, 3, 8, 8),
        "timestep": torch.tensor([100, 700]),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
    }
    if past:
        inputs |= {
            "indices_hidden_states": torch.arange(7, 10).expand(2, -1),
            "indices_latents_history_short": torch.tensor([[6]] * 2),
            "indices_latents_history_mid": torch.tensor([[4, 5]] * 2),
            "indices_latents_history_long": torch.arange(4).expand(2, -1),
            "latents_history_short": randn(2, 4, 1, 8, 8, seed=5),
            "latents_history_mid": randn(2, 4, 2, 8, 8, seed=6),
            "latents_history_long": randn(2, 4, 4, 8, 8, seed=7),
        }
    return inputs


HISTORIES = {
    "HunyuanVideo FramePack": Case(framepack, framepack_inputs, ("hidden_states", "latents_clean")),
    "Helios": Case(helios, helios_inputs, ("hidden_states", "latents_history_mid")),
    "Helios, past amplified": Case(lambda: helios(amplify=True), helios_inputs),
}
