"""The sound of clips becomes latents, by an audio VAE that is not trained or by folding it, and latents become sound.

LTX-2 has 25 latents of sound a second, and MiniMax H3 has 40. Of two seconds:

    LTX-2's VAE      16,000 samples a second, 640 to a position: 32,000 of two channels → a log-mel spectrogram of
                     197 × 64, of which 4 × 4 become a position → latents [8, 50, 16] → its vocoder → 24,000 a second
    without it       8,000 a second, 320 to a position: 16,000 samples → latents [20, 50, 16]
    MiniMax H3's     32,000 a second, 800 to a position, each of two channels by itself: 64,000 → latents [32, 80, 2]
    without it       8,000 a second, 200 to a position: 16,000 samples → latents [200, 80, 1]

The spectrogram is the one that LTX-2's VAE was trained on (ltx_core/model/audio_vae/ops.py).
"""

from __future__ import annotations

import math
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

_VOCODERS = ("LTX2Vocoder", "LTX2VocoderWithBWE")
# VAEs of spectrograms, which make 4 spectra of 4 bands one number of a position.
_OF_SPECTRA, _SPECTRA = ("AutoencoderKLLTX2Audio",), 4
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
    # Samples from one spectrum to the next, and spectra that become one position; 1 where samples become it.
    hop: int
    spectra: int
    # C and M of latents [C, L, M].
    channels: int
    bins: int

    @property
    def per_latent(self) -> int:
        """Samples of each channel that become one position."""
        return self.hop * self.spectra

    def num_latents(self, seconds: float) -> int:
        """L of so many seconds."""
        return max(1, round(seconds * (self.rate / self.per_latent)))

    def num_samples(self, seconds: float) -> int:
        """How many samples each channel has, for the latents of so many seconds."""
        return self.num_latents(seconds) * self.per_latent

    def latents(self, seconds: float) -> tuple[int, int, int]:
        """[C, L, M] of so many seconds."""
        return self.channels, self.num_latents(seconds), self.bins


@dataclass(frozen=True)
class SoundTokens:
    """How the models of a family make sound."""

    # The class of its audio VAE.
    vae: str
    # How one channel is folded without it: C · M samples become a position.
    folded: SoundShape
    # Latents [B, C, L, M] → tokens [B, N, width]; and tokens → latents of the shape of those given with them.
    to_tokens: Callable[[Tensor], Tensor]
    from_tokens: Callable[[Tensor, Tensor], Tensor]
    # The time shift of its times, where it is not that of clips.
    shift: float | None = None

    def alpha(self, of_clips: float) -> float:
        """By how much the times of sound are shifted against those of clips, which are shifted by `of_clips`."""
        return 1.0 if self.shift is None else self.shift / of_clips


class SoundCodec(Protocol):
    shape: SoundShape

    def encode(self, samples: Tensor) -> Tensor:
        """Samples [B, channels, n] in −1…1, n those of whole latents, to latents [B, C, L, M] in fp32 or more."""
        ...

    def decode(self, latents: Tensor) -> tuple[Tensor, int]:
        """Latents to samples [B, channels, n] on the host, and how many a second has."""
        ...


