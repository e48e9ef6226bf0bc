"""Cosmos 3: one clip packed behind its text, which looks at itself; grouped heads, and sound."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn

NUM_TEXT, FRAMES, PATCHES, NUM_SOUND = 7, 5, 15, 4


def cosmos3() -> nn.Module:
    from diffusers import Cosmos3OmniTransformer

    return randomize(
        Cosmos3OmniTransformer(
            head_dim=8,
            hidden_size=24,
            intermediate_size=32,
            latent_channel=4,
            patch_latent_dim=16,
            num_attention_heads=6,
            num_key_value_heads=3,
            num_hidden_layers=2,
            rope_axes_dim=(2, 1, 1),
            rope_theta=1000.0,
            sound_dim=5,
            sound_gen=True,
            timestep_scale=0.001,
            vocab_size=32,
        )
    )


def inputs(sound: bool = False) -> Inputs:
    """7 tokens of text, then 5 × 3 × 5 = 75 of the clip, whose first frame is given, and 4 of sound."""
    noisy, num_video = torch.arange(1, FRAMES), FRAMES * PATCHES
    length = NUM_TEXT + num_video + (NUM_SOUND if sound else 0)
    found: Inputs = {
        "input_ids": torch.arange(NUM_TEXT) * 3 % 32,
        "text_indexes": torch.arange(NUM_TEXT),
        "position_ids": torch.arange(length).expand(3, -1) // torch.tensor([[5], [1], [2]]),
        "und_len": NUM_TEXT,
        "sequence_length": length,
        "vision_tokens": [randn(1, 4, FRAMES, 6, 10)],
        "vision_token_shapes": [(FRAMES, 3, 5)],
        "vision_sequence_indexes": NUM_TEXT + torch.arange(num_video),
        "vision_mse_loss_indexes": NUM_TEXT + torch.arange(PATCHES, num_video),
        "vision_timesteps": torch.full(((FRAMES - 1) * PATCHES,), 700.0),
        "vision_noisy_frame_indexes": [noisy],
    }
    if sound:
        at = NUM_TEXT + num_video + torch.arange(NUM_SOUND)
        found |= {
            "sound_tokens": [randn(5, NUM_SOUND, seed=2)],
            "sound_token_shapes": [(NUM_SOUND, 1, 1)],
            "sound_sequence_indexes": at,
            "sound_mse_loss_indexes": at,
            "sound_timesteps": torch.full((NUM_SOUND,), 700.0),
            "sound_noisy_frame_indexes": [torch.arange(NUM_SOUND)],
        }
    return found


COSMOS3 = {
    "Cosmos 3": Case(cosmos3, inputs, ()),
    "Cosmos 3, sound": Case(cosmos3, lambda: inputs(sound=True), ()),
}
