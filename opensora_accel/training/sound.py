"""The sound of clips becomes latents, by an audio VAE that is not trained or by folding it, and latents become sound.

A clip of 49 frames at 24 a second lasts 2.04 seconds. Latents of sound come 25 a second, so it has 51 of them:

    without a VAE    8,000 samples a second, 320 to a position: 16,320 samples → latents [20, 51, 16]
    LTX-2's VAE      16,000 a second, 640 to a position: 32,640 samples of two channels → a log-mel spectrogram of
                     201 × 64, of which 4 × 4 become a position → latents [8, 51, 16] → its vocoder → 24,000 a second

The spectrogram is the one that LTX-2's VAE was trained on (ltx_core/model/audio_vae/ops.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora_accel.training.codec import VAE_STEM
from opensora_accel.training.pretrained import load_pretrained, read_description, with_defaults
from opensora_accel.training.sections import CodecConfig

# Spectra, or folded samples, that become one position.
FRAMES_PER_LATENT = 4
_VAES = ("AutoencoderKLLTX2Audio",)
_VOCODERS = ("LTX2Vocoder", "LTX2VocoderWithBWE")
# Samples of a spectrum, and the least that a band counts; the VAE's config does not say them.
_SPECTRUM, _LEAST = 1024, 1e-5
# Speech is well below full scale: so its samples come near unit variance.
_LOUDER = 4.0


class EncodedSound(NamedTuple):
    """The sound of B clips."""

    # [B, C, L, M]; silence of clips without sound.
    latents: Tensor
    # Bool [B], whether a clip has sound.
    is_there: Tensor


@dataclass(frozen=True)
class SoundShape:
    """How sound is read, and what its latents are."""

    # Samples a second, and 1 or 2 channels of them.
    rate: int
    num_channels: int
    # Samples from one spectrum to the next.
    hop: int
    # C and M of latents [C, L, M].
    channels: int
    bins: int

    def num_latents(self, seconds: float) -> int:
        """L of so many seconds."""
        return max(1, round(seconds * (self.rate / (self.hop * FRAMES_PER_LATENT))))

    def num_samples(self, seconds: float) -> int:
        """How many samples each channel has, for the latents of so many seconds."""
        return self.num_latents(seconds) * self.hop * FRAMES_PER_LATENT

    def latents(self, seconds: float) -> tuple[int, int, int]:
        """[C, L, M] of so many seconds."""
        return self.channels, self.num_latents(seconds), self.bins


_FOLDED = SoundShape(8000, 1, 80, 20, 16)


class SoundCodec(Protocol):
    shape: SoundShape

    def encode(self, samples: Tensor) -> Tensor:
        """Samples [B, channels, n] in −1…1, n those of whole latents, to latents [B, C, L, M] in fp32 or more."""
        ...

    def decode(self, latents: Tensor) -> tuple[Tensor, int]:
        """Latents to samples [B, channels, n] on the host, and how many a second has."""
        ...


class FoldedSound:
    """Every 320 samples become the numbers of one position, and nothing is trained."""

    shape = _FOLDED

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def encode(self, samples: Tensor) -> Tensor:
        """samples: [B, 1, n] → latents [B, C, L, M]."""
        shape = self.shape
        folded = samples.to(self.dtype).squeeze(1).unflatten(1, (-1, shape.channels, shape.bins))
        return _LOUDER * folded.transpose(1, 2)

    def decode(self, latents: Tensor) -> tuple[Tensor, int]:
        """latents: [B, C, L, M] → samples [B, 1, n], 8,000 a second."""
        samples = latents.transpose(1, 2).flatten(1).float() / _LOUDER
        return samples.clamp(-1, 1).unsqueeze(1).cpu(), self.shape.rate


class SoundVAE:
    """An audio VAE of diffusers, frozen, its latents normalised by the statistics among its weights.

    Args:
        vocoder: gives what makes samples of spectrograms; it is asked when something is decoded.
    """

    def __init__(self, model: Any, vocoder: Callable[[], Any]):
        from transformers.audio_utils import mel_filter_bank

        self.model, self._vocoder = model.eval().requires_grad_(False), vocoder
        self.shape = _shape_of(model.config)
        config = model.config
        filters = mel_filter_bank(
            _SPECTRUM // 2 + 1,
            config["mel_bins"],
            0.0,
            config["sample_rate"] / 2,
            config["sample_rate"],
            norm="slaney",
            mel_scale="slaney",
        )
        # [frequencies, bands]
        self._filters = torch.from_numpy(filters)

    def spectrogram(self, samples: Tensor) -> Tensor:
        """samples: [B, channels, n] → the logarithms of bands [B, channels, spectra, bands], in fp32 or more."""
        num_samples = samples.size(2)
        samples = F.pad(samples, (0, max(0, _SPECTRUM - num_samples)))
        spectra = torch.stft(
            samples.flatten(0, 1),
            _SPECTRUM,
            self.shape.hop,
            window=torch.hann_window(_SPECTRUM, dtype=samples.dtype, device=samples.device),
            pad_mode="reflect",
            return_complex=True,
        )
        # [B · channels, frequencies, spectra] → [B, channels, spectra, bands]
        bands = spectra.abs().transpose(1, 2) @ self._filters.to(samples)
        bands = bands.clamp(min=_LEAST).log().unflatten(0, samples.shape[:2])
        # The first position is of one spectrum, and each other one of four.
        num_latents = num_samples // (self.shape.hop * FRAMES_PER_LATENT)
        return bands[:, :, : FRAMES_PER_LATENT * (num_latents - 1) + 1]

    @torch.no_grad()
    def encode(self, samples: Tensor) -> Tensor:
        """samples: [B, channels, n] → latents [B, C, L, M]."""
        mean, std = self._statistics()
        bands = self.spectrogram(samples if samples.dtype == torch.float64 else samples.float())
        # One by one, so that the values do not depend on which clips come together.
        latents = [self.model.encode(each.to(self.model.dtype)).latent_dist.mode() for each in bands.split(1)]
        return (torch.cat(latents) - mean) / std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> tuple[Tensor, int]:
        """latents: [B, C, L, M] → samples [B, channels, n] of the vocoder."""
        mean, std = self._statistics()
        vocoder = self._vocoder()
        latents = latents.to(mean) * std + mean
        samples = [vocoder(self.model.decode(each).sample).float().cpu() for each in latents.split(1)]
        return torch.cat(samples).clamp(-1, 1), int(vocoder.config["output_sampling_rate"])

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of latents, [1, C, 1, M] each: one for each number of a position."""
        mean, std = (
            each.view(1, self.shape.channels, 1, self.shape.bins)
            for each in (self.model.latents_mean, self.model.latents_std)
        )
        return mean, std


