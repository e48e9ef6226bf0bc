"""Pixels become latents, by a VAE that is not trained, or by folding them.

Example with `codec.patch` 2: a clip of 5 × 32 × 56 pixels becomes latents of 12 channels and 5 × 16 × 28
positions, because every square of 2 × 2 pixels with 3 colours becomes one position.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora_accel.training.pretrained import PRETRAINED_DTYPES, load_pretrained, read_description
from opensora_accel.training.sections import CodecConfig

# How diffusers names the files of weights.
VAE_STEM = "diffusion_pytorch_model"

# [C, t, h, w] of a clip.
LatentShape = tuple[int, int, int, int]


class Codec(Protocol):
    # Channels of a latent.
    channels: int
    # Pixels along each side of a latent position.
    spatial: int
    # Frames per latent frame, after the first.
    temporal: int
    # What latents of frames that are given are multiplied by, where a model takes those in channels of their own.
    given_scale: float

    def encode(self, frames: Tensor, shown: Tensor | None = None) -> Tensor:
        """uint8 [B, T, H, W, 3] to latents [B, C, t, h, w] of about unit variance, in fp32 or more.

        Frames where `shown`, bool [B, T], is not set count as grey.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to uint8 [B, T, H, W, 3]."""
        ...


class SpaceToDepth:
    """Every square of pixels becomes the channels of one position: exact, and nothing to train."""

    temporal = 1
    given_scale = 1.0

    def __init__(self, patch: int, dtype: torch.dtype):
        self.spatial, self.channels, self.dtype = patch, 3 * patch * patch, dtype

    def encode(self, frames: Tensor, shown: Tensor | None = None) -> Tensor:
        """frames: uint8 [B, T, H, W, 3], and which of them are shown [B, T] → latents [B, C, t, h, w]."""
        pixels = _to_unit(frames, self.dtype, shown)
        batch, length = frames.shape[:2]
        # [B·T, 3, H, W] → [B·T, 3·patch², H/patch, W/patch]
        folded = F.pixel_unshuffle(pixels.flatten(0, 1), self.spatial)
        return folded.unflatten(0, (batch, length)).transpose(1, 2)

    def decode(self, latents: Tensor) -> Tensor:
        """latents: [B, C, t, h, w] → frames: uint8 [B, T, H, W, 3]."""
        batch, _, length = latents.shape[:3]
        pixels = F.pixel_shuffle(latents.transpose(1, 2).flatten(0, 1), self.spatial)
        return _to_bytes(pixels.unflatten(0, (batch, length)))


class VideoVAE:
    """A video VAE of diffusers, frozen, its latents normalised by the statistics in its config.

    Raises:
        ValueError: the model does not say how far it compresses.
    """

    def __init__(self, model: Any):
        self.model = model.eval().requires_grad_(False)
        config = model.config
        self.channels = config.get("z_dim") or config["latent_channels"]
        # CogVideoX 1.5 was trained with pictures that were divided by the factor that clips are multiplied by.
        self.given_scale = config["scaling_factor"] ** -2 if config.get("invert_scale_latents") else 1.0
        # Pixels a side, and frames, to one latent position; the classes say it under two names.
        for pattern in ("scale_factor_{}", "{}_compression_ratio"):
            names = (pattern.format("spatial"), pattern.format("temporal"))
            spatial, temporal = (config.get(name) or getattr(model, name, None) for name in names)
            if type(model).__name__ == "AutoencoderKLCogVideoX":
                # It halves a side from each of its stages to the next, and says so nowhere.
                spatial = 2 ** (len(config["block_out_channels"]) - 1)
            if isinstance(spatial, int) and isinstance(temporal, int):
                self.spatial, self.temporal = spatial, temporal
                break
        else:
            raise ValueError(
                f"{type(model).__name__} does not say how far it compresses; the VAEs used here are AutoencoderKLWan, "
                "AutoencoderKLHunyuanVideo, AutoencoderKLLTXVideo, AutoencoderKLMochi and AutoencoderKLCogVideoX"
            )

    def statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of latents, [1, C, 1, 1, 1] each, or one for all channels."""
        config = self.model.config
        # Some have them among their weights, some in their config; on top, or alone, there is one factor for all.
        weights = dict(self.model.named_buffers(recurse=False))
        found = (weights.get(name, config.get(name)) for name in ("latents_mean", "latents_std"))
        mean, std = (torch.as_tensor([default] if each is None else each, dtype=torch.float32, device=device)
                     for each, default in zip(found, (0.0, 1.0), strict=True))  # fmt: skip
        std = std / (config.get("scaling_factor") or 1.0)
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)

    @torch.no_grad()
    def encode(self, frames: Tensor, shown: Tensor | None = None) -> Tensor:
        """frames: uint8 [B, T, H, W, 3], and which of them are shown [B, T] → latents [B, C, t, h, w]."""
        # Before the model is given its work, for which a copy from the host would wait.
        mean, std = self.statistics(frames.device)
        # One by one, so that the values do not depend on which clips come together.
        pixels = [
            _to_unit(frames[row : row + 1], torch.float32, None if shown is None else shown[row : row + 1])
            .to(self.model.dtype)
            .transpose(1, 2)
            for row in range(len(frames))
        ]
        # The mode and not a draw: every epoch, and every rank, sees the same latents of a clip.
        latents = torch.cat([self.model.encode(clip).latent_dist.mode().float() for clip in pixels])
        return (latents - mean) / std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """latents: [B, C, t, h, w] → frames: uint8 [B, T, H, W, 3]."""
        mean, std = self.statistics(latents.device)
        latents = (latents * std.to(latents) + mean.to(latents)).to(self.model.dtype)
        more: tuple[Tensor, ...] = ()
        if self.model.config.get("timestep_conditioning"):
            # Such a decoder also takes noise away (LTX-Video 0.9.1); at 0 there is none.
            more = (torch.zeros(1, dtype=latents.dtype, device=latents.device),)
        # One by one too: no more memory than training has taken to encode them.
        frames = (self.model.decode(clip, *more).sample.transpose(1, 2) for clip in latents.split(1))
        return torch.cat([_to_bytes(each) for each in frames])


