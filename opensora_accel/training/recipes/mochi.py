"""Mochi: time runs from noise to clip, and so does what the model answers; a mask of the text."""

from __future__ import annotations

import torch
from torch import Tensor

from opensora_accel import observe
from opensora_accel.training.recipes.base import Recipe

# Half of the steps are even ones of the same small size, up to this share of the way; then they grow.
_EVEN_UP_TO = 0.025


def _times(num_steps: int, alpha: float) -> Tensor:
    """Linear, then quadratic: [num_steps + 1] from 1 to 0, then shifted towards noise by α.

    Of 4 steps two are of 1.25 % each, so that the first half ends at 97.5 %.

    Source: genmoai/mochi, src/mochi_preview/infer.py, `linear_quadratic_schedule`.
    """
    num_even = num_steps // 2
    if not num_even:
        return torch.tensor([1.0, 0.0], dtype=torch.float64)
    steps = torch.arange(num_steps + 1, dtype=torch.float64)
    slope = _EVEN_UP_TO / num_even
    # The parabola goes on where the line ends, and is 1 at the last step.
    num_others = num_steps - num_even
    quadratic = (num_even - _EVEN_UP_TO * num_steps) / (num_even * num_others**2)
    linear = slope - 2 * num_even * quadratic
    curve = quadratic * steps**2 + linear * steps + quadratic * num_even**2
    t = 1 - torch.where(steps < num_even, slope * steps, curve)
    t[-1] = 0.0
    return alpha * t / (1 + (alpha - 1) * t)


RECIPE = Recipe(
    models=("MochiTransformer3DModel",),
    pipeline="MochiPipeline",
    call={
        "timestep": lambda inputs: 1000 - inputs.timestep,
        "encoder_hidden_states": "text",
        "encoder_attention_mask": "text_mask",
    },
    derive=lambda sizes: {
        "in_channels": sizes.input_channels,
        # None is as many as go in.
        "out_channels": None if sizes.arguments["out_channels"] is None else sizes.channels,
        "text_embed_dim": sizes.texts[0].width,
    },
    # It looks up which tokens of a caption are there, and names the device to autocast: meta knows neither.
    without_memory=lambda: observe.FakeFloats(),
    sign=-1.0,
    times=_times,
    published={
        "data.num_frames": 85,
        "data.height": 480,
        "data.width": 848,
        "text.length": 256,
        "flow.shift": 1.0,
    },
    tiny={
        "num_layers": 2,
        "num_attention_heads": 3,
        "attention_head_dim": 12,
        "pooled_projection_dim": 24,
        "time_embed_dim": 8,
    },
)
