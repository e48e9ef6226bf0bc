"""HunyuanVideo: a language model's states of a caption and CLIP's of the whole; guidance that the model is told."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opensora_accel.training.captions import TextStates
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes

# Source: Tencent/HunyuanVideo, hyvideo/constants.py, PROMPT_TEMPLATE_ENCODE_VIDEO.
_TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)


def _guidance(inputs: Inputs) -> Tensor | None:
    """[B], a thousand times how far it is guided; None for a model that was not distilled."""
    if not inputs.config["guidance_embeds"]:
        return None
    return torch.full_like(inputs.timestep, inputs.guidance * 1000)


def _derive(sizes: Sizes) -> dict[str, Any]:
    return {
        "in_channels": sizes.input_channels,
        "out_channels": sizes.channels,
        "text_embed_dim": sizes.texts[0].width,
        "pooled_projection_dim": sizes.texts[1].width,
        # Those that are given a first frame are other models.
        "image_condition_type": None,
    }


RECIPE = Recipe(
    models=("HunyuanVideoTransformer3DModel",),
    pipeline="HunyuanVideoPipeline",
    call={
        "timestep": "timestep",
        "encoder_hidden_states": "text",
        "encoder_attention_mask": "text_mask",
        "pooled_projections": lambda inputs: inputs.text_2.squeeze(1),
        "guidance": _guidance,
    },
    derive=_derive,
    text=(
        TextStates(encoders=("llama",), template=_TEMPLATE, skipped=95, layer=-3),
        TextStates(encoders=("clip_text_model",), pooled=True, length=77, masked=False, padding="kept"),
    ),
    # What has not been distilled is guided by two calls.
    fresh={"guidance_embeds": False},
    published={"data.num_frames": 61, "data.height": 544, "data.width": 960, "text.length": 256},
    tiny={
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 3,
        "attention_head_dim": 12,
        "rope_axes_dim": (4, 4, 4),
    },
)
