"""AnyFlow: Wan's blocks, two timesteps for every frame; FAR: each chunk of frames sees those before it."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, wan_like
from tests.video_models.flex import use_dense_flex_attention


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


def far() -> nn.Module:
    from diffusers import AnyFlowFARTransformer3DModel

    use_dense_flex_attention()
    return randomize(
        AnyFlowFARTransformer3DModel(
            **wan_like(heads=5),
            rope_max_seq_len=32,
            full_chunk_limit=2,
        )
    )


def far_inputs(clean: bool) -> Inputs:
    """3 compressed frames of 1 × 5 tokens, 2 of 2 × 10, and of these a clean copy: 55 or 95 tokens."""
    inputs = {
        "hidden_states": randn(2, 5, 4, 4, 20),
        "chunk_partition": [1, 2, 1, 1],
        "timestep": torch.linspace(100, 900, 10).view(2, 5),
        "r_timestep": torch.linspace(50, 800, 10).view(2, 5),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
    }
    if clean:
        inputs |= {"clean_hidden_states": randn(2, 2, 4, 4, 20, seed=3), "clean_timestep": torch.zeros(2, 2)}
    return inputs


_BOTH = ("hidden_states", "encoder_hidden_states")

ANYFLOW = {
    "AnyFlow": Case(anyflow, inputs, _BOTH),
    "AnyFlow FAR": Case(far, lambda: far_inputs(clean=False), _BOTH),
    "AnyFlow FAR, clean frames": Case(far, lambda: far_inputs(clean=True), (*_BOTH, "clean_hidden_states")),
}
