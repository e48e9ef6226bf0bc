"""CogVideoX: noise levels in place of times, frames before channels, and captions of which the padding counts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opensora_accel.training.captions import TextStates
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.levels import NoiseLevels
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes


def _rotary(inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [t·h·w, head dim] of the patches' positions, where the model takes them (5B, 1.5).

    Positions are those of the published size: 1.0 squeezes the grid of a clip into it, 1.5 takes a part of it.
    """
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    config = inputs.config
    if not config["use_rotary_positional_embeddings"]:
        return None
    patch, patch_t = config["patch_size"], config["patch_size_t"]
    num_frames, height, width = inputs.latents.shape[2:]
    grid = height // patch, width // patch
    known = config["sample_height"] // patch, config["sample_width"] // patch
    sizes: dict[str, Any]
    if patch_t is None:
        sizes = {
            "crops_coords": get_resize_crop_region_for_grid(grid, known[1], known[0]),
            "temporal_size": num_frames,
        }
    else:
        sizes = {
            "crops_coords": None,
            "temporal_size": num_frames // patch_t,
            "grid_type": "slice",
            "max_size": known,
        }
    tables: Any = get_3d_rotary_pos_embed(
        config["attention_head_dim"], grid_size=grid, device=inputs.latents.device, **sizes
    )
    return tables


def _ofs(inputs: Inputs) -> Tensor | None:
    """What 1.5 takes besides the time where it begins with a frame; always 2."""
    return None if inputs.config["ofs_embed_dim"] is None else inputs.latents.new_full((1,), 2.0)


def _derive(sizes: Sizes) -> dict[str, Any]:
    return {
        "in_channels": sizes.input_channels,
        "out_channels": sizes.channels,
        "text_embed_dim": sizes.texts[0].width,
        # Its captions are as long as its positions, of which the padding has some too.
        "max_text_seq_length": sizes.texts[0].length,
        "temporal_compression_ratio": sizes.temporal,
    }


RECIPE = Recipe(
    models=("CogVideoXTransformer3DModel",),
    pipeline="CogVideoXPipeline",
    call={
        "encoder_hidden_states": "text",
        "timestep": "timestep",
        "image_rotary_emb": _rotary,
        "ofs": _ofs,
    },
    derive=_derive,
    layout="frames",
    frames=(Conditioning("channels"),),
    text=(TextStates(masked=False, padding="kept"),),
    levels=NoiseLevels(0.00085, 0.012),
    published={
        "data.num_frames": 49,
        "data.height": 480,
        "data.width": 720,
        "text.length": 226,
        "flow.time_distribution": "uniform",
    },
    tiny={
        "num_layers": 2,
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "time_embed_dim": 8,
    },
)
