"""SANA-Video: what a language model thinks of a caption that it is asked to describe at length; a mask of the text."""

from __future__ import annotations

from opensora_accel.training.captions import TextStates
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.recipes.base import Recipe, derive_projected

# Source: diffusers, SanaVideoPipeline.__call__, complex_human_instruction.
_TEMPLATE = "\n".join(
    [
        "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for "
        "video generation. Evaluate the level of detail in the user prompt:",
        "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, motion, and "
        "temporal relationships to create vivid and dynamic scenes.",
        "- If the prompt is already detailed, refine and enhance the existing details slightly without "
        "overcomplicating.",
        "Here are examples of how to transform or refine prompts:",
        "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat slowly settling into a curled position, "
        "peacefully falling asleep on a warm sunny windowsill, with gentle sunlight filtering through surrounding "
        "pots of blooming red flowers.",
        "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
        "lamps gradually lighting up, a diverse crowd of people in colorful clothing walking past, and a "
        "double-decker bus smoothly passing by towering glass skyscrapers.",
        "Please generate only the enhanced description for the prompt below and avoid including any additional "
        "commentary or evaluations:",
        "User Prompt: {}",
    ]
)


RECIPE = Recipe(
    models=("SanaVideoTransformer3DModel",),
    pipeline="SanaVideoPipeline",
    call={
        "timestep": "token_timestep",
        "encoder_hidden_states": "text",
        "encoder_attention_mask": "text_mask",
    },
    derive=derive_projected,
    frames=(Conditioning("latents"),),
    text=(
        TextStates(
            encoders=("gemma2",),
            template=_TEMPLATE,
            reads=lambda caption: caption.lower().strip(),
            is_empty_alone=True,
            skipped=None,
            keeps_first=True,
        ),
    ),
    published={"data.num_frames": 81, "data.height": 480, "data.width": 832, "text.length": 300},
    tiny={
        "num_layers": 2,
        "num_attention_heads": 3,
        "attention_head_dim": 12,
        "num_cross_attention_heads": 3,
        "cross_attention_head_dim": 12,
        "rope_max_seq_len": 32,
    },
)
