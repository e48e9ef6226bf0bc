"""SANA-Video: linear attention, and feed-forward layers that are convolutions."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, text_mask


def sana_video() -> nn.Module:
    from diffusers import SanaVideoTransformer3DModel

    return randomize(
        SanaVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=3,
            attention_head_dim=12,
            num_layers=2,
            num_cross_attention_heads=3,
            cross_attention_head_dim=12,
            cross_attention_dim=36,
            caption_channels=16,
            mlp_ratio=2.0,
            sample_size=6,
            rope_max_seq_len=32,
        )
    )


def inputs(frames: int = 5, per_token_time: bool = False) -> Inputs:
    tokens = frames * 15
    time = (
        torch.linspace(10, 900, 2 * tokens).view(2, tokens)
        if per_token_time
        else torch.tensor([100.0, 700.0])
    )
    return {
        "hidden_states": randn(2, 4, frames, 6, 10),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
        "timestep": time,
        "encoder_attention_mask": text_mask((7, 4), 7).long(),
    }


SANA_VIDEO = {
    "SANA-Video": Case(sana_video, inputs, ("hidden_states", "encoder_hidden_states")),
    "SANA-Video, time per token": Case(sana_video, lambda: inputs(per_token_time=True)),
    "SANA-Video, fewer frames than ranks": Case(sana_video, lambda: inputs(frames=2)),
}
