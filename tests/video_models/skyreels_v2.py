"""SkyReels-V2: Wan's blocks; diffusion forcing gives frames their own timestep and a mask from block to block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, wan_like


def skyreels(**options: Any) -> nn.Module:
    from diffusers import SkyReelsV2Transformer3DModel

    return randomize(
        SkyReelsV2Transformer3DModel(
            **wan_like(),
            rope_max_seq_len=32,
            **options,
        )
    )


def inputs(forcing: bool = False, image: bool = False) -> Inputs:
    inputs: Inputs = {
        "hidden_states": randn(2, 4, 5 if not forcing else 6, 6, 10),
        "timestep": torch.tensor([100, 700]),
        "encoder_hidden_states": randn(2, 512 if image else 7, 16, seed=2),
    }
    if image:
        inputs["encoder_hidden_states_image"] = randn(2, 9, 20, seed=3)
    if forcing:
        inputs |= {
            "timestep": torch.arange(12).view(2, 6) * 80,
            "enable_diffusion_forcing": True,
        }
    return inputs


SKYREELS_V2 = {
    "SkyReels-V2": Case(skyreels, inputs, ("hidden_states", "encoder_hidden_states")),
    "SkyReels-V2, image": Case(
        lambda: skyreels(image_dim=20, added_kv_proj_dim=36), lambda: inputs(image=True)
    ),
    "SkyReels-V2, diffusion forcing": Case(
        lambda: skyreels(num_frame_per_block=2), lambda: inputs(forcing=True)
    ),
}