class FoldedSound:
    """As many samples as a position has numbers become these, and nothing is trained."""

    def __init__(self, shape: SoundShape, dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype

    def encode(self, samples: Tensor) -> Tensor:
        """samples: [B, 1, n] → latents [B, C, L, M]."""
        shape = self.shape
        folded = samples.to(self.dtype).squeeze(1).unflatten(1, (-1, shape.channels, shape.bins))
        return _LOUDER * folded.transpose(1, 2)

    def decode(self, latents: Tensor) -> tuple[Tensor, int]:
        """latents: [B, C, L, M] → samples [B, 1, n]."""
        samples = latents.transpose(1, 2).flatten(1).float() / _LOUDER
        return samples.clamp(-1, 1).unsqueeze(1).cpu(), self.shape.rate


class SpectrumVAE:
    """LTX-2's audio VAE, of spectrograms; frozen, its latents normalised by the statistics among its weights.

    Args:
        vocoder: gives what makes samples of spectrograms; it is asked when something is decoded.
    """

    def __init__(self, model: Any, vocoder: Callable[[], Any]):
        from transformers.audio_utils import mel_filter_bank

        self.model, self._vocoder = model.eval().requires_grad_(False), vocoder
        self.shape = _shape_of_spectra(model.config)
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
        num_latents = num_samples // self.shape.per_latent
        return bands[:, :, : self.shape.spectra * (num_latents - 1) + 1]

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


class WaveVAE:
    """MiniMax H3's audio VAE, of samples; frozen, its latents normalised by the statistics in its config."""

    def __init__(self, model: Any):
        self.model = model.eval().requires_grad_(False)
        self.shape = _shape_of_waves(model.config)

    @torch.no_grad()
    def encode(self, samples: Tensor) -> Tensor:
        """samples: [B, channels, n] → latents [B, C, L, channels]."""
        mean, std = self._statistics(samples)
        # One by one, so that the values do not depend on which clips come together; channels are a batch.
        latents = [self.model.encode(each.unsqueeze(1)).latent_dist.mode() for each in samples]
        return ((torch.stack(latents) - mean) / std).permute(0, 2, 3, 1)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> tuple[Tensor, int]:
        """latents: [B, C, L, channels] → samples [B, channels, n]."""
        mean, std = self._statistics(latents)
        latents = latents.to(mean).permute(0, 3, 1, 2) * std + mean
        samples = [self.model.decode(each).sample.squeeze(1).float().cpu() for each in latents]
        return torch.stack(samples).clamp(-1, 1), self.shape.rate

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of latents, [C, 1] each."""
        given = (self.model.config[name] for name in ("latents_mean", "latents_std"))
        mean, std = (
            torch.tensor(value, dtype=self.model.dtype, device=like.device).view(-1, 1) for value in given
        )
        return mean, std


def build_sound_codec(
    config: CodecConfig,
    taken: SoundTokens,
    device: torch.device,
    dtype: torch.dtype,
    *,
    outline: bool = False,
) -> SoundCodec:
    """The codec of sound of a configuration: a VAE in fp32, as it was trained, and what folds samples in `dtype`.

    Args:
        taken: how the family makes sound.
        outline: of a VAE, only what its sizes are; it takes no memory, and cannot compute.

    Raises:
        FileNotFoundError, ValueError: `codec.sound_path` holds no audio VAE, or lies beside no vocoder.
    """
    if not config.sound_path:
        return FoldedSound(taken.folded, dtype)
    vae = _load("codec.sound_path", config.sound_path, (taken.vae,), None if outline else device)
    if taken.vae not in _OF_SPECTRA:
        return WaveVAE(vae)
    beside = Path(os.path.abspath(config.sound_path)).with_name("vocoder")
    vocoder = partial(_load, "the vocoder of codec.sound_path,", str(beside), _VOCODERS)
    if device.type != "meta":
        # Whatever is wrong with it is found before anything is trained: without memory, all of its weights are there.
        vocoder(None)
    return SpectrumVAE(vae, partial(vocoder, device))


def sound_shape(config: CodecConfig, taken: SoundTokens) -> SoundShape:
    """That of the codec that `build_sound_codec` gives.

    Raises:
        FileNotFoundError, ValueError: `codec.sound_path` holds no audio VAE.
    """
    if not config.sound_path:
        return taken.folded
    _, description = _class_of("codec.sound_path", config.sound_path, (taken.vae,))
    return (_shape_of_spectra if taken.vae in _OF_SPECTRA else _shape_of_waves)(description)


def _shape_of_waves(config: Any) -> SoundShape:
    """The shape that the configuration of a VAE of samples gives; two channels have M numbers of a position.

    Raises:
        ValueError: it has no statistics of its latents, or not one for each channel.
    """
    channels, rate = config["latent_channels"], config["sampling_rate"]
    for name in ("latents_mean", "latents_std"):
        if not isinstance(config[name], (list, tuple)) or len(config[name]) != channels:
            raise ValueError(
                f"codec.sound_path holds a VAE that does not say the {name} of its {channels} channels; copy audio_vae "
                "of the model's pipeline again, whole"
            )
    return SoundShape(rate, 2, math.prod(config["encoder_rates"]), 1, channels, 2)


def _shape_of_spectra(config: Any) -> SoundShape:
    """The shape that the configuration of a VAE of spectrograms gives.

    Raises:
        ValueError: it is none of sound in one or two channels.
    """
    names = ("sample_rate", "in_channels", "mel_hop_length", "latent_channels", "mel_bins")
    values = {name: config.get(name) for name in names}
    wrong = [name for name, value in values.items() if not isinstance(value, int) or value < 1]
    if wrong or values["in_channels"] > 2 or values["mel_bins"] % _SPECTRA:
        raise ValueError(
            f"codec.sound_path holds a VAE of {values}, and it takes one of 1 or 2 channels whose bands are a multiple "
            f"of {_SPECTRA}; copy audio_vae of the model's pipeline again, whole"
        )
    return SoundShape(
        values["sample_rate"],
        values["in_channels"],
        values["mel_hop_length"],
        _SPECTRA,
        values["latent_channels"],
        values["mel_bins"] // _SPECTRA,
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
