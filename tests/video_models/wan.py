"""Wan 2.1 and 2.2: text by cross-attention, with an image, with a timestep per token, with control (VACE)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.authors_models.musubi import model as musubi
from tests.authors_models.videox_fun import models as videox_fun
from tests.authors_models.wan import WanModel, wan_model_inputs
from tests.models import wan, wan_inputs
from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, wan_like


def vace() -> nn.Module:
    from diffusers import WanVACETransformer3DModel

    return randomize(
        WanVACETransformer3DModel(
            **wan_like(layers=3),
            cross_attn_norm=True,
            rope_max_seq_len=32,
            vace_layers=[0, 2],
            vace_in_channels=6,
        )
    )


def vace_inputs() -> Inputs:
    return {
        "hidden_states": randn(2, 4, 5, 6, 10),
        "timestep": torch.tensor([100, 700]),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
        "control_hidden_states": randn(2, 6, 5, 6, 10, seed=3),
        "control_hidden_states_scale": torch.tensor([0.7, 1.2]),
    }


def chrono_edit(heads: int = 3) -> nn.Module:
    from diffusers import ChronoEditTransformer3DModel

    return randomize(
        ChronoEditTransformer3DModel(
            **wan_like(heads=heads),
            cross_attn_norm=True,
            rope_max_seq_len=32,
        )
    )


def chrono_edit_inputs(frames: int = 5, width: int = 10) -> Inputs:
    return {
        "hidden_states": randn(2, 4, frames, 6, width),
        "timestep": torch.tensor([100, 700]),
        "encoder_hidden_states": randn(2, 7, 16, seed=2),
    }


def animate2(layers: int = 2, **options: int) -> nn.Module:
    from diffusers import WanAnimate2Transformer3DModel

    return randomize(
        WanAnimate2Transformer3DModel(
            text_len=7,
            in_dim=6,
            dim=60,
            ffn_dim=32,
            freq_dim=32,
            text_dim=16,
            out_dim=4,
            num_heads=5,
            num_layers=layers,
            use_img_emb=False,
            **options,
        )
    )


def animate2_inputs() -> Inputs:
    """The pass over the reference, of 5 × 3 × 5 = 75 tokens, which fills the cache."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return {
        "hidden_states": [randn(4, 5, 6, 10), randn(4, 5, 6, 10, seed=2)],
        "condition_latents": [randn(2, 5, 6, 10, seed=3), randn(2, 5, 6, 10, seed=4)],
        "timestep": torch.tensor([100, 700]),
        "encoder_hidden_states": [randn(7, 16, seed=5), randn(4, 16, seed=6)],
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": 75,
        "offset_grid_sizes": torch.tensor([[5, 3, 5]]),
    }


def animate() -> nn.Module:
    from diffusers import WanAnimateTransformer3DModel

    return randomize(
        WanAnimateTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=3,
            attention_head_dim=12,
            in_channels=12,
            latent_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=32,
            ffn_dim=32,
            num_layers=4,
            image_dim=20,
            added_kv_proj_dim=36,
            rope_max_seq_len=32,
            motion_encoder_channel_sizes={"4": 6, "8": 6, "16": 6},
            motion_encoder_size=16,
            motion_style_dim=8,
            motion_dim=4,
            motion_encoder_dim=10,
            face_encoder_hidden_dim=12,
            face_encoder_num_heads=2,
            inject_face_latents_blocks=2,
        )
    )


def animate_inputs() -> Inputs:
    """5 frames of latents, of which the first is the character; a face for each of 13 frames of pixels."""
    return {
        "hidden_states": randn(2, 12, 5, 6, 10),
        "timestep": torch.tensor([100, 700]),
        "encoder_hidden_states": randn(2, 512, 16, seed=2),
        "encoder_hidden_states_image": randn(2, 9, 20, seed=3),
        "pose_hidden_states": randn(2, 4, 4, 6, 10, seed=4),
        "face_pixel_values": randn(2, 3, 13, 16, 16, seed=5),
    }


def single(**options: bool) -> Case:
    return Case(
        lambda: wan(torch.float32, image=options.get("image", False)),
        lambda: wan_inputs(torch.float32, **options),
        ("hidden_states", "encoder_hidden_states"),
    )


def authors(padded: bool = False, make: Callable[[], nn.Module] = WanModel) -> Case:
    """Its authors' code has no checkpointing of its own to turn on."""
    return Case(
        lambda: randomize(make()), lambda: wan_model_inputs(padded), ("x", "context"), lambda model: None
    )


WAN = {
    "Wan": single(),
    "Wan, image": single(image=True),
    "Wan, time per token": single(per_token_time=True),
    "Wan VACE": Case(vace, vace_inputs, ("hidden_states", "control_hidden_states")),
    "Wan Animate": Case(animate, animate_inputs, ("pose_hidden_states", "face_pixel_values")),
    "Wan Animate 2": Case(
        animate2,
        animate2_inputs,
        ("hidden_states", "encoder_hidden_states"),
        # The function that diffusers (0.42) puts there by default takes no keywords, which this model passes.
        lambda model: model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False)),
    ),
    "WanModel, its authors'": authors(),
    "WanModel, clips of two lengths": authors(padded=True),
    "WanModel, musubi-tuner's": authors(make=musubi.WanModel),
    "Wan 2.1, VideoX-Fun's": authors(make=videox_fun.WanTransformer3DModel),
    "Wan 2.2, VideoX-Fun's": authors(True, partial(videox_fun.Wan2_2Transformer3DModel, True)),
    "ChronoEdit": Case(chrono_edit, chrono_edit_inputs),
}
