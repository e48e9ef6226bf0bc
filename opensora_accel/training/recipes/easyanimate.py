"""EasyAnimate 5.1: a language model's states of a caption, of which the padding counts; no mask of the text.

Source: diffusers, EasyAnimatePipeline.
https://github.com/huggingface/diffusers/blob/main/src/diffusers/pipelines/easyanimate/pipeline_easyanimate.py
"""

from __future__ import annotations

from typing import Any

from opensora_accel.training.captions import TextStates
from opensora_accel.training.recipes.base import Recipe, Sizes

# Source: Qwen/Qwen2-VL-7B-Instruct, chat_template.json, of one message with text alone.
_TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def _derive(sizes: Sizes) -> dict[str, Any]:
    return {
        "in_channels": sizes.input_channels,
        "out_channels": sizes.channels,
        "text_embed_dim": sizes.texts[0].width,
        # Version 5 has a second encoder, which its pipeline in diffusers knows nothing of.
        "text_embed_dim_t5": None,
    }


RECIPE = Recipe(
    models=("EasyAnimateTransformer3DModel",),
    pipeline="EasyAnimatePipeline",
    call={"timestep": "timestep", "encoder_hidden_states": "text"},
    derive=_derive,
    text=(
        TextStates(
            encoders=("qwen2_vl", "qwen2_vl_text"),
            template=_TEMPLATE,
            layer=-2,
            padding="kept",
            padded_to=256,
        ),
    ),
    unused_text="transformer_blocks",
    # Its class has no default for it.
    fresh={"patch_size": 2},
    published={"data.num_frames": 49, "data.height": 512, "data.width": 512, "text.length": 256},
    tiny={
        "num_layers": 2,
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "time_embed_dim": 8,
    },
)
