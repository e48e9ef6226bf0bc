"""Cosmos 3: clips packed behind their text, which looks at itself alone; grouped heads; sound and actions."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn

NUM_TEXT = 7
CLIP, SECOND = (5, 3, 5), (2, 2, 3)
"""Frames, and patches of 2 × 2 along height and width."""
NUM_SOUND, NUM_ACTION = 4, 3


def cosmos3(omni: bool = False) -> nn.Module:
    """`omni`: all modalities, and the norms and activation of the other backbone."""
    from diffusers import Cosmos3OmniTransformer

    return randomize(
        Cosmos3OmniTransformer(
            head_dim=8,
            hidden_size=24,
            intermediate_size=32,
            latent_channel=4,
            patch_latent_dim=16,
            num_attention_heads=3,
            num_key_value_heads=1,
            num_hidden_layers=2,
            rope_axes_dim=(2, 1, 1),
            rope_theta=1000.0,
            vocab_size=32,
            sound_gen=omni,
            sound_dim=5,
            action_gen=omni,
            action_dim=6,
            num_embodiment_domains=3,
            hidden_act="relu2" if omni else "silu",
            qk_norm_for_text=not omni,
            use_und_k_norm_for_gen=omni,
        )
    )


def inputs(omni: bool = False) -> Inputs:
    """7 tokens of text, then 5 × 3 × 5 = 75 of a clip, whose first frame is given.

    With `omni` a second clip, sound and an action, 19 tokens; and the loss is of a token of the text too.
    """
    clips = [CLIP, SECOND] if omni else [CLIP]
    starts, at = [], NUM_TEXT
    for frames, height, width in clips:
        starts.append(at)
        at += frames * height * width
    noisy = [
        torch.arange(start + height * width, start + frames * height * width)
        for start, (frames, height, width) in zip(starts, clips, strict=True)
    ]
    sound, action = at + torch.arange(NUM_SOUND), at + NUM_SOUND + torch.arange(NUM_ACTION)
    length = at + NUM_SOUND + NUM_ACTION if omni else at
    found: Inputs = {
        "input_ids": torch.arange(NUM_TEXT) * 3 % 32,
        "text_indexes": torch.arange(NUM_TEXT),
        "position_ids": torch.arange(length).expand(3, -1) // torch.tensor([[5], [1], [2]]),
        "und_len": NUM_TEXT,
        "sequence_length": length,
        "vision_tokens": [
            randn(1, 4, frames, 2 * height, 2 * width, seed=frames) for frames, height, width in clips
        ],
        "vision_token_shapes": clips,
        "vision_sequence_indexes": torch.arange(NUM_TEXT, at),
        "vision_mse_loss_indexes": torch.cat(noisy),
        "vision_timesteps": torch.full((sum(map(len, noisy)),), 700.0),
        "vision_noisy_frame_indexes": [torch.arange(1, frames) for frames, _height, _width in clips],
    }
    if omni:
        found |= {
            "sound_tokens": [randn(5, NUM_SOUND, seed=3)],
            "sound_token_shapes": [(NUM_SOUND, 1, 1)],
            "sound_sequence_indexes": sound,
            "sound_mse_loss_indexes": torch.cat([torch.tensor([3]), sound[1:]]),
            "sound_timesteps": torch.full((NUM_SOUND,), 300.0),
            "sound_noisy_frame_indexes": [torch.arange(NUM_SOUND)],
            "action_tokens": [randn(NUM_ACTION, 6, seed=4)],
            "action_token_shapes": [(NUM_ACTION, 1, 1)],
            "action_sequence_indexes": action,
            "action_mse_loss_indexes": action,
            "action_timesteps": torch.full((NUM_ACTION,), 500.0),
            "action_noisy_frame_indexes": [torch.arange(NUM_ACTION)],
            "action_domain_ids": [torch.tensor(1)],
        }
    return found


COSMOS3 = {
    "Cosmos 3": Case(cosmos3, inputs, ("vision_tokens",)),
    "Cosmos 3, sound and action": Case(
        lambda: cosmos3(omni=True),
        lambda: inputs(omni=True),
        ("vision_tokens", "sound_tokens", "action_tokens"),
    ),
}