def build_codec(
    config: CodecConfig, device: torch.device, dtype: torch.dtype, *, outline: bool = False
) -> Codec:
    """The codec of a configuration, a VAE in `config.dtype`, and space-to-depth in `dtype`.

    Args:
        outline: of a VAE, only what its sizes are; it takes no memory, and cannot compute.

    Raises:
        FileNotFoundError, ValueError: `codec.path` holds no video VAE.
    """
    if not config.path:
        return SpaceToDepth(config.patch, dtype)
    import diffusers

    description = read_description("codec.path", config.path, "a diffusers VAE")
    name = str(description.get("_class_name", ""))
    if not name.startswith("AutoencoderKL") or not hasattr(diffusers, name):
        raise ValueError(
            f"codec.path {config.path} holds {name or 'no model of diffusers'}, not a VAE (AutoencoderKL…)"
        )
    cls = getattr(diffusers, name)
    make = partial(cls.from_config, description)
    dtype = PRETRAINED_DTYPES[config.dtype]
    return VideoVAE(
        load_pretrained(cls, make, "codec.path", config.path, VAE_STEM, dtype, None if outline else device)
    )


def latent_shape(codec: Codec, num_frames: int, height: int, width: int) -> LatentShape:
    """The shape [C, t, h, w] of a clip's latents.

    Raises:
        ValueError: the sizes of the clip do not fit the codec.
    """
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
    """Checks that `size` is a multiple of `unit`.

    Raises:
        ValueError: it is not; the message has the sizes that would do.
    """
    if size % unit:
        below = size // unit * unit
        choices = f"{below} or {below + unit}" if below else f"{unit}"
        raise ValueError(f"{name} ({size}) must be a multiple of {unit} for {reason}; use {choices}")


def _to_unit(frames: Tensor, dtype: torch.dtype, shown: Tensor | None) -> Tensor:
    """uint8 [B, T, H, W, 3] to [B, T, 3, H, W] in −1…1; 0 for frames that are not shown, bool [B, T]."""
    pixels = frames.permute(0, 1, 4, 2, 3).to(dtype) / 127.5 - 1
    return pixels if shown is None else pixels * shown.to(pixels)[..., None, None, None]


def _to_bytes(pixels: Tensor) -> Tensor:
    """[B, T, 3, H, W] in −1…1 to uint8 [B, T, H, W, 3] on the host."""
    return ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 1, 3, 4, 2).cpu()
