"""A small STDiT3 with inputs of awkward sizes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.opensora_models.randomize import randomize
from tests.opensora_models.stdit3 import model
from tests.opensora_models.stdit3.model import STDiT3

IN_CHANNELS, CAPTION, TEXT = 4, 20, 7


def stdit3(
    dtype: torch.dtype = torch.float64,
    heads: int = 3,
    layers: int = 2,
    seed: int = 0,
    release: ModuleType = model,
    **config: Any,
) -> STDiT3:
    """`layers` spatial and as many temporal blocks of v1.2, or of `release`; `config`: fields of STDiT3Config."""
    options: dict[str, Any] = {
        "input_sq_size": 64,
        "in_channels": IN_CHANNELS,
        "hidden_size": 12 * heads,
        "depth": layers,
        "num_heads": heads,
        "mlp_ratio": 2.0,
        "class_dropout_prob": 0.0,
        "caption_channels": CAPTION,
        "model_max_length": TEXT,
    }
    torch.manual_seed(seed)  # the caption that stands for none is a buffer
    return randomize(release.STDiT3(release.STDiT3Config(**{**options, **config})), seed).to(dtype)


def stdit3_inputs(
    dtype: torch.dtype = torch.float64,
    batch: int = 2,
    frames: int = 5,
    height: int = 9,
    width: int = 10,
    masked: bool = False,
    given: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """By default 5 frames of 5 × 5 tokens, the last row padded, and texts of 7 and 4 tokens.

    `masked`: some frames are given, and need `x_mask`. `given`: v1.3's way, frames by their index.
    """
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    inputs = {
        "x": randn(batch, IN_CHANNELS, frames, height, width),
        "timestep": torch.linspace(100, 700, batch, dtype=dtype),
        "y": randn(batch, 1, TEXT, CAPTION),
        "mask": torch.stack([torch.arange(TEXT) < TEXT - 3 * (i % 2) for i in range(batch)]).long(),
        "fps": torch.linspace(8, 24, batch, dtype=dtype),
        "height": torch.full((batch,), 8.0 * height),
        "width": torch.full((batch,), 8.0 * width),
    }
    if masked:
        first_given = torch.arange(batch)[:, None] % 2 == 0
        inputs["x_mask"] = (torch.arange(frames) > 1) | ~first_given
    if given is not None:
        inputs |= {
            "mask_index": list(given),
            "cond": randn(batch, IN_CHANNELS, frames, height, width),
            "cond_mask": randn(batch, IN_CHANNELS, frames, height, width),
            "y_null": randn(batch, 1, TEXT, CAPTION),
        }
    return inputs
