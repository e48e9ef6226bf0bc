"""Wan 2.1 and 2.2, and what is built as they are: VACE, ChronoEdit, and SkyReels-V2 with times of latent frames.

Source: diffusers, WanPipeline, WanVACEPipeline and SkyReelsV2DiffusionForcingPipeline
(https://github.com/huggingface/diffusers/blob/main/src/diffusers/pipelines/skyreels_v2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.pictures import PictureStates
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes


def _derive(sizes: Sizes) -> dict[str, Any]:
    # States of pictures are projected to the width of the transformer.
    width = sizes.arguments["num_attention_heads"] * sizes.arguments["attention_head_dim"]
    return {
        "in_channels": sizes.input_channels,
        "out_channels": sizes.channels,
        "text_dim": sizes.texts[0].width,
        "image_dim": sizes.picture_width,
        "added_kv_proj_dim": None if sizes.picture_width is None else width,
    }


RECIPE = Recipe(
    models=("WanTransformer3DModel",),
    pipeline="WanPipeline",
    call={
        "timestep": "token_timestep",
        "encoder_hidden_states": "text",
        "encoder_hidden_states_image": "pictures",
    },
    derive=_derive,
    # The last 512 of all tokens are the text's, and the others the picture's.
    pictures=PictureStates(text_length=512),
    frames=(
        Conditioning("channels", "frames", others="grey"),
        # 2.2 5B.
        Conditioning("latents"),
    ),
    published={"data.num_frames": 81, "data.height": 480, "data.width": 832, "text.length": 512},
    tiny={
        "num_layers": 2,
        "num_attention_heads": 3,
        "attention_head_dim": 12,
        "ffn_dim": 32,
        "freq_dim": 32,
        "rope_max_seq_len": 32,
    },
)

LIKE_WAN = replace(RECIPE, models=("ChronoEditTransformer3DModel",), frames=RECIPE.frames[:1])


def _derive_vace(sizes: Sizes) -> dict[str, Any]:
    return {
        "in_channels": sizes.channels,
        "out_channels": sizes.channels,
        "text_dim": sizes.texts[0].width,
        # What is kept, what is to be made, and the mask of each pixel.
        "vace_in_channels": 2 * sizes.channels + sizes.spatial**2,
    }


# Its branch counts once: `control_hidden_states_scale` is left out.
VACE = replace(
    RECIPE,
    models=("WanVACETransformer3DModel",),
    pipeline="WanVACEPipeline",
    call={"timestep": "timestep", "encoder_hidden_states": "text", "control_hidden_states": "apart"},
    derive=_derive_vace,
    pictures=None,
    frames=(Conditioning("branch", others="grey", always=True),),
    tiny=dict(RECIPE.tiny) | {"vace_layers": [0, 1]},
)


def _is_forced(inputs: Inputs) -> bool | None:
    """Whether latent frames have times of their own; None where they have not."""
    return inputs.frame_timestep.dim() == 2 or None


def _fps(inputs: Inputs) -> list[int] | None:
    """The embedding of the frame rate: 0 of 16 a second, 1 of any other; None of a model without."""
    if not inputs.config.get("inject_sample_info"):
        return None
    # One for all clips: the model adds no number of each clip to times of each frame (diffusers 0.42).
    return [0 if round(inputs.frame_rate) == 16 else 1]


SKYREELS_V2 = replace(
    RECIPE,
    models=("SkyReelsV2Transformer3DModel",),
    pipeline="SkyReelsV2DiffusionForcingPipeline",
    call=dict(RECIPE.call)
    | {"timestep": "frame_timestep", "enable_diffusion_forcing": _is_forced, "fps": _fps},
    takes_forcing=True,
    takes_frame_rate=True,
    published={"data.num_frames": 97, "data.height": 544, "data.width": 960, "text.length": 512},
)
