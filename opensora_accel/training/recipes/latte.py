"""Latte: frames that are encoded one by one, of which there are as many as the model was made for; noise and variance.

Source: diffusers, LattePipeline (https://github.com/huggingface/diffusers/blob/main/src/diffusers/pipelines/latte);
its levels: Vchitect/Latte, configs/t2x/t2v_sample.yaml.
"""

from __future__ import annotations

from typing import Any

from opensora_accel.training.captions import TextStates
from opensora_accel.training.levels import NoiseLevels
from opensora_accel.training.recipes.base import Recipe, Sizes


def _derive(sizes: Sizes) -> dict[str, Any]:
    return {
        "in_channels": sizes.input_channels,
        # The noise, and behind it how far each step of a sample may vary.
        "out_channels": 2 * sizes.channels,
        "caption_channels": sizes.texts[0].width,
        "cross_attention_dim": sizes.arguments["num_attention_heads"] * sizes.arguments["attention_head_dim"],
    }


RECIPE = Recipe(
    models=("LatteTransformer3DModel",),
    pipeline="LattePipeline",
    call={"timestep": "timestep", "encoder_hidden_states": "text"},
    derive=_derive,
    text=(TextStates(reads=lambda caption: caption.lower().strip(), padding="as the caption"),),
    levels=NoiseLevels(0.0001, 0.02, grows="beta", answer="noise and variance"),
    # It has no mask of the text.
    packs=True,
    # As maxin-cn/Latte-1 has them; its class's defaults make a model that cannot be called.
    fresh={
        "patch_size": 2,
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
    },
    published={
        "data.num_frames": 16,
        "data.height": 512,
        "data.width": 512,
        "text.length": 120,
        "flow.time_distribution": "uniform",
    },
    tiny={
        "num_layers": 2,
        "num_attention_heads": 3,
        "attention_head_dim": 12,
        "sample_size": 8,
        "video_length": 5,
    },
)
