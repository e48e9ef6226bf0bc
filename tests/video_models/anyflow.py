"""AnyFlow: Wan's blocks, two timesteps for every frame."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, wan_like


def anyflow() -> nn.Module:
    from diffusers import AnyFlowTransformer3DModel

    return randomize(
        AnyFlowTransformer3DModel(
            **wan_like(),
            rope_max_seq_len=32,
        )
    )


def inputs() -> Inputs:
    return {
        "hidden_states": randn(2, 5, 4, 6, 10),
        "timestep": torch.linspace(100, 900, 10).view(2, 5),
        "r_timestep": torch.linspace(50, 800, 10).view(2, 5),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
    }


ANYFLOW = {"AnyFlow": Case(anyflow, inputs, ("hidden_states", "encoder_hidden_states"))}
