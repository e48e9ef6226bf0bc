"""Cosmos: learned positions, and a timestep per frame."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, text_mask


def cosmos(image: bool = False) -> nn.Module:
    from diffusers import CosmosTransformer3DModel

    return randomize(
        CosmosTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=3,
            attention_head_dim=16,
            num_layers=2,
            mlp_ratio=2.0,
            text_embed_dim=16,
            adaln_lora_dim=4,
            max_size=(8, 12, 12),
            patch_size=(1, 2, 2),
            concat_padding_mask=False,
            extra_pos_embed_type=None if image else "learnable",
            img_context_dim_in=10 if image else None,
            img_context_num_tokens=3,
            img_context_dim_out=48,
        )
    )


def inputs(per_frame_time: bool = False, image: bool = False) -> Inputs:
    time = torch.linspace(0.1, 0.9, 10).view(2, 1, 5, 1, 1) if per_frame_time else torch.tensor([0.1, 0.7])
    text = randn(2, 7, 16, seed=2)
    return {
        "hidden_states": randn(2, 4, 5, 6, 10),
        "timestep": time,
        "encoder_hidden_states": (text, randn(2, 3, 10, seed=3)) if image else text,
        "attention_mask": None if image else text_mask((7, 4), 7),
        "fps": 16,
    }


COSMOS = {
    "Cosmos": Case(cosmos, inputs, ("hidden_states", "encoder_hidden_states")),
    "Cosmos, time per frame": Case(cosmos, lambda: inputs(per_frame_time=True)),
    "Cosmos, image": Case(lambda: cosmos(image=True), lambda: inputs(image=True)),
}
