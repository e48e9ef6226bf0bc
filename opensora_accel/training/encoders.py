"""What the model sees of a clip: pixels as latents, and captions as embeddings. Neither encoder is trained.

Example with `codec.patch` 2: a clip of 5 × 32 × 56 pixels becomes latents of 12 channels and 5 × 16 × 28
positions, because every square of 2 × 2 pixels with 3 colours becomes one position.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora_accel.training.pretrained import load_pretrained, read_description, unloadable
from opensora_accel.training.sections import CodecConfig, TextConfig

# How the libraries name the files of weights.
VAE_STEM, TEXT_STEM = "diffusion_pytorch_model", "model"
PRETRAINED_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

# Pixels to latents


# [C, t, h, w] of a clip.
LatentShape = tuple[int, int, int, int]


class Codec(Protocol):
    # Channels of a latent.
    channels: int
    # Pixels along each side of a latent position.
    spatial: int
    # Frames per latent frame, after the first.
    temporal: int

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


# Captions to embeddings

# The encoder leaves padding out of its attention, and what it gives there becomes zero; it attends to it, and that
# becomes zero; or it stays, and the model sees it.
Padding = Literal["unseen", "zeroed", "kept"]

_VOCABULARY = 2048
_VOCABULARIES = ("tokenizer.json", "spiece.model")
# Captions, and words, that are looked at.
_TOLD_APART = 1000


class TextEncoder:
    """A frozen T5 encoder and its tokenizer. Nothing is fetched.

    Args:
        padding: what is made of the padding of a caption, which differs among families.
    """

    def __init__(self, tokenizer: Any, model: Any, length: int, *, padding: Padding = "unseen"):
        self.tokenizer, self.length, self.padding = tokenizer, length, padding
        self.model = model.eval().requires_grad_(False)

    @property
    def width(self) -> int:
        return self.model.config.d_model

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in, and what its embeddings have without loss."""
        return self.model.dtype

    def tokens(self, caption: str) -> tuple[Tensor, Tensor]:
        """What the model is given for a caption: ids [1, length] and a mask [1, length] that is 0 behind its end."""
        tokens = self.tokenizer(
            [caption], padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )
        return tokens["input_ids"], tokens["attention_mask"]

    @torch.no_grad()
    def encode(self, captions: Sequence[str], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Embeddings [B, length, width] of B captions; zero behind the end of a caption, unless padding is kept."""
        states = []
        # One by one, so that the values do not depend on which captions come together.
        for caption in captions:
            ids, mask = (each.to(device) for each in self.tokens(caption))
            seen = mask if self.padding == "unseen" else None
            of_caption = self.model(input_ids=ids, attention_mask=seen).last_hidden_state.to(dtype)
            states.append(of_caption if self.padding == "kept" else of_caption * mask.unsqueeze(-1).to(dtype))
        return torch.cat(states)

    def num_tokens(self, captions: Sequence[str]) -> list[int]:
        """How many tokens of each caption the model sees: its own, or, where padding is kept, all."""
        if self.padding == "kept":
            return [self.length] * len(captions)
        return list(
            map(len, self.tokenizer(list(captions), truncation=True, max_length=self.length)["input_ids"])
        )

    def check(self, captions: Iterable[str]) -> None:
        """Checks that the captions say something to the model.

        Raises:
            ValueError: different words, or different captions, all become the same tokens, or tokens that the encoder
                does not have.
        """
        different = sorted({caption for caption in captions if caption.strip()})[:_TOLD_APART]
        words = sorted({word for caption in different for word in caption.split()})[:_TOLD_APART]
        if not words:
            return
        of_words = self.tokenizer(words)["input_ids"]
        largest, size = max(max(ids, default=0) for ids in of_words), self.model.config.vocab_size
        if largest >= size:
            raise ValueError(
                f"the tokenizer is of another encoder: it gives token {largest} where the encoder has {size}; "
                "give a --text.path whose tokenizer and encoder belong together"
            )
        # One token is left of any word where there is a mark for its beginning; the rest is <unk>, and special.
        known = {token for ids in of_words for token in ids} - set(self.tokenizer.all_special_ids)
        if len(words) > 1 and len(known) <= 1:
            raise ValueError(
                f"the tokenizer knows none of the {len(words)} words in the captions: {words[-1]!r} becomes "
                f"{self.tokenizer.convert_ids_to_tokens(of_words[-1])}, and the others the like; give a --text.path "
                "with the whole tokenizer"
            )
        of_captions = self.tokenizer(different, truncation=True, max_length=self.length)["input_ids"]
        if len(different) > 1 and len(set(map(tuple, of_captions))) == 1:
            raise ValueError(
                f"all captions are the same in their first {self.length} tokens, and longer ones are cut there; raise "
                "--text.length, or let the captions begin with what tells them apart"
            )


def build_text_encoder(
    config: TextConfig,
    tokenizer_json: str,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    padding: Padding = "unseen",
    outline: bool = False,
) -> TextEncoder:
    """The encoder from `config.path`; without one a small, randomly initialised T5 over `tokenizer_json`.

    A pretrained one has `config.dtype`. The small one has `dtype`, that of the run: it is drawn and not published, its
    size is nothing, and so a run in fp64 has no rounding in it.

    Args:
        padding: as in `TextEncoder`.
        outline: of an encoder from `config.path`, only its tokenizer and sizes; it takes no memory, and cannot compute.

    Raises:
        FileNotFoundError, ValueError: `config.path` holds no encoder with its tokenizer.
    """
    if config.path:
        return _load(config, None if outline else device, padding)
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: Any = T5EncoderModel(
            T5Config(
                vocab_size=len(tokenizer),
                d_model=config.width,
                d_kv=max(8, config.width // 4),
                d_ff=2 * config.width,
                num_layers=2,
                num_heads=4,
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
            )
        )
    return TextEncoder(tokenizer, model.to(device, dtype), config.length, padding=padding)


def train_tokenizer(captions: Sequence[str]) -> str:
    """A BPE tokenizer over these captions, as the JSON of the `tokenizers` library.

    BPE, because a seed must give one run: the Unigram and WordPiece trainers of tokenizers 0.23 give another
    vocabulary each time (three runs, three results, 2026-11).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(sorted(set(captions)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer.to_str()


def text_width(config: TextConfig) -> int:
    """Embedding width of the encoder that `build_text_encoder` gives, without loading it."""
    return config.width if not config.path else int(_description(config)["d_model"])


def _description(config: TextConfig) -> dict[str, Any]:
    description = read_description("text.path", config.path, "a T5 or UMT5 encoder")
    kind = description.get("model_type")
    if kind not in ("t5", "umt5") or not isinstance(description.get("d_model"), int):
        raise ValueError(
            f"text.path {config.path} holds a {kind!r} model; the encoders used here are t5 and umt5"
        )
    return description


def _load(config: TextConfig, device: torch.device | None, padding: Padding) -> TextEncoder:
    from transformers import AutoTokenizer, T5EncoderModel, UMT5EncoderModel

    classes: dict[str, Any] = {"t5": T5EncoderModel, "umt5": UMT5EncoderModel}
    description = _description(config)
    cls = classes[description["model_type"]]
    # Its tokenizer lies in the encoder's own folder, or beside it: diffusers has text_encoder and tokenizer,
    # text_encoder_2 and tokenizer_2.
    own, absolute = Path(config.path), Path(os.path.abspath(config.path))
    beside = absolute.with_name(absolute.name.replace("text_encoder", "tokenizer"))
    # Without these files transformers makes a tokenizer all the same, of nothing but <unk>.
    places = [place for place in (own, beside) if any((place / name).is_file() for name in _VOCABULARIES)]
    if not places:
        raise FileNotFoundError(
            f"text.path {own} has no tokenizer: there is no {' or '.join(_VOCABULARIES)} in it"
            f"{f' or in {beside}' if beside != absolute else ''}; put the files of its tokenizer there"
        )
    folder = places[0]
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise unloadable(AutoTokenizer, "text.path", folder, error) from error

    def make() -> Any:
        return cls(cls.config_class.from_dict(description))

    dtype = PRETRAINED_DTYPES[config.dtype]
    return TextEncoder(
        tokenizer,
        load_pretrained(cls, make, "text.path", config.path, TEXT_STEM, dtype, device),
        config.length,
        padding=padding,
    )
