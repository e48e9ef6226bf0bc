"""LTX-Video: tokens instead of a clip, positions in seconds and pixels, a mask of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.training.captions import TextStates
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes, even_times
from opensora_accel.training.recipes.rows import Arguments, RowOf, joined, lengths, part_tokens, per_token

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


def _join(_model: nn.Module, calls: Sequence[Arguments]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row is told where its tokens lie, in seconds and pixels, in the place of how many there are along each side."""
    placed = [
        {
            **call,
            "timestep": per_token(call["timestep"], call["hidden_states"].size(1)),
            "video_coords": _places(call),
        }
        for call in calls
    ]
    row = joined(placed, {"hidden_states": 1, "encoder_hidden_states": 1, "timestep": 1, "video_coords": 2})
    streams = {name: lengths(calls, name) for name in ("hidden_states", "encoder_hidden_states")}
    none = dict.fromkeys(("num_frames", "height", "width", "encoder_attention_mask"))
    return row | none | {"return_dict": False}, streams


def _places(call: Arguments) -> Tensor:
    """[1, 3, S]: as the model makes them of a clip's sizes."""
    device = call["hidden_states"].device
    sides = [
        torch.arange(call[name], dtype=torch.float32, device=device)
        for name in ("num_frames", "height", "width")
    ]
    grid = torch.stack(torch.meshgrid(*sides, indexing="ij")).flatten(1)
    return torch.stack(
        [of_side * scale for of_side, scale in zip(grid, call["rope_interpolation_scale"], strict=True)]
    )[None]


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
    row=RowOf(_join, part_tokens("hidden_states")),
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
