"""Open-Sora's own models: 2.0's MMDiT, and 1.2's STDiT3.

MMDiT has tokens of 2 × 2 latents with a place each, states of T5 and CLIP, and frames that are given.

A clip is at time t, from 0 (the clip) to 1 (noise), the point (1 − t) x + (t + σ (1 − t)) ε with σ = 1e-5, and the
velocity is (1 − σ) ε − x. That is the straight path from x + σ ε, which has a little noise at its end, to ε.

    latents [B, 16, t, h, w] → img [B, t·h/2·w/2, 64], at places (frame, row, column); text at (0, 0, 0)
    mask and given latents [B, 1 + 16, t, h, w] → cond [B, …, 68], added behind a projection of its own

What is given of a clip is encoded by itself: the first frame, the last, or 33 frames at one end, and the mask is 1 in
all of its latent frames. Where nothing is given both are zero. A caption is left out for T5 and for CLIP each by
itself, a share of 0.316 of clips, so that a tenth has neither.

A sample asks the model three times at each step: with caption and frames (v), with frames alone (v₁) and with neither
(v₀), and walks along v₀ + γ (v₁ − v₀) + g (v − v₁).

STDiT3 answers x − ε, and as many channels that nothing learns. Frames that are given stand in the place of noise, at
time 0: it is told by a mask which are not (x_mask). It is told frame rate, height and width. A caption that is left out
has states that it has learned, as many as the caption.

Source: hpcaitech/Open-Sora. Of 2.0 (main, 2025; arXiv:2503.09642): scripts/diffusion/train.py, opensora/utils/train.py
and sampling.py, opensora/models/text/conditioner.py, configs/diffusion. Of 1.2 (v1.2.0): opensora/schedulers/rf,
opensora/models/text_encoder/t5.py, scripts/train.py, configs/opensora-v1-2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opensora_accel.training.captions import TextStates
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.flow import TIMESTEPS
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes, patches_of, to_patches


def _places(inputs: Inputs) -> Tensor:
    """[B, t·h·w, 3]: frame, row and column of each token."""
    numbers = [torch.arange(count, device=inputs.latents.device) for count in inputs.grid]
    places = torch.cartesian_prod(*numbers).to(inputs.latents)
    return places.expand(len(inputs.latents), -1, -1)


def _places_of_text(inputs: Inputs) -> Tensor:
    """[B, L, 3], zero."""
    return inputs.latents.new_zeros(*inputs.text.shape[:2], 3)


def _given(inputs: Inputs) -> Tensor | None:
    """[B, t·h·w, 68], the mask's channel first; None for a model without."""
    if inputs.apart is None:
        return None
    latents, mask = inputs.apart[:, :-1], inputs.apart[:, -1:]
    return to_patches(torch.cat([mask, latents], dim=1), patches_of(inputs.config))


def _guidance(inputs: Inputs) -> Tensor | None:
    """[B], how far it is guided; None for a model that was not distilled."""
    if not inputs.config["guidance_embed"]:
        return None
    return torch.full_like(inputs.timestep, inputs.guidance).to(inputs.latents)


def _derive(sizes: Sizes) -> dict[str, Any]:
    return {
        # Weights come from model.path.
        "from_pretrained": None,
        "cache_dir": None,
        "in_channels": sizes.channels * sizes.arguments["patch_size"] ** 2,
        "context_in_dim": sizes.texts[0].width,
        "vec_in_dim": sizes.texts[1].width,
    }


_WITH_FRAMES = Recipe(
    models=("MMDiTModel",),
    pipeline="",
    home="opensora.models.mmdit.model",
    latents="img",
    layout="tokens",
    call={
        "img_ids": _places,
        "txt": "text",
        "txt_ids": _places_of_text,
        "timesteps": lambda inputs: (inputs.timestep / TIMESTEPS).to(inputs.latents),
        "y_vec": lambda inputs: inputs.text_2.squeeze(1),
        "cond": _given,
        "guidance": _guidance,
    },
    derive=_derive,
    least_noise=1e-5,
    frames=(Conditioning("channels", "latent frames", always=True, apart=True, at_both_ends=True),),
    guided_by_frames=True,
    text=(
        TextStates(masked=False, padding="kept", padded_to=512),
        TextStates(encoders=("clip_text_model",), pooled=True, length=77, masked=False, padding="kept"),
    ),
    drops_apart=True,
    embedders=("time_in", "guidance_in"),
    told_guidance=4.0,
    num_heads=lambda config: config["num_heads"],
    # As Open_Sora_v2.safetensors was made; some have no default.
    fresh={
        "hidden_size": 3072,
        "mlp_ratio": 4.0,
        "num_heads": 24,
        "depth": 19,
        "depth_single_blocks": 38,
        "axes_dim": [16, 56, 56],
        "theta": 10_000,
        "qkv_bias": True,
        "guidance_embed": False,
        "cond_embed": True,
        "fused_qkv": False,
        "use_liger_rope": True,
    },
    # And in 256 px: 256 × 256, 192 × 336 and the like.
    published={
        "data.num_frames": 129,
        "data.height": 576,
        "data.width": 1024,
        "text.length": 512,
        "flow.caption_drop": 0.31622777,
        "flow.guidance": 7.5,
        "flow.frame_guidance": 3.0,
        "conditions.t2v": 1.0,
        "conditions.i2v_head": 5.0,
        "conditions.i2v_loop": 1.0,
        "conditions.i2v_tail": 1.0,
        "lora.targets": ("q_proj", "k_proj", "v_proj", "v_mlp", "proj", "linear2"),
    },
    tiny={
        "hidden_size": 36,
        "mlp_ratio": 2.0,
        "num_heads": 3,
        "depth": 1,
        "depth_single_blocks": 1,
        "axes_dim": [4, 4, 4],
    },
)

