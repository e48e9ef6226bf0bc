"""Cosmos-Predict 2.5: times of latent frames, a channel of where frames are given, and all layers' states of a caption.

Source: diffusers, Cosmos2_5_PredictBasePipeline
(https://github.com/huggingface/diffusers/blob/main/src/diffusers/pipelines/cosmos/pipeline_cosmos2_5_predict.py), with
the scheduler of scripts/convert_cosmos_to_diffusers.py; what it was trained with: nvidia-cosmos/cosmos-predict2.5,
cosmos_predict2/_src/predict2/models/text2world_model_rectified_flow.py.
"""

from __future__ import annotations

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
# Noise over clip, σ, where a sample begins and before its last step; σ^(1/ρ) is even between them (arXiv:2206.00364).
_MOST, _LEAST, _RHO = 200.0, 0.01, 7


def _times(num_steps: int, _alpha: float) -> Tensor:
    """[num_steps + 1] from 200/201 to 0, whatever the shift: t = σ / (σ + 1)."""
    roots = torch.tensor([_MOST, _LEAST], dtype=torch.float64) ** (1 / _RHO)
    shares = torch.linspace(0, 1, num_steps, dtype=torch.float64)
    sigmas = (roots[0] + shares * (roots[1] - roots[0])) ** _RHO
    return torch.cat([sigmas / (sigmas + 1), torch.zeros(1, dtype=torch.float64)])


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


def _derive(sizes: Sizes) -> dict[str, Any]:
    return {
        "use_crossattn_projection": True,
        "img_context_dim_in": None,
        "in_channels": sizes.input_channels,
        "out_channels": sizes.channels,
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


RECIPE = Recipe(
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
    times=_times,
    # The channel of padding is zero in every pipeline.
    fresh={"concat_padding_mask": False, "extra_pos_embed_type": None, "rope_scale": (1.0, 3.0, 3.0)},
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
