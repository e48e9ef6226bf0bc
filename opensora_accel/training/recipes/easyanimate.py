"""EasyAnimate 5.1: a language model's states of a caption, of which the padding counts; no mask of the text.

Weights that begin with frames ("-InP") are told of these apart from the noisy clip, behind which the model puts them:

    given        0    · · · ·    · · · ·     noise on its pixels, black in the place of the others, encoded as a clip
    mask         1    |    0     |    0      one channel before it, times the VAE's factor

Weights that follow a control ("-Control") are told of that one whole, and behind it of a picture, in its first latent
frame: the first frame, or a reference.

Source: diffusers, EasyAnimatePipeline, EasyAnimateInpaintPipeline and EasyAnimateControlPipeline
(https://github.com/huggingface/diffusers/blob/main/src/diffusers/pipelines/easyanimate).
"""

from __future__ import annotations

from typing import Any

from opensora_accel.training.captions import TextStates
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.recipes.base import Recipe, Sizes

# Source: Qwen/Qwen2-VL-7B-Instruct, chat_template.json, of one message with text alone.
_TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def _check(sizes: Sizes) -> None:
    has_mask = sizes.input_channels == 2 * sizes.channels + 1
    if has_mask and not sizes.arguments["resize_inpaint_mask_directly"]:
        raise ValueError(
            "resize_inpaint_mask_directly is False, by which a model takes masks that the VAE has encoded, and this "
            "trainer makes those that are resized, as of EasyAnimate 5.1; choose weights of 5.1, or leave all of "
            "conditions but t2v out"
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
    # A control is given by the same argument: behind the noisy clip its pipeline's, `control_latents`, does no other.
    call={"timestep": "timestep", "encoder_hidden_states": "text", "inpaint_latents": "apart"},
    derive=_derive,
    check=_check,
    frames=(
        Conditioning(
            "channels", "middle frames", others="black", apart=True, noise_if="add_noise_in_inpaint_model"
        ),
        Conditioning("channels", apart=True, of_control=True),
    ),
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
