"""Wan 2.1 and 2.2, and what is built as they are: VACE, ChronoEdit, and SkyReels-V2 with times of latent frames.

Source: diffusers, WanPipeline, WanVACEPipeline and SkyReelsV2DiffusionForcingPipeline
(https://github.com/huggingface/diffusers/blob/main/src/diffusers/pipelines/skyreels_v2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from opensora_accel.training.classes import arguments_of
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.pictures import PictureStates
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes, patches_of
from opensora_accel.training.recipes.rows import Arguments, RowOf, joined, lengths
from shardformer import packing


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


def _join(model: nn.Module, calls: Sequence[Arguments]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row of patches, each token with its time."""
    patch, shapes = patches_of(arguments_of(model)), _shapes(calls)
    constant = {"return_dict", "enable_diffusion_forcing"} & calls[0].keys()
    row = {name: calls[0][name] for name in constant} | joined(calls, {"encoder_hidden_states": 1})
    row["hidden_states"] = packing.to_row([call["hidden_states"].squeeze(0) for call in calls], patch)
    row["timestep"] = packing.per_token([call["timestep"] for call in calls], shapes, patch)
    return row, {"hidden_states": shapes, "encoder_hidden_states": lengths(calls, "encoder_hidden_states")}


def _part(model: nn.Module, answers: Sequence[Tensor], calls: Sequence[Arguments]) -> list[list[Tensor]]:
    clips = packing.to_clips(answers[0], _shapes(calls), patches_of(arguments_of(model)))
    return [[clip.unsqueeze(0)] for clip in clips]


def _shapes(calls: Sequence[Arguments]) -> list[tuple[int, int, int]]:
    return [tuple(call["hidden_states"].shape[2:]) for call in calls]


def _refuses(config: Any, _arguments: Arguments) -> str:
    if config.image.is_used:
        return (
            "image.path: the states of a picture have no place of their own among those of a row's captions"
        )
    return ""


RECIPE = Recipe(
    models=("WanTransformer3DModel",),
    pipeline="WanPipeline",
    call={
        "timestep": "token_timestep",
        "encoder_hidden_states": "text",
        "encoder_hidden_states_image": "pictures",
    },
    derive=_derive,
    row=RowOf(_join, _part, _refuses),
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
    row=None,
    pictures=None,
    frames=(Conditioning("branch", others="grey", always=True),),
    tiny=dict(RECIPE.tiny) | {"vace_layers": [0, 1]},
)


def _is_forced(inputs: Inputs) -> bool | None:
    """Whether latent frames have times of their own; None where they have not."""
    return inputs.frame_timestep.dim() == 2 or None


def _refuses_unforced(config: Any, arguments: Arguments) -> str:
    if not config.flow.is_forced:
        return "flow.diffusion_forcing none: without it a call of this model has one time for all tokens"
    if (arguments.get("num_frame_per_block") or 1) > 1:
        return "num_frame_per_block: the model's own mask of blocks knows nothing of a row's clips"
    if arguments.get("inject_sample_info"):
        return "inject_sample_info: the frame rate is told once for each clip, not for each token"
    return _refuses(config, arguments)


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
    row=RowOf(_join, _part, _refuses_unforced),
    call=dict(RECIPE.call)
    | {"timestep": "frame_timestep", "enable_diffusion_forcing": _is_forced, "fps": _fps},
    takes_forcing=True,
    takes_frame_rate=True,
    published={"data.num_frames": 97, "data.height": 544, "data.width": 960, "text.length": 512},
)
