"""Allegro: a mask over the video itself, rotary positions looked up in tables."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, text_mask


def allegro() -> nn.Module:
    from diffusers import AllegroTransformer3DModel

    return randomize(
        AllegroTransformer3DModel(
            patch_size=2,
            patch_size_t=1,
            num_attention_heads=3,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            cross_attention_dim=36,
            sample_height=6,
            sample_width=10,
            sample_frames=5,
            caption_channels=16,
        )
    )


def rotary() -> tuple[tuple[tuple[torch.Tensor, torch.Tensor], ...], tuple[torch.Tensor, ...]]:
    """cos and sin tables of an axis each, and every token's place on the axes."""
    angles = [torch.outer(torch.arange(n), torch.tensor([1.0, 0.3])).repeat(1, 2) for n in (5, 3, 5)]
    places = torch.meshgrid(torch.arange(5), torch.arange(3), torch.arange(5), indexing="ij")
    return tuple((a.cos(), a.sin()) for a in angles), tuple(place.reshape(1, -1) for place in places)


def inputs(padded: bool = False) -> Inputs:
    mask = torch.ones(2, 5, 6, 10)
    mask[1, :, :, 6:] = 0  # a narrower clip in the batch
    return {
        "hidden_states": randn(2, 4, 5, 6, 10),
        "encoder_hidden_states": randn(2, 1, 7, 16, seed=2),
        "timestep": torch.tensor([100, 700]),
        "encoder_attention_mask": text_mask((7, 4), 7).long(),
        "image_rotary_emb": rotary(),
        "attention_mask": mask if padded else None,
    }


ALLEGRO = {
    "Allegro": Case(allegro, inputs, ("hidden_states", "encoder_hidden_states")),
    "Allegro, padded clips": Case(allegro, lambda: inputs(padded=True)),
}
