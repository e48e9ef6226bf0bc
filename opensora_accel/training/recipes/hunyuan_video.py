"""HunyuanVideo: a language model's states of a caption and CLIP's of the whole; guidance that the model is told.

Two kinds of its weights begin every clip with its first frame, which the language model sees too (`llava`). They differ
in how the model itself is given it (`image_condition_type`):

    token_replace    in the place of the first latent frame, to which the model gives time 0; a step moves the others
    latent_concat    behind the noisy latents, with a channel that is 1 where it stands: 16 + 16 + 1 channels

A sample begins with 0.999 of noise and 0.001 of the frame in every latent frame, whereas times begin with noise alone.

Source: diffusers, HunyuanVideoPipeline and HunyuanVideoImageToVideoPipeline
(https://github.com/huggingface/diffusers/blob/main/src/diffusers/pipelines/hunyuan_video).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opensora_accel.training.captions import InTemplate, TextStates
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes

_ASPECTS = (
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
)
# Source: Tencent/HunyuanVideo, hyvideo/constants.py, PROMPT_TEMPLATE_ENCODE_VIDEO.
_TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    f"{_ASPECTS}<|start_header_id|>user<|end_header_id|>\n\n{{}}<|eot_id|>"
)
# Source: Tencent-Hunyuan/HunyuanVideo-I2V, hyvideo/constants.py, PROMPT_TEMPLATE_ENCODE_VIDEO_I2V.
_TEMPLATE_OF_FRAME = (
    "<|start_header_id|>system<|end_header_id|>\n\n<image>\nDescribe the video by detailing the following aspects "
    f"according to the reference image: {_ASPECTS}\n\n<|start_header_id|>user<|end_header_id|>\n\n{{}}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
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
    }


_FROM_TEXT = Recipe(
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


def _from_frame(kind: str, conditioning: Conditioning, step: int) -> Recipe:
    """That of weights of one `image_condition_type`, which see every so manieth state of the first frame."""
    picture = InTemplate("<image>", step, step_of_empty=2, end_of_mark="<|end_header_id|>", mark_length=4)
    llava, clip = _FROM_TEXT.text
    return replace(
        _FROM_TEXT,
        pipeline="HunyuanVideoImageToVideoPipeline",
        is_for=lambda arguments: arguments.get("image_condition_type") == kind,
        text=(
            replace(llava, encoders=("llava",), template=_TEMPLATE_OF_FRAME, skipped=103, picture=picture),
            clip,
        ),
        frames=(conditioning,),
        frame_in_noise=0.001,
        published=dict(_FROM_TEXT.published)
        | {"data.num_frames": 129, "data.height": 720, "data.width": 1280},
        tiny=dict(_FROM_TEXT.tiny) | {"image_condition_type": kind},
    )


IN_PLACE = _from_frame("token_replace", Conditioning("latents", always_first=True), step=4)
IN_CHANNELS = _from_frame(
    "latent_concat", Conditioning("channels", "latent frames", always_first=True), step=2
)

RECIPE = replace(_FROM_TEXT, variants=(IN_PLACE, IN_CHANNELS))
