"""Wan 2.1 and 2.2, and what is built as they are: SkyReels-V2, ChronoEdit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.pictures import PictureStates
from opensora_accel.training.recipes.base import Recipe, Sizes


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
        Conditioning("channels", "frames", in_grey=True),
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

LIKE_WAN = replace(
    RECIPE,
    models=("SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel"),
    frames=RECIPE.frames[:1],
)
