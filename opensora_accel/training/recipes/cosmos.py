"""Cosmos-Predict 2.5 and 2: times of latent frames, and a channel of where frames are given.

2.5 takes all layers' states of a caption from a language model. 2 takes T5's, is told the frame rate, and its pipeline
walks along y = x + σ ε, from σ = 80 of noise ε, to the clip x. In other units both are the same flow: with
t = σ / (σ + 1), y / (σ + 1) is the point (1 − t) x + t ε, and what the model answers is its velocity. So a sample of 2
begins with 80 ε / 81.

Source: diffusers, Cosmos2_5_PredictBasePipeline and Cosmos2VideoToWorldPipeline
(https://github.com/huggingface/diffusers/blob/main/src/diffusers/pipelines/cosmos), the first with the scheduler of
scripts/convert_cosmos_to_diffusers.py; what it was trained with: nvidia-cosmos/cosmos-predict2.5,
cosmos_predict2/_src/predict2/models/text2world_model_rectified_flow.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opensora_accel.training.captions import TextStates
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.flow import TIMESTEPS
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes

# As a chat of Qwen2.5-VL has it.
_TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant who will provide prompts to an image generator.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n"
)
# The time of a latent frame that is given.
_GIVEN = 1e-4
# Of noise over clip, σ^(1/ρ) is even from where a sample begins to its last step (arXiv:2206.00364).
_RHO = 7


def _between(most: float, least: float) -> Callable[[int, float], Tensor]:
    """The times of a sample whose noise over clip, σ, is `most` at its beginning and `least` before its last step."""

    def times(num_steps: int, _alpha: float) -> Tensor:
        """[num_steps + 1] to 0, whatever the shift: t = σ / (σ + 1)."""
        roots = torch.tensor([most, least], dtype=torch.float64) ** (1 / _RHO)
        shares = torch.linspace(0, 1, num_steps, dtype=torch.float64)
        sigmas = (roots[0] + shares * (roots[1] - roots[0])) ** _RHO
        return torch.cat([sigmas / (sigmas + 1), torch.zeros(1, dtype=torch.float64)])

    return times


def _timestep(inputs: Inputs) -> Tensor:
    """Times in 0…1: [B]; or [B, 1, t, 1, 1] where latent frames are given."""
    times = inputs.timestep / TIMESTEPS
    if inputs.condition is None or inputs.condition.given is None:
        return times
    of_frames = torch.where(inputs.condition.given, _GIVEN, times[:, None])
    return of_frames[:, None, :, None, None]


def _padding(inputs: Inputs) -> Tensor | None:
    """[1, 1, h, w], zero: no side of a clip is padded. None for a model without that channel."""
    if not inputs.config["concat_padding_mask"]:
        return None
    return inputs.latents.new_zeros(1, 1, *inputs.latents.shape[3:])


def _derive_all(sizes: Sizes) -> dict[str, Any]:
    # Cosmos 1 learned places that are added, and Transfer sees pictures.
    return {
        "extra_pos_embed_type": None,
        "img_context_dim_in": None,
        "in_channels": sizes.input_channels,
        "out_channels": sizes.channels,
    }


def _derive_of_2(sizes: Sizes) -> dict[str, Any]:
    return {
        **_derive_all(sizes),
        "use_crossattn_projection": False,
        "text_embed_dim": sizes.texts[0].width,
    }


def _derive(sizes: Sizes) -> dict[str, Any]:
    return {
        **_derive_all(sizes),
        "use_crossattn_projection": True,
        # Captions are projected to the width that is attended to.
        "crossattn_proj_in_channels": sizes.texts[0].width,
        "encoder_hidden_states_channels": sizes.arguments["text_embed_dim"],
    }


def _check(sizes: Sizes) -> None:
    from diffusers.models.transformers import transformer_cosmos

    if sizes.arguments["concat_padding_mask"] and not hasattr(transformer_cosmos, "transforms"):
        raise ValueError(
            "a Cosmos that takes a mask of padding (concat_padding_mask), as what is published does, resizes it by "
            "torchvision, which is not installed; install the build of torchvision that fits this torch"
        )


_COSMOS = Recipe(
    models=("CosmosTransformer3DModel",),
    pipeline="Cosmos2_5_PredictBasePipeline",
    call={"timestep": _timestep, "encoder_hidden_states": "text", "padding_mask": _padding},
    derive=_derive,
    check=_check,
    frames=(Conditioning("latents", "latent frames", always=True, mask_alone=True),),
    text=(
        TextStates(
            encoders=("qwen2_5_vl", "qwen2_5_vl_text"),
            template=_TEMPLATE,
            layer="all",
            masked=False,
            padding="kept",
        ),
    ),
    times=_between(200.0, 0.01),
    # The channel of padding is zero in every pipeline.
    fresh={"concat_padding_mask": False, "rope_scale": (1.0, 3.0, 3.0)},
    published={
        "data.num_frames": 93,
        "data.height": 704,
        "data.width": 1280,
        "text.length": 512,
        "flow.shift": 5.0,
    },
    tiny={
        "num_layers": 2,
        "num_attention_heads": 3,
        "attention_head_dim": 12,
        "mlp_ratio": 1.0,
        "text_embed_dim": 24,
        "adaln_lora_dim": 4,
        "max_size": (32, 64, 64),
    },
)

PREDICT_2 = replace(
    _COSMOS,
    pipeline="Cosmos2VideoToWorldPipeline",
    is_for=lambda arguments: not arguments.get("use_crossattn_projection", True),
    call=dict(_COSMOS.call) | {"fps": "frame_rate"},
    derive=_derive_of_2,
    text=(TextStates(padded_to=512),),
    # Its pipeline ends before the last step, where the noise is 0.002 of the clip.
    times=_between(80.0, 0.002),
    begins_at_first_time=True,
    takes_frame_rate=True,
    # The noise of 24 latent frames is 24 ** 0.5 times that of a picture (nvidia-cosmos/cosmos-predict2,
    # cosmos_predict2/models/video2world_model.py, adjust_video_noise).
    published=dict(_COSMOS.published) | {"data.frame_rate": 16.0, "flow.shift": 4.899},
    tiny={name: value for name, value in _COSMOS.tiny.items() if name != "text_embed_dim"}
    | {"use_crossattn_projection": False},
)

RECIPE = replace(_COSMOS, variants=(PREDICT_2,))