# Its first stages were trained from text alone.
_OF_FRAMES = ("conditions.", "flow.frame_guidance")
FROM_TEXT = replace(
    _WITH_FRAMES,
    published={
        name: value for name, value in _WITH_FRAMES.published.items() if not name.startswith(_OF_FRAMES)
    },
    is_for=lambda arguments: arguments.get("cond_embed") is False,
    frames=(),
    guided_by_frames=False,
    tiny=dict(_WITH_FRAMES.tiny) | {"cond_embed": False},
)

MMDIT = replace(_WITH_FRAMES, variants=(FROM_TEXT,))


# A caption is left out by the run, whose ranks have to agree, and clips are split by the plan.
_BY_THE_RUN = {"class_dropout_prob": 0.0, "enable_sequence_parallelism": False}
# Frames a second that an image is told to have.
_OF_IMAGES = 120.0


def _for_each(inputs: Inputs, number: float) -> Tensor:
    """[B], the same number for each clip."""
    return inputs.latents.new_full((len(inputs.latents),), number)


def _to_be_made(inputs: Inputs) -> Tensor | None:
    """Bool [B, t], the latent frames that are not given; None where none is."""
    condition = inputs.condition
    return None if condition is None or condition.given is None else ~condition.given


def _check_stdit3(sizes: Sizes) -> None:
    if "skip_temporal" in sizes.arguments:
        raise ValueError(
            "this STDiT3 is that of Open-Sora 1.3, which takes frames that are given in ways of its own, and is not "
            "trained here; choose the one of 1.2, or MMDiTModel of 2.0"
        )


STDIT3 = Recipe(
    models=("STDiT3",),
    pipeline="",
    home="opensora.models.stdit.stdit3",
    latents="x",
    call={
        "timestep": "timestep",
        "y": lambda inputs: inputs.text.unsqueeze(1),
        "mask": "text_mask",
        "x_mask": _to_be_made,
        "fps": lambda inputs: _for_each(
            inputs, inputs.frame_rate if inputs.latents.size(2) > 1 else _OF_IMAGES
        ),
        "height": lambda inputs: _for_each(inputs, inputs.spatial * inputs.latents.size(3)),
        "width": lambda inputs: _for_each(inputs, inputs.spatial * inputs.latents.size(4)),
    },
    derive=lambda sizes: {
        "in_channels": sizes.channels,
        "caption_channels": sizes.texts[0].width,
        # In training it takes captions of no other length.
        "model_max_length": sizes.texts[0].length,
        **_BY_THE_RUN,
    },
    check=_check_stdit3,
    sign=-1.0,
    answers_variance=True,
    frames=(Conditioning("latents", at_both_ends=True),),
    takes_frame_rate=True,
    text=(TextStates(padding="as the caption"),),
    text_of_nothing="y_embedder.y_embedding",
    num_heads=lambda config: config["num_heads"],
    forced=_BY_THE_RUN,
    published={
        "data.num_frames": 51,
        "data.height": 720,
        "data.width": 1280,
        "data.frame_rate": 24.0,
        "text.length": 300,
        "flow.shift": "open-sora-1.2",
        "flow.caption_drop": 0.1,
        "flow.guidance": 7.0,
        "lora.targets": ("qkv", "attn.proj", "q_linear", "kv_linear", "cross_attn.proj"),
    },
    tiny={
        "input_sq_size": 64,
        "hidden_size": 36,
        "depth": 2,
        "num_heads": 3,
        "mlp_ratio": 2.0,
    },
)
