"""Kandinsky 5 and 6: text blocks of their own, then video blocks with cross-attention; 6 has audio as well.

Its super-resolution has no text, and chooses blocks of keys.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn
from tests.video_models.flex import use_dense_flex_attention


def kandinsky() -> nn.Module:
    from diffusers import Kandinsky5Transformer3DModel

    return randomize(
        Kandinsky5Transformer3DModel(
            in_visual_dim=4,
            in_text_dim=16,
            in_text_dim2=10,
            time_dim=8,
            out_visual_dim=4,
            model_dim=24,
            ff_dim=32,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(2, 2, 4),
        )
    )


def inputs() -> Inputs:
    return {
        "hidden_states": randn(2, 5, 6, 10, 4),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
        "timestep": torch.tensor([100.0, 700.0]),
        "pooled_projections": randn(2, 10, seed=3),
        "visual_rope_pos": (torch.arange(5), torch.arange(3), torch.arange(5)),
        "text_rope_pos": torch.arange(7),
    }


def kandinsky6(**options: bool) -> nn.Module:
    from diffusers import Kandinsky6Transformer3DModel

    return randomize(
        Kandinsky6Transformer3DModel(
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=16,
            in_text_dim2=10,
            time_dim=8,
            model_dim=24,
            ff_dim=32,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(2, 2, 4),
            visual_cond=False,
            in_audio_dim=6,
            out_audio_dim=6,
            model_dim_a=16,
            time_dim_a=8,
            ff_dim_a=20,
            axes_dims_a=(2, 2, 4),
            ca_rope=True,
            **options,
        )
    )


def inputs6(audio: bool = True) -> Inputs:
    """75 video tokens and 11 of audio."""
    return {
        "hidden_states": randn(2, 5, 6, 10, 4),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
        "pooled_projections": randn(2, 10, seed=3),
        "timestep": torch.tensor([100.0, 700.0]),
        "audio_hidden_states": randn(2, 11, 6, seed=5) if audio else None,
    }


def kandinsky6_sr() -> nn.Module:
    from diffusers import Kandinsky6SRTransformer3DModel

    use_dense_flex_attention()
    return randomize(
        Kandinsky6SRTransformer3DModel(
            in_visual_dim=2,
            out_visual_dim=4,
            time_dim=8,
            model_dim=40,
            ff_dim=32,
            num_visual_blocks=2,
            axes_dims=(2, 2, 4),
            nabla_threshold=0.4,
            nabla_window=(1, 1, 1),
        )
    )


def inputs6_sr() -> Inputs:
    """3 × 1 × 3 blocks of 8 × 8 tokens."""
    return {"hidden_states": randn(2, 3, 8, 24, 5), "timestep": torch.tensor([100.0, 700.0])}


KANDINSKY = {
    "Kandinsky 5": Case(kandinsky, inputs, ("hidden_states", "encoder_hidden_states")),
    "Kandinsky 6": Case(kandinsky6, inputs6, ("hidden_states", "audio_hidden_states")),
    "Kandinsky 6, no audio": Case(kandinsky6, lambda: inputs6(audio=False)),
    "Kandinsky 6, super-resolution": Case(kandinsky6_sr, inputs6_sr),
}
