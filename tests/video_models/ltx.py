"""LTX-Video, whose input is tokens already, and LTX-2, which has audio tokens beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.authors_models.videox_fun import models as videox_fun
from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, text_mask


def ltx(heads: int = 3) -> nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    return randomize(
        LTXVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=heads,
            attention_head_dim=8,
            cross_attention_dim=8 * heads,
            num_layers=2,
            caption_channels=16,
        )
    )


def ltx_inputs(per_token_time: bool = False, grid: tuple[int, int, int] = (5, 3, 5), text: int = 7) -> Inputs:
    frames, height, width = grid
    tokens = frames * height * width
    times = torch.linspace(10, 900, 2 * tokens).view(2, tokens)
    return {
        "hidden_states": randn(2, tokens, 4),
        "encoder_hidden_states": randn(2, text, 16, seed=2),
        "timestep": times if per_token_time else torch.tensor([100.0, 700.0]),
        "encoder_attention_mask": text_mask((text, text - 3), text).long(),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def ltx2(heads: int = 3, make: type[nn.Module] | None = None, **options: Any) -> nn.Module:
    from diffusers import LTX2VideoTransformer3DModel

    return randomize(
        (make or LTX2VideoTransformer3DModel)(
            in_channels=4,
            out_channels=4,
            num_attention_heads=heads,
            attention_head_dim=8,
            cross_attention_dim=8 * heads,
            audio_in_channels=6,
            audio_out_channels=6,
            audio_num_attention_heads=2,
            audio_attention_head_dim=6,
            audio_cross_attention_dim=12,
            num_layers=2,
            caption_channels=16,
            **options,
        )
    )


def ltx2_inputs(new: bool = False, **sizes: Any) -> Inputs:
    """75 video tokens with a timestep each, and 11 of audio."""
    inputs = {
        **ltx_inputs(per_token_time=True, **sizes),
        "audio_hidden_states": randn(2, 11, 6, seed=5),
        "audio_encoder_hidden_states": randn(2, 7, 16, seed=3),
        "audio_encoder_attention_mask": text_mask((7, 4), 7).long(),
        "audio_timestep": torch.tensor([150.0, 650.0]),
        "audio_num_frames": 11,
        "fps": 25.0,
    }
    if new:  # LTX-2.3
        inputs |= {
            "sigma": torch.tensor([0.1, 0.7]),
            "audio_sigma": torch.tensor([0.15, 0.65]),
            "use_cross_timestep": True,
            "encoder_hidden_states": randn(2, 7, 24, seed=2),
            "audio_encoder_hidden_states": randn(2, 7, 12, seed=3),
            "video_keyframes_mask": (torch.arange(75) < 15).float()[None, :, None].repeat(2, 1, 1),
        }
    return inputs


def ltx23() -> nn.Module:
    return ltx2(
        gated_attn=True,
        cross_attn_mod=True,
        audio_gated_attn=True,
        audio_cross_attn_mod=True,
        rope_type="split",
        use_prompt_embeddings=False,
        perturbed_attn=True,
        use_keyframes_abs_pos_embedding=True,
    )


def sana_wm_refiner(**options: Any) -> nn.Module:
    from diffusers import SanaWMLTX2RefinerTransformer3DModel

    return randomize(
        SanaWMLTX2RefinerTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=5,
            attention_head_dim=8,
            cross_attention_dim=40,
            audio_in_channels=6,
            audio_out_channels=6,
            audio_num_attention_heads=2,
            audio_attention_head_dim=6,
            audio_cross_attention_dim=12,
            num_layers=2,
            caption_channels=16,
            **options,
        )
    )


def sana_wm_refiner_inputs(split: bool) -> Inputs:
    """75 tokens with a timestep each, and positions of 5 heads."""
    angles = randn(2, 5, 75, 4, seed=7) if split else randn(2, 75, 40, seed=7)
    inputs = ltx_inputs(per_token_time=True)
    return {name: inputs[name] for name in list(inputs)[:4]} | {
        "video_rotary_emb": (angles.cos(), angles.sin())
    }


BOTH = ("hidden_states", "audio_hidden_states")

LTX = {
    "LTX-Video": Case(ltx, ltx_inputs, ("hidden_states", "encoder_hidden_states")),
    "LTX-Video, time per token": Case(ltx, lambda: ltx_inputs(per_token_time=True)),
    "LTX-2": Case(ltx2, ltx2_inputs, BOTH),
    "LTX-2.3": Case(ltx23, lambda: ltx2_inputs(new=True), BOTH),
    "LTX-2, VideoX-Fun's": Case(lambda: ltx2(make=videox_fun.LTX2VideoTransformer3DModel), ltx2_inputs, BOTH),
    "SANA-WM's refiner": Case(
        sana_wm_refiner,
        lambda: sana_wm_refiner_inputs(split=False),
        ("hidden_states", "encoder_hidden_states"),
        lambda model: None,  # diffusers' class (0.42) brings none along
    ),
    "SANA-WM's refiner, gated": Case(
        lambda: sana_wm_refiner(gated_attn=True, rope_type="split"),
        lambda: sana_wm_refiner_inputs(split=True),
        ("hidden_states", "encoder_hidden_states"),
        lambda model: None,
    ),
}
