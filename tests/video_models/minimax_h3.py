"""MiniMax-H3: one packed sequence of text, video and audio, a timestep for every row."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn


def minimax_h3(heads: int = 3) -> nn.Module:
    from diffusers import MiniMaxH3Transformer3DModel

    return randomize(
        MiniMaxH3Transformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=16,
            hidden_size=48,
            num_layers=2,
            num_refiner_layers=1,
            ffn_dim=32,
            in_channels=4,
            audio_in_channels=6,
            patch_size=(1, 2, 2),
            text_dim=16,
            freq_dim=32,
            time_embed_hidden_dim=24,
            time_embed_dim=20,
            rope_freq_dim=2,
        )
    )


def inputs(text: int = 7, audio: int = 11) -> Inputs:
    """A batch of one: requests are packed. The first frame is given, at timestep 0."""
    total = text + 45 + audio
    rows = torch.arange(total)
    places = torch.cartesian_prod(torch.arange(3), torch.arange(3), torch.arange(5))
    positions = torch.cat([rows[:text, None].repeat(1, 3), places, rows[:audio, None].repeat(1, 3)]).float()
    tags = torch.cat([torch.full((n,), tag) for tag, n in enumerate((text, 45, audio))])
    return {
        "hidden_states": randn(1, 45, 16),
        "audio_hidden_states": randn(1, audio, 6, seed=5),
        "encoder_hidden_states": randn(1, text, 16, seed=2),
        "timestep": torch.tensor([0.0, 0.7]),
        "timestep_indices": ((rows >= text + 15) & (rows < total)).long(),
        "token_tags": tags,
        "position_ids": positions,
        "video_indices": rows[text : text + 45],
        "audio_indices": rows[text + 45 :],
        "text_indices": rows[:text],
    }


MINIMAX_H3 = {"MiniMax-H3": Case(minimax_h3, inputs, ("hidden_states", "audio_hidden_states"))}
