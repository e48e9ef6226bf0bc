"""Allegro: the noise is answered, at levels of noise; places that are looked up in tables; a mask of the text.

Source: diffusers, AllegroPipeline.
https://github.com/huggingface/diffusers/blob/main/src/diffusers/pipelines/allegro/pipeline_allegro.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opensora_accel.training.captions import TextStates
from opensora_accel.training.levels import NoiseLevels
from opensora_accel.training.recipes.base import Inputs, Recipe, derive_projected


def _rotary(inputs: Inputs) -> tuple[tuple[tuple[Tensor, Tensor], ...], tuple[Tensor, ...]]:
    """Cosines and sines [places, head dim / 3] along time, height and width; the patches' places [1, t·h·w] there."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    config = inputs.config
    of_time, down, across = inputs.grid
    found: Any = get_3d_rotary_pos_embed_allegro(
        config["attention_head_dim"],
        crops_coords=((0, 0), (down, across)),
        grid_size=(down, across),
        temporal_size=of_time,
        interpolation_scale=tuple(config[f"interpolation_scale_{each}"] for each in "thw"),
        device=inputs.latents.device,
    )
    *tables, time, height, width = found
    places = torch.meshgrid(time.long(), height.long(), width.long(), indexing="ij")
    return tuple(tables), tuple(each.reshape(1, -1) for each in places)


RECIPE = Recipe(
    models=("AllegroTransformer3DModel",),
    pipeline="AllegroPipeline",
    call={
        "encoder_hidden_states": "text",
        "timestep": "timestep",
        "encoder_attention_mask": "text_mask",
        "image_rotary_emb": _rotary,
    },
    derive=derive_projected,
    text=(TextStates(reads=lambda caption: caption.lower().strip()),),
    # Those of DDPMScheduler, with which it was trained (rhymes-ai/Allegro, train.py).
    levels=NoiseLevels(0.0001, 0.02, grows="beta", answer="noise"),
    published={
        "data.num_frames": 88,
        "data.height": 720,
        "data.width": 1280,
        "text.length": 512,
        "flow.time_distribution": "uniform",
    },
    tiny={"num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 12},
)
