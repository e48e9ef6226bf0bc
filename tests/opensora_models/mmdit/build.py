"""A small MMDiT with inputs of awkward sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.opensora_models.mmdit.model import MMDiTConfig, MMDiTModel
from tests.opensora_models.randomize import randomize

IN_CHANNELS, PATCH, CONTEXT, VECTOR = 16, 2, 20, 12


def mmdit(
    dtype: torch.dtype = torch.float64, heads: int = 3, layers: int = 2, seed: int = 0, **config: Any
) -> MMDiTModel:
    """`layers` double and as many single blocks; `config`: fields of MMDiTConfig."""
    options: dict[str, Any] = {
        "in_channels": IN_CHANNELS,
        "vec_in_dim": VECTOR,
        "context_in_dim": CONTEXT,
        "hidden_size": 12 * heads,
        "mlp_ratio": 2.0,
        "num_heads": heads,
        "depth": layers,
        "depth_single_blocks": layers,
        "axes_dim": [4, 4, 4],
        "theta": 10_000,
        "qkv_bias": True,
        "guidance_embed": True,
        "cond_embed": True,
        "patch_size": PATCH,
    }
    model = MMDiTModel(MMDiTConfig(None, None, **{**options, **config}))
    return randomize(model, seed).to(dtype)


def mmdit_inputs(
    dtype: torch.dtype = torch.float64,
    batch: int = 2,
    frames: int = 5,
    height: int = 5,
    width: int = 7,
    text: int = 7,
) -> dict[str, Tensor]:
    """By default 175 image and 7 text tokens: neither a multiple of 2 or 3; together 182, none of 3 or 4."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    tokens = frames * height * width
    positions = torch.cartesian_prod(*(torch.arange(size, dtype=dtype) for size in (frames, height, width)))
    return {
        "img": randn(batch, tokens, IN_CHANNELS),
        "img_ids": positions.expand(batch, -1, -1),
        "txt": randn(batch, text, CONTEXT),
        "txt_ids": torch.zeros(batch, text, 3, dtype=dtype),
        "timesteps": torch.linspace(0.2, 0.9, batch, dtype=dtype),
        "y_vec": randn(batch, VECTOR),
        "cond": randn(batch, tokens, IN_CHANNELS + PATCH**2),
        "guidance": torch.linspace(3, 5, batch, dtype=dtype),
    }
