"""Kandinsky 5: a clip with channels last, a language model's states of its caption, and CLIP's of the whole."""

from __future__ import annotations

import html
from typing import Any

import torch
from torch import Tensor

from opensora_accel.training.captions import TextStates
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes

# Source: kandinskylab/kandinsky-5, kandinsky/models/text_embedders.py, its spelling included.
_TEMPLATE = "\n".join(
    [
        "<|im_start|>system\nYou are a prompt engineer. Describe the video in detail.",
        "Describe how the camera moves or shakes, describe the zoom and view angle, whether it follows the objects.",
        "Describe the location of the video, main characters or objects and their action.",
        "Describe the dynamism of the video and presented actions.",
        "Name the visual style of the video: whether it is a professional footage, user generated content, some kind "
        "of animation, video game or scren content.",
        "Describe the visual effects, postprocessing and transitions if they are presented in the video.",
        "Pay attention to the order of key actions shown in the scene.<|im_end|>",
        "<|im_start|>user\n{}<|im_end|>",
    ]
)
# Pixels of a side, between which a clip is one of 480p.
_LOW, _HIGH = 480, 854
# Rows of its tables of positions, of patches along each side and of text.
_MOST_PATCHES, _MOST_TOKENS = 128, 1024


def _reads(caption: str) -> str:
    """The caption as its pipeline cleans it: on one line, without HTML's escapes."""
    return " ".join(html.unescape(html.unescape(caption)).split())


def _numbers(inputs: Inputs, count: int, most: int, what: str) -> Tensor:
    """[count]: places from 0 on.

    Raises:
        ValueError: the model has fewer. On a GPU that would end the process.
    """
    if count > most:
        raise ValueError(f"the model has positions for {most} {what}, and there are {count}")
    return torch.arange(count, device=inputs.latents.device)


def _places(inputs: Inputs) -> tuple[Tensor, ...]:
    """Numbers of the patches along time, height and width."""
    return tuple(_numbers(inputs, count, _MOST_PATCHES, "patches a side") for count in inputs.grid)


def _scale(inputs: Inputs) -> tuple[float, float, float]:
    """What places are divided by: a clip of 768 pixels spans as much as one of 480."""
    sides = [inputs.spatial * size for size in inputs.latents.shape[3:]]
    return (1.0, 2.0, 2.0) if all(_LOW <= side <= _HIGH for side in sides) else (1.0, 3.16, 3.16)


def _derive(sizes: Sizes) -> dict[str, Any]:
    return {
        "in_visual_dim": sizes.channels,
        "out_visual_dim": sizes.channels,
        "in_text_dim": sizes.texts[0].width,
        "in_text_dim2": sizes.texts[1].width,
        # As all that makes clips.
        "visual_cond": True,
    }


def _check(sizes: Sizes) -> None:
    kind = sizes.arguments["attention_type"]
    if kind != "regular":
        raise ValueError(
            f"the model attends to blocks that it chooses (attention_type is {kind!r}, as for clips of 10 seconds), "
            "which cannot be trained here; choose the one of 5 seconds"
        )


RECIPE = Recipe(
    models=("Kandinsky5Transformer3DModel",),
    pipeline="Kandinsky5T2VPipeline",
    call={
        "encoder_hidden_states": "text",
        "timestep": "timestep",
        "pooled_projections": lambda inputs: inputs.text_2.squeeze(1),
        "visual_rope_pos": _places,
        "text_rope_pos": lambda inputs: _numbers(inputs, inputs.text.size(1), _MOST_TOKENS, "tokens of text"),
        "scale_factor": _scale,
    },
    derive=_derive,
    check=_check,
    layout="channels last",
    frames=(Conditioning("latents", "latent frames", always=True),),
    text=(
        TextStates(encoders=("qwen2_5_vl", "qwen2_5_vl_text"), template=_TEMPLATE, reads=_reads, skipped=128),
        TextStates(encoders=("clip_text_model",), reads=_reads, pooled=True, length=77),
    ),
    num_heads=lambda config: config["model_dim"] // sum(config["axes_dims"]),
    # It has no mask of text.
    packs=True,
    published={
        "data.num_frames": 121,
        "data.height": 512,
        "data.width": 768,
        "text.length": 512,
        "lora.targets": (
            "to_query",
            "to_key",
            "to_value",
            "self_attention.out_layer",
            "cross_attention.out_layer",
        ),
    },
    tiny={
        "num_text_blocks": 1,
        "num_visual_blocks": 2,
        "model_dim": 36,
        "time_dim": 16,
        "ff_dim": 32,
        "axes_dims": (4, 4, 4),
    },
)
