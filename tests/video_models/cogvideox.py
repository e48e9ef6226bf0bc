"""CogVideoX: text first in one joint sequence, rotary positions given from outside."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn


def cogvideox(patch_size_t: int | None = None, head_dim: int = 8) -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    return randomize(
        CogVideoXTransformer3DModel(
            num_attention_heads=3,
            attention_head_dim=head_dim,
            in_channels=4,
            out_channels=4,
            time_embed_dim=12,
            text_embed_dim=16,
            num_layers=2,
            sample_width=10,
            sample_height=6,
            sample_frames=17,
            patch_size=2,
            patch_size_t=patch_size_t,
            temporal_compression_ratio=4,
            max_text_seq_length=7,
            use_rotary_positional_embeddings=True,
            patch_bias=patch_size_t is None,
        )
    )


def inputs(frames: int = 5) -> Inputs:
    """Patches of 2 × 2: 75 tokens for 5 frames (of 2 × 2 × 2: 45 for 6), and 7 of text."""
    positions = randn(75 if frames == 5 else 45, 8, seed=4)
    return {
        "hidden_states": randn(2, frames, 4, 6, 10),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
        "timestep": torch.tensor([100, 700]),
        "image_rotary_emb": (positions.cos(), positions.sin()),
    }


def consisid() -> nn.Module:
    from diffusers import ConsisIDTransformer3DModel

    return randomize(
        ConsisIDTransformer3DModel(
            num_attention_heads=3,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            time_embed_dim=12,
            text_embed_dim=16,
            num_layers=4,
            sample_width=10,
            sample_height=6,
            sample_frames=17,
            max_text_seq_length=7,
            use_rotary_positional_embeddings=True,
            is_train_face=True,
            cross_attn_interval=2,
            cross_attn_dim_head=4,
            cross_attn_num_heads=2,
            LFE_id_dim=6,
            LFE_vit_dim=8,
            LFE_depth=5,
            LFE_dim_head=4,
            LFE_num_heads=2,
            LFE_num_id_token=2,
            LFE_num_querie=3,
            LFE_output_dim=16,
            LFE_ff_mult=1,
            LFE_num_scale=5,
        )
    )


def consisid_inputs() -> Inputs:
    faces = {"id_cond": randn(2, 6, seed=5), "id_vit_hidden": [randn(2, 9, 8, seed=6 + i) for i in range(5)]}
    return {**inputs(), **faces}


COGVIDEOX = {
    "CogVideoX": Case(cogvideox, inputs, ("hidden_states", "encoder_hidden_states")),
    "CogVideoX 1.5": Case(lambda: cogvideox(patch_size_t=2), lambda: inputs(frames=6)),
    "ConsisID": Case(consisid, consisid_inputs),
}
