"""Kandinsky 5: text blocks of its own, then video blocks with cross-attention."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn


def kandinsky() -> nn.Module:
    from diffusers import Kandinsky5Transformer3DModel

    return randomize(
        Kandinsky5Transformer3DModel(
            in_visual_dim=4,
            in_text_dim=16,
            in_text_dim2=10,
            time_dim=8,
            out_visual_dim=4,
            model_dim=24,
            ff_dim=32,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(2, 2, 4),
        )
    )


def inputs() -> Inputs:
    return {
        "hidden_states": randn(2, 5, 6, 10, 4),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
        "timestep": torch.tensor([100.0, 700.0]),
        "pooled_projections": randn(2, 10, seed=3),
        "visual_rope_pos": (torch.arange(5), torch.arange(3), torch.arange(5)),
        "text_rope_pos": torch.arange(7),
    }


KANDINSKY5 = {"Kandinsky 5": Case(kandinsky, inputs, ("hidden_states", "encoder_hidden_states"))}