def build_sound_codec(
    config: CodecConfig, device: torch.device, dtype: torch.dtype, *, outline: bool = False
) -> SoundCodec:
    """The codec of sound of a configuration: a VAE in fp32, as it was trained, and what folds samples in `dtype`.

    Args:
        outline: of a VAE, only what its sizes are; it takes no memory, and cannot compute.

    Raises:
        FileNotFoundError, ValueError: `codec.sound_path` holds no audio VAE, or lies beside no vocoder.
    """
    if not config.sound_path:
        return FoldedSound(dtype)
    path, beside = config.sound_path, Path(os.path.abspath(config.sound_path)).with_name("vocoder")
    vocoder = partial(_load, "the vocoder of codec.sound_path,", str(beside), _VOCODERS)
    # Whatever is wrong with it is found before anything is trained: without memory, all of its weights are there.
    vocoder(None)
    return SoundVAE(
        _load("codec.sound_path", path, _VAES, None if outline else device), partial(vocoder, device)
    )


def sound_shape(config: CodecConfig) -> SoundShape:
    """That of the codec that `build_sound_codec` gives.

    Raises:
        FileNotFoundError, ValueError: `codec.sound_path` holds no audio VAE.
    """
    if not config.sound_path:
        return _FOLDED
    return _shape_of(_class_of("codec.sound_path", config.sound_path, _VAES)[1])


def _shape_of(config: Any) -> SoundShape:
    """The shape that a VAE's configuration gives.

    Raises:
        ValueError: it is none of sound in one or two channels.
    """
    names = ("sample_rate", "in_channels", "mel_hop_length", "latent_channels", "mel_bins")
    values = {name: config.get(name) for name in names}
    wrong = [name for name, value in values.items() if not isinstance(value, int) or value < 1]
    if wrong or values["in_channels"] > 2 or values["mel_bins"] % FRAMES_PER_LATENT:
        raise ValueError(
            f"codec.sound_path holds a VAE of {values}, and it takes one of 1 or 2 channels whose bands are a multiple "
            f"of {FRAMES_PER_LATENT}; copy audio_vae of the model's pipeline again, whole"
        )
    bins = values["mel_bins"] // FRAMES_PER_LATENT
    return SoundShape(
        values["sample_rate"],
        values["in_channels"],
        values["mel_hop_length"],
        values["latent_channels"],
        bins,
    )


def _load(option: str, folder: str, classes: tuple[str, ...], device: torch.device | None) -> Any:
    cls, description = _class_of(option, folder, classes)
    make = partial(cls.from_config, description)
    return load_pretrained(cls, make, option, folder, VAE_STEM, torch.float32, device)


def _class_of(option: str, folder: str, classes: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """The class of diffusers of the model in a folder, and its whole configuration."""
    import diffusers
    from diffusers.pipelines import ltx2

    what = " or ".join(classes)
    description = read_description(option, folder, f"a diffusers {what}")
    name = description.get("_class_name")
    if name not in classes:
        raise ValueError(f"{option} {folder} holds {name!r}; it takes a {what}")
    cls = getattr(diffusers, name, None) or getattr(ltx2, name)
    return cls, with_defaults(cls, description)
