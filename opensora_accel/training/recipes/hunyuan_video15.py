"""HunyuanVideo 1.5: a language model's states of a caption, the letters of what it has in quotes, and a picture's."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from opensora_accel import observe
from opensora_accel.training.captions import TextStates
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.pictures import PictureStates
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes

# Source: Tencent-Hunyuan/HunyuanVideo-1.5, hyvideo/models/text_encoders/__init__.py, its blanks included.
_BLANKS = " " * 8
_TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant. Describe the video by detailing the following aspects: "
    f"{_BLANKS}1. The main content and theme of the video. "
    f"{_BLANKS}2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects. "
    f"{_BLANKS}3. Actions, events, behaviors temporal relationships, physical movement changes of the objects. "
    f"{_BLANKS}4. background environment, light, style and atmosphere. "
    f"{_BLANKS}5. camera angles, movements, and transitions used in the video.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
# States of a picture, of which a clip from text has none.
_PICTURE_STATES = 729


def _quoted(caption: str) -> str | None:
    """What is to be read in the clip, of 'a sign "OPEN"' the text 'Text "OPEN". '; None where nothing is."""
    texts = dict.fromkeys(straight or curly for straight, curly in re.findall(r'"(.*?)"|“(.*?)”', caption))
    return ". ".join(f'Text "{text}"' for text in texts) + ". " if texts else None


def _picture(inputs: Inputs) -> Tensor:
    if inputs.pictures is not None:
        return inputs.pictures
    latents = inputs.latents
    size = len(latents), _PICTURE_STATES, inputs.config["image_embed_dim"]
    # Not new_zeros: a model without memory is to know that they are zero.
    return torch.zeros(size, dtype=latents.dtype, device=latents.device)


def _derive(sizes: Sizes) -> dict[str, Any]:
    return {
        "in_channels": sizes.input_channels,
        "out_channels": sizes.channels,
        "text_embed_dim": sizes.texts[0].width,
        "text_embed_2_dim": sizes.texts[1].width,
        "image_embed_dim": sizes.picture_width or sizes.arguments["image_embed_dim"],
        "task_type": "i2v" if sizes.picture_width else "t2v",
        # Other weights take steps from one time to another.
        "use_meanflow": False,
    }


RECIPE = Recipe(
    models=("HunyuanVideo15Transformer3DModel",),
    pipeline="HunyuanVideo15Pipeline",
    call={
        # In whose type it embeds it.
        "timestep": lambda inputs: inputs.timestep.to(inputs.latents),
        "encoder_hidden_states": "text",
        "encoder_attention_mask": "text_mask",
        "encoder_hidden_states_2": "text_2",
        "encoder_attention_mask_2": "text_mask_2",
        "image_embeds": _picture,
    },
    derive=_derive,
    # One batch is either from frames or from text.
    pictures=PictureStates("siglip_vision_model", layer=None, of_all=True),
    frames=(Conditioning("channels", "latent frames", always=True),),
    text=(
        TextStates(
            encoders=("qwen2_5_vl_text",),
            template=_TEMPLATE,
            reads=lambda caption: caption or " ",
            skipped=108,
            layer=-3,
        ),
        TextStates(reads=_quoted, length=256),
    ),
    unused_text="transformer_blocks",
    # It chooses tokens by masks, and looks whether there is a picture.
    without_memory=lambda: observe.FakeFloats(),
    published={
        "data.num_frames": 121,
        "data.height": 480,
        "data.width": 848,
        "text.length": 1000,
        "flow.shift": 5.0,
    },
    tiny={
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 3,
        "attention_head_dim": 12,
        "image_embed_dim": 8,
        "rope_axes_dim": (4, 4, 4),
    },
)
