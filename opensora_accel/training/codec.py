"""Pixels to latents and back: space-to-depth, or a video VAE of diffusers from a local folder."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora_accel.training.config import CodecConfig
from opensora_accel.training.pretrained import load_pretrained, read_description


class Codec(Protocol):
    channels: int
    """Of a latent."""
    spatial: int
    """Pixels along each side of a latent position."""
    temporal: int
    """Frames per latent frame, after the first."""

    def encode(self, frames: Tensor) -> Tensor:
        """uint8 [B, T, H, W, 3] to latents [B, C, t, h, w] of about unit variance."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to uint8 [B, T, H, W, 3]."""
        ...


class SpaceToDepth:
    """Every square of pixels becomes the channels of one position: exact, and nothing to train."""

    temporal = 1

    def __init__(self, patch: int, dtype: torch.dtype):
        self.spatial, self.channels, self.dtype = patch, 3 * patch * patch, dtype

    def encode(self, frames: Tensor) -> Tensor:
        pixels = _to_unit(frames, self.dtype)
        batch, length = frames.shape[:2]
        folded = F.pixel_unshuffle(pixels.flatten(0, 1), self.spatial)
        return folded.unflatten(0, (batch, length)).transpose(1, 2)

    def decode(self, latents: Tensor) -> Tensor:
        batch, _, length = latents.shape[:3]
        pixels = F.pixel_shuffle(latents.transpose(1, 2).flatten(0, 1), self.spatial)
        return _to_bytes(pixels.unflatten(0, (batch, length)))


class VideoVAE:
    """A video VAE of diffusers, frozen, its latents normalised by the statistics in its config."""

    def __init__(self, model: Any):
        self.model = model.eval().requires_grad_(False)
        config = model.config
        self.channels = config.get("z_dim") or config["latent_channels"]
        self.spatial, self.temporal = _compression(model)
        mean, std = config.get("latents_mean"), config.get("latents_std")
        self.mean = torch.tensor(mean or [0.0]).view(1, -1, 1, 1, 1)
        self.std = torch.tensor(std or [1.0 / (config.get("scaling_factor") or 1.0)]).view(1, -1, 1, 1, 1)

    @torch.no_grad()
    def encode(self, frames: Tensor) -> Tensor:
        pixels = _to_unit(frames, self.model.dtype).transpose(1, 2)
        latents = self.model.encode(pixels).latent_dist.mode()
        return (latents - self.mean.to(latents)) / self.std.to(latents)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        latents = (latents * self.std.to(latents) + self.mean.to(latents)).to(self.model.dtype)
        return _to_bytes(self.model.decode(latents).sample.transpose(1, 2))


def _compression(model: Any) -> tuple[int, int]:
    """Pixels a side, and frames, to one latent position; the classes say it under two names."""
    config = model.config
    for pattern in ("scale_factor_{}", "{}_compression_ratio"):
        names = (pattern.format("spatial"), pattern.format("temporal"))
        spatial, temporal = (config.get(name) or getattr(model, name, None) for name in names)
        if isinstance(spatial, int) and isinstance(temporal, int):
            return spatial, temporal
    raise ValueError(
        f"{type(model).__name__} does not say how far it compresses; the VAEs used here are AutoencoderKLWan, "
        "AutoencoderKLHunyuanVideo and AutoencoderKLLTXVideo"
    )


def build_codec(config: CodecConfig, device: torch.device, dtype: torch.dtype) -> Codec:
    """Raises FileNotFoundError or ValueError for a `codec.path` that holds no video VAE."""
    if not config.path:
        return SpaceToDepth(config.patch, dtype)
    import diffusers

    name = str(read_description("codec.path", config.path, "a diffusers VAE").get("_class_name", ""))
    if not name.startswith("AutoencoderKL") or not hasattr(diffusers, name):
        raise ValueError(
            f"codec.path {config.path} holds {name or 'no model of diffusers'}, not a VAE (AutoencoderKL…)"
        )
    model = load_pretrained(getattr(diffusers, name), "codec.path", config.path)
    return VideoVAE(model.to(device, dtype))


def latent_shape(codec: Codec, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Channels, frames, height and width of a clip's latents; ValueError where the sizes do not fit the codec."""
    if (num_frames - 1) % codec.temporal:
        fits = (num_frames - 1) // codec.temporal * codec.temporal + 1
        raise ValueError(
            f"data.num_frames ({num_frames}) must be 1 more than a multiple of {codec.temporal} for this codec; "
            f"use {fits} or {fits + codec.temporal}"
        )
    for name, size in (("height", height), ("width", width)):
        check_multiple(f"data.{name}", size, codec.spatial, "the codec")
    return (
        codec.channels,
        (num_frames - 1) // codec.temporal + 1,
        height // codec.spatial,
        width // codec.spatial,
    )


def check_multiple(name: str, size: int, unit: int, reason: str) -> None:
    if size % unit:
        below = size // unit * unit
        choices = f"{below} or {below + unit}" if below else f"{unit}"
        raise ValueError(f"{name} ({size}) must be a multiple of {unit} for {reason}; use {choices}")


def _to_unit(frames: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [B, T, H, W, 3] to [B, T, 3, H, W] in −1…1."""
    return frames.permute(0, 1, 4, 2, 3).to(dtype) / 127.5 - 1


def _to_bytes(pixels: Tensor) -> Tensor:
    return ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 1, 3, 4, 2).cpu()
