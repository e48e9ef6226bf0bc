"""LTX-Video: tokens instead of a clip, positions in seconds and pixels, a mask of the text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opensora_accel.training.captions import TextStates
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes, even_times

# How much noise is left before the last step of a sample: its scheduler's `shift_terminal`.
_LAST = 0.1


def _scales(inputs: Inputs) -> tuple[float, float, float]:
    """Seconds, and pixels down and across, from one latent position to the next."""
    return inputs.latent_frames.temporal / inputs.frame_rate, float(inputs.spatial), float(inputs.spatial)


def _times(num_steps: int, alpha: float) -> Tensor:
    """[num_steps + 1] from 1 to 0: even, shifted by α, then stretched until the last but one is 0.1."""
    t = even_times(num_steps, alpha)[:-1]
    if num_steps > 1:
        t = 1 - (1 - t) * (1 - _LAST) / (1 - t[-1])
    return torch.cat([t, t.new_zeros(1)])


def _derive(sizes: Sizes) -> dict[str, Any]:
    return {
        "in_channels": sizes.input_channels,
        "out_channels": sizes.channels,
        "caption_channels": sizes.texts[0].width,
        # A token is one latent position here, as in all that is published.
        "patch_size": 1,
        "patch_size_t": 1,
        # Captions are projected to the width of the transformer before they are attended to.
        "cross_attention_dim": sizes.arguments["num_attention_heads"] * sizes.arguments["attention_head_dim"],
    }


RECIPE = Recipe(
    models=("LTXVideoTransformer3DModel",),
    pipeline="LTXPipeline",
    call={
        "timestep": "token_timestep",
        "encoder_hidden_states": "text",
        "encoder_attention_mask": "text_mask",
        "num_frames": lambda inputs: inputs.latents.size(2),
        "height": lambda inputs: inputs.latents.size(3),
        "width": lambda inputs: inputs.latents.size(4),
        "rope_interpolation_scale": _scales,
    },
    derive=_derive,
    layout="tokens",
    frames=(Conditioning("latents"),),
    text=(TextStates(masked=False),),
    takes_frame_rate=True,
    times=_times,
    published={
        "data.num_frames": 121,
        "data.height": 512,
        "data.width": 704,
        "text.length": 128,
        "flow.shift": "ltx",
    },
    tiny={"num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 12},
)
