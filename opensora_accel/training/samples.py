"""Clips sampled from what was learned, beside the clips it was learned from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from opensora_accel.training.codec import Codec
from opensora_accel.training.config import FlowConfig
from opensora_accel.training.draws import generator
from opensora_accel.training.flow import sample
from opensora_accel.training.video import write_strip, write_video

_LEAST_HEIGHT = 240

Predict = Callable[[Tensor, Tensor, Sequence[str]], Tensor]
"""(x_t, timestep, captions) -> velocity."""


def sample_clips(
    predict: Predict,
    captions: Sequence[str],
    shape: tuple[int, int, int, int],
    codec: Codec,
    config: FlowConfig,
    alpha: float,
    like: Tensor,
    seed: int,
) -> Tensor:
    """uint8 [N, T, H, W, 3], one clip per caption; every rank has to call, and gets the same."""
    noise = torch.stack(
        [torch.randn(shape, generator=generator(seed, "sample", index)) for index in range(len(captions))]
    ).to(like)

    def guided(latents: Tensor, timestep: Tensor) -> Tensor:
        velocity = predict(latents, timestep, captions)
        if config.guidance == 1.0:
            return velocity
        unconditional = predict(latents, timestep, [""] * len(captions))
        return unconditional + config.guidance * (velocity - unconditional)

    return codec.decode(sample(guided, noise, config.sample_steps, alpha))


def _enlarged(frames: Tensor) -> Tensor:
    """Whole pixels repeated until the picture is large enough to look at."""
    factor = max(1, _LEAST_HEIGHT // frames.size(1))
    return frames.repeat_interleave(factor, 1).repeat_interleave(factor, 2)


def write_comparison(
    folder: Path, sources: Sequence[Tensor], sampled: Tensor, captions: Sequence[str], fps: float
) -> Path:
    """One mp4 per clip, the source on the left and the sample on the right, and strip.png of them all."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index, (source, clip) in enumerate(zip(sources, sampled, strict=True), start=1):
        write_video(folder / f"clip_{index}.mp4", _enlarged(torch.cat([source, clip], dim=2)), fps)
        rows += [(f"source {index}", source), (f"sampled {index}", clip)]
    (folder / "captions.txt").write_text("".join(f"{c}\n" for c in captions), encoding="utf-8")
    strip = folder / "strip.png"
    write_strip(strip, rows)
    return strip
