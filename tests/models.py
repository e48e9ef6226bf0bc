"""Real models of diffusers and transformers, tiny and randomly initialised; nothing is fetched."""

from __future__ import annotations

import torch
from torch import nn


def wan(
    dtype: torch.dtype = torch.float64, heads: int = 3, layers: int = 2, image: bool = False
) -> nn.Module:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=32,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
        image_dim=20 if image else None,
        added_kv_proj_dim=12 * heads if image else None,
    )
    return model.to(dtype)


def wan_inputs(
    dtype: torch.dtype = torch.float64, batch: int = 2, frames: int = 5, height: int = 6, width: int = 10,
    per_token_time: bool = False, image: bool = False,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """5 × 3 × 5 = 75 tokens by default: no multiple of 2 or 4."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    tokens = frames * height * width // 4
    inputs = {
        "hidden_states": randn(batch, 16, frames, height, width),
        "timestep": torch.linspace(10, 900, batch * tokens).view(batch, tokens)
        if per_token_time
        else torch.linspace(100, 700, batch),
        "encoder_hidden_states": randn(batch, 512 if image else 7, 32),
    }
    if image:
        inputs["encoder_hidden_states_image"] = randn(batch, 9, 20)
    return inputs
