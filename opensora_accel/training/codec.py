"""Pixels become latents, by a VAE that is not trained, or by folding them.

Example with `codec.patch` 2: a clip of 5 × 32 × 56 pixels becomes latents of 12 channels and 5 × 16 × 28
positions, because every square of 2 × 2 pixels with 3 colours becomes one position.
"""

from __future__ import annotations

from dataclasses import dataclass
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

# Mean and standard deviation, of red, green and blue in 0…1, by which pixels are made unit, where not −1…1 is meant.
_PIXELS = {"AutoencoderKLMiniMaxH3": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
# Of pictures: every frame is one of them. The second looks at its neighbours too where it decodes.
_OF_PICTURES, _OF_FRAMES = "AutoencoderKL", "AutoencoderKLTemporalDecoder"
# It works on tiles alone, which a clip must fill, and gives its frames before their channels.
_TILED = "AutoencoderKLAllegro"


@dataclass(frozen=True)
class LatentFrames:
    """How many frames become a latent frame.

    Most VAEs make one of the first, and one of each 4, or 8, that follow: 9 frames are 1 + 4 + 4. MiniMax H3's begins
    anew with each chunk of 5 latent frames, and a clip ends with the second of a chunk: 22 frames are 1 + 4 + 4 + 4 + 4
    and 1 + 4. By one chunk that is not whole it could decode nothing: so 22 are the fewest. Allegro's makes one of
    every 4, in tiles of 6, each 4 behind the one before: 24 frames are one tile, 40 are two.
    """

    # Frames of each latent frame that does not begin a chunk.
    temporal: int
    # Latent frames of a chunk; without chunks the clip is one.
    chunk: int | None = None
    # Frames of the latent frame that begins a chunk.
    first: int = 1
    # Latent frames of the shortest clip, and by how many another one is longer.
    fewest: int = 1
    step: int = 1

    def starts(self, num_latents: int, device: torch.device | None = None) -> Tensor:
        """[t]: the number of the first frame of each latent frame."""
        numbers = torch.arange(num_latents, device=device)
        return self._within(numbers)[0]

    def num_frames(self, num_latents: int) -> int:
        """The frames of a clip of so many latent frames: where the next one would begin."""
        start, within = self._within(num_latents - 1)
        return start + (self.temporal if within else self.first)

    def _within(self, number: Any) -> tuple[Any, Any]:
        """Where a latent frame begins, and which of its chunk it is."""
        within = number if self.chunk is None else number % self.chunk
        begin = (
            0
            if self.chunk is None
            else number // self.chunk * (self.first + (self.chunk - 1) * self.temporal)
        )
        return begin + (within > 0) * (self.first + (within - 1) * self.temporal), within

    @property
    def unit(self) -> int:
        """By how many frames one clip may be longer than another."""
        return self.num_frames(self.fewest + self.step) - self.num_frames(self.fewest)

    def num_latents(self, num_frames: int, name: str = "data.num_frames") -> int:
        """The latent frames of a clip, whose length the option `name` says.

        Raises:
            ValueError: a clip cannot have so many frames.
        """
        least, unit = self.num_frames(self.fewest), self.unit
        check_multiple(name, num_frames, unit, "this codec", least)
        return self.fewest + (num_frames - least) // unit * self.step

    def numbers(self, num_frames: int) -> Tensor:
        """[temporal, t]: the numbers of the frames of each latent frame; one that stands alone comes each time."""
        starts, within = self._within(torch.arange(self.num_latents(num_frames)))
        lasts = torch.where(within > 0, self.temporal, self.first) - 1
        return starts + torch.arange(self.temporal).unsqueeze(1).minimum(lasts)


class Codec(Protocol):
    # Channels of a latent.
    channels: int
    # Pixels along each side of a latent position.
    spatial: int
    latent_frames: LatentFrames
    # Height and width of the smallest clip in pixels, and by how many another one is larger.
    sides: tuple[tuple[int, int], tuple[int, int]]
    # What latents of frames that are given are multiplied by, where a model takes those in channels of their own.
    given_scale: float
    # What latents are multiplied by beside their own statistics, and with them a mask, where a model has it so.
    factor: float

    def encode(
        self,
        frames: Tensor,
        shown: Tensor | None = None,
        drawn: int | None = None,
        *,
        black: bool = False,
        noise: Tensor | None = None,
    ) -> Tensor:
        """uint8 [B, T, H, W, 3] to latents [B, C, t, h, w] of about unit variance, in fp32 or more.

        Frames where `shown`, bool [B, T], is not set count as grey, or as black. Where a VAE gives a mean and a
        deviation, latents are drawn by the seed `drawn`, and rounded to fp16; without one they are the mean.

        Args:
            noise: [B, T, 3, H, W], added to the pixels in −1…1 that are not black.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to uint8 [B, T, H, W, 3]."""
        ...


class SpaceToDepth:
    """Every square of pixels becomes the channels of one position: exact, and nothing to train."""

    latent_frames = LatentFrames(1)
    given_scale = factor = 1.0

    def __init__(self, patch: int, dtype: torch.dtype):
        self.spatial, self.channels, self.dtype = patch, 3 * patch * patch, dtype
        self.sides = (patch, patch), (patch, patch)

    def encode(
        self,
        frames: Tensor,
        shown: Tensor | None = None,
        drawn: int | None = None,
        *,
        black: bool = False,
        noise: Tensor | None = None,
    ) -> Tensor:
        """frames: uint8 [B, T, H, W, 3], and which of them are shown [B, T] → latents [B, C, t, h, w]."""
        pixels = _to_unit(frames, self.dtype, shown, black, noise)
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
        self.channels = config.get("z_dim") or config.get("latent_channels")
        # CogVideoX 1.5 was trained with pictures that were divided by the factor that clips are multiplied by.
        self.given_scale = config["scaling_factor"] ** -2 if config.get("invert_scale_latents") else 1.0
        self.factor = config.get("scaling_factor") or 1.0
        # Pixels a side, and frames, to one latent position; the classes say it under two names.
        for pattern in ("scale_factor_{}", "{}_compression_ratio"):
            names = (pattern.format("spatial"), pattern.format("temporal"))
            spatial, temporal = (config.get(name) or getattr(model, name, None) for name in names)
            if type(model).__name__ in ("AutoencoderKLCogVideoX", _OF_PICTURES, _OF_FRAMES):
                # It halves a side from each of its stages to the next, and says so nowhere.
                spatial = 2 ** (len(config["block_out_channels"]) - 1)
            if type(model).__name__ in (_OF_PICTURES, _OF_FRAMES):
                temporal = 1
            if isinstance(spatial, int) and isinstance(temporal, int) and self.channels:
                self.spatial, self.latent_frames = spatial, LatentFrames(temporal)
                break
        else:
            raise ValueError(
                f"{type(model).__name__} does not say how far it compresses; the VAEs used here are AutoencoderKLWan, "
                "AutoencoderKLHunyuanVideo, AutoencoderKLLTXVideo, AutoencoderKLMochi, AutoencoderKLCogVideoX, "
                "AutoencoderKLMagvit, AutoencoderKLAllegro, AutoencoderKLMiniMaxH3, and those of pictures, "
                f"{_OF_PICTURES} and {_OF_FRAMES}"
            )
        self.sides = (spatial, spatial), (spatial, spatial)
        if type(model).__name__ == _TILED:
            model.enable_tiling()
            (fewest, *least), (step, *more) = model.kernel, model.stride
            self.sides = (least[0], more[0]), (least[1], more[1])
            of_tile = {"fewest": fewest // temporal, "step": step // temporal}
            self.latent_frames = LatentFrames(temporal, first=temporal, **of_tile)
        chunk = getattr(model, "tokens_chunk_size", None)
        if chunk is not None:
            if config["clip_length"] != 1 + (chunk - 1) * temporal:
                raise ValueError(
                    f"{type(model).__name__} has chunks of {config['clip_length']} frames, and those known here have 1 "
                    f"more than a multiple of {temporal}; choose the VAE of the model's pipeline"
                )
            # By one chunk that is not whole it could decode nothing.
            last = chunk - config["token_drop"]
            fewest = last if last == chunk else chunk + last
            self.latent_frames = LatentFrames(temporal, chunk, fewest=fewest, step=chunk)

    def statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of latents, [1, C, 1, 1, 1] each, or one for all channels."""
        config = self.model.config
        # Some have them among their weights, some in their config; on top, or alone, there is one factor for all.
        weights = dict(self.model.named_buffers(recurse=False))
        found = (weights.get(name, config.get(name)) for name in ("latents_mean", "latents_std"))
        usual = config.get("shift_factor") or 0.0, 1.0
        mean, std = (torch.as_tensor([default] if each is None else each, dtype=torch.float32, device=device)
                     for each, default in zip(found, usual, strict=True))  # fmt: skip
        std = std / self.factor
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)

    def _pixels(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation, [3, 1, 1] each, of pixels in −1…1; None where the VAE takes these."""
        found = _PIXELS.get(type(self.model).__name__)
        if found is None:
            return None
        mean, std = (torch.tensor(each).to(like).view(3, 1, 1) for each in found)
        return 2 * mean - 1, 2 * std

    @torch.no_grad()
    def encode(
        self,
        frames: Tensor,
        shown: Tensor | None = None,
        drawn: int | None = None,
        *,
        black: bool = False,
        noise: Tensor | None = None,
    ) -> Tensor:
        """frames: uint8 [B, T, H, W, 3], and which of them are shown [B, T] → latents [B, C, t, h, w]."""
        # Before the model is given its work, for which a copy from the host would wait.
        mean, std = self.statistics(frames.device)
        moments = self._pixels(mean)
        # Some keep their encoder in fp32, whatever the others are in.
        dtype = next(self.model.encoder.parameters()).dtype
        pixels = []
        # One by one, so that the values do not depend on which clips come together.
        for row in range(len(frames)):
            one = slice(row, row + 1)
            of_one = (None if each is None else each[one] for each in (shown, noise))
            unit = _to_unit(frames[one], torch.float32, next(of_one), black, next(of_one))
            if moments is not None:
                unit = (unit - moments[0]) / moments[1]
            pixels.append(unit.to(dtype).transpose(1, 2))
        # The mode, or a draw of one seed: every epoch, and every rank, sees the same latents of a clip.
        latents = torch.cat([self._encoded(clip, drawn).float() for clip in pixels])
        return (latents - mean) / std

    def _encoded(self, clip: Tensor, drawn: int | None) -> Tensor:
        """[1, 3, T, H, W] → [1, C, t, h, w]; a draw of this seed is rounded to fp16."""
        is_of_pictures = type(self.model).__name__ in (_OF_PICTURES, _OF_FRAMES)
        found = self.model.encode(clip[0].transpose(0, 1) if is_of_pictures else clip).latent_dist
        rng = None if drawn is None else torch.Generator().manual_seed(drawn)
        latents: Tensor = found.mode() if rng is None else found.sample(rng).half()
        return latents.transpose(0, 1)[None] if is_of_pictures else latents

    def _decoded(self, latents: Tensor) -> Tensor:
        """[1, C, t, h, w] → [1, T, 3, H, W]."""
        name, more = type(self.model).__name__, list[Any]()
        if name in (_OF_PICTURES, _OF_FRAMES):
            if name == _OF_FRAMES:
                # How many of the pictures are of one clip.
                more = [latents.size(2)]
            frames: Tensor = self.model.decode(latents[0].transpose(0, 1), *more).sample
            return frames[None]
        if self.model.config.get("timestep_conditioning"):
            # Such a decoder also takes noise away (LTX-Video 0.9.1); at 0 there is none.
            more = [torch.zeros(1, dtype=latents.dtype, device=latents.device)]
        clip: Tensor = self.model.decode(latents, *more).sample
        return clip if name == _TILED else clip.transpose(1, 2)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """latents: [B, C, t, h, w] → frames: uint8 [B, T, H, W, 3]."""
        mean, std = self.statistics(latents.device)
        latents = (latents * std.to(latents) + mean.to(latents)).to(self.model.dtype)
        # One by one too: no more memory than training has taken to encode them.
        frames = (self._decoded(clip) for clip in latents.split(1))
        moments = self._pixels(mean)
        if moments is not None:
            frames = (each.float() * moments[1] + moments[0] for each in frames)
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
    num_latents = codec.latent_frames.num_latents(num_frames)
    for name, size, (least, more) in zip(("height", "width"), (height, width), codec.sides, strict=True):
        check_multiple(f"data.{name}", size, more, "the codec", 0 if least == more else least)
    return (
        codec.channels,
        num_latents,
        height // codec.spatial,
        width // codec.spatial,
    )


def check_multiple(name: str, size: int, unit: int, reason: str, least: int = 0) -> None:
    """Checks that `size` is a multiple of `unit`; or `least`, or a multiple of `unit` more than that.

    Raises:
        ValueError: it is not; the message has the sizes that would do.
    """
    more, rest = divmod(size - least, unit)
    if more < 0 or rest:
        fitting = sorted({least + max(0, each) * unit for each in (more, more + 1)} - {0})
        rule = f"{least} more than a multiple of {unit}" if least else f"a multiple of {unit}"
        if least > unit:
            rule = f"{least}, or a multiple of {unit} more,"
        choices = " or ".join(map(str, fitting))
        raise ValueError(f"{name} ({size}) must be {rule} for {reason}; use {choices}")


def _to_unit(
    frames: Tensor, dtype: torch.dtype, shown: Tensor | None, black: bool = False, noise: Tensor | None = None
) -> Tensor:
    """uint8 [B, T, H, W, 3] to [B, T, 3, H, W] in −1…1; 0, or −1, for frames that are not shown, bool [B, T].

    noise: [B, T, 3, H, W], added where a pixel is not −1.
    """
    pixels = frames.permute(0, 1, 4, 2, 3).to(dtype) / 127.5 - 1
    if shown is not None:
        pixels = torch.where(shown[..., None, None, None].to(pixels.device), pixels, -1.0 if black else 0.0)
    return pixels if noise is None else torch.where(pixels == -1, pixels, pixels + noise.to(pixels))


def _to_bytes(pixels: Tensor) -> Tensor:
    """[B, T, 3, H, W] in −1…1 to uint8 [B, T, H, W, 3] on the host."""
    return ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 1, 3, 4, 2).cpu()
