"""Published models by name: class, arguments, codec and text encoder, each with its source.

A clip of 81 × 720 × 1280 in Wan's codec, which keeps every 4th frame and every 8th pixel, has 21 × 90 × 160 latents;
with patches of 1 × 2 × 2 that is 21 × 45 × 80 = 75,600 tokens.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.planner.candidates import Frozen
from opensora_accel.planner.workload import Workload, workload_of_model

# Encoders of captions, as transformers builds them: numbers of parameters. LLaMA is the one of LLaVA, without its head.
_UMT5_XXL = {"UMT5-XXL": 5_680_910_336}
_T5_XXL = {"T5-XXL": 4_762_310_656}
_LLAMA_AND_CLIP = {"LLaMA 3 8B": 7_505_186_816, "CLIP-L": 123_060_480}
# As pipelines and this trainer load what does not train.
_FROZEN_DTYPE = torch.bfloat16
PARTS = ("text_encoder", "vae")
"""What may lie on the device beside a published model: fields of `PublishedModel`."""


@dataclass(frozen=True)
class Clip:
    """Sizes of a batch, in latents and tokens: [B, C, T, H, W] and [B, text_tokens, width]."""

    batch: int
    channels: int
    frames: int
    height: int
    width: int
    text_tokens: int

    def latents(self, dtype: torch.dtype) -> Tensor:
        """[B, C, T, H, W]."""
        return torch.randn(self.batch, self.channels, self.frames, self.height, self.width, dtype=dtype)

    def text(self, width: int, dtype: torch.dtype) -> Tensor:
        """[B, text_tokens, width]."""
        return torch.randn(self.batch, self.text_tokens, width, dtype=dtype)

    def time(self) -> Tensor:
        """[B]."""
        return torch.full((self.batch,), 500.0)


Inputs = Callable[[Clip, nn.Module, torch.dtype], dict[str, Any]]


def _wan(clip: Clip, _model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_states": clip.latents(dtype),
        "timestep": clip.time(),
        "encoder_hidden_states": clip.text(4096, dtype),
        "return_dict": False,
    }


def _hunyuan_video(clip: Clip, _model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_states": clip.latents(dtype),
        "timestep": clip.time(),
        "encoder_hidden_states": clip.text(4096, dtype),
        "encoder_attention_mask": torch.ones(clip.batch, clip.text_tokens, dtype=torch.int64),
        "pooled_projections": torch.randn(clip.batch, 768, dtype=dtype),
        "guidance": torch.full((clip.batch,), 6000.0),
        "return_dict": False,
    }


def _ltx_video(clip: Clip, _model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    # It takes tokens, which are its latents one by one.
    tokens = clip.latents(dtype).flatten(2).transpose(1, 2).contiguous()
    return {
        "hidden_states": tokens,
        "encoder_hidden_states": clip.text(4096, dtype),
        "timestep": clip.time(),
        "encoder_attention_mask": torch.ones(clip.batch, clip.text_tokens, dtype=torch.int64),
        "num_frames": clip.frames,
        "height": clip.height,
        "width": clip.width,
        "return_dict": False,
    }


def _cogvideox(clip: Clip, model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    config: Any = model.config
    given = {
        "hidden_states": clip.latents(dtype).transpose(1, 2).contiguous(),
        "encoder_hidden_states": clip.text(4096, dtype),
        "timestep": clip.time(),
        "return_dict": False,
    }
    if config.use_rotary_positional_embeddings:
        tokens = clip.frames * clip.height * clip.width // config.patch_size**2
        given["image_rotary_emb"] = tuple(torch.randn(tokens, config.attention_head_dim) for _ in range(2))
    return given


@dataclass(frozen=True)
class PublishedModel:
    """How a model was published."""

    # A class of diffusers.
    class_name: str
    arguments: Mapping[str, Any]
    source: str
    inputs: Inputs
    # What the codec makes: latent channels, frames and pixels to one latent.
    channels: int
    temporal: int
    spatial: int
    # Latents to one token: time, height, width.
    patch: tuple[int, int, int]
    text_tokens: int
    heads: int
    # Numbers of parameters by name; neither trains.
    text_encoder: Mapping[str, int]
    vae: Mapping[str, int]

    def build(self) -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, self.class_name)(**self.arguments)
        return model

    def frozen(self, part: str) -> Frozen:
        """The weights of its text encoder or VAE. `part` is one of `PARTS`."""
        sizes: Mapping[str, int] = getattr(self, part)
        sizes_text = ", ".join(f"{name} {number / 1e9:.2f}" for name, number in sizes.items())
        source = (
            f"{sizes_text} billion parameters in bf16, as its class of transformers or diffusers has them"
        )
        return Frozen(sum(sizes.values()) * _FROZEN_DTYPE.itemsize, source)

    def clip(self, frames: int, height: int, width: int, batch: int, text_tokens: int) -> Clip:
        """In latents.

        Raises:
            ValueError: sizes that the codec or the model's patches do not take, with the nearest that they do.
        """
        for name, value in (
            ("frames", frames),
            ("height", height),
            ("width", width),
            ("batch", batch),
            ("text tokens", text_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if (frames - 1) % self.temporal:
            less = frames - (frames - 1) % self.temporal
            raise ValueError(
                f"frames ({frames}) must be a multiple of {self.temporal} and one more, for the codec; use {less} or "
                f"{less + self.temporal}"
            )
        for name, value, patch in (("height", height, self.patch[1]), ("width", width, self.patch[2])):
            unit = self.spatial * patch
            if value % unit:
                less = value // unit * unit
                nearest = f"{less} or {less + unit}" if less else str(unit)
                raise ValueError(
                    f"{name} ({value}) must be divisible by codec ({self.spatial}) × patch ({patch}) = {unit}; use "
                    f"{nearest}"
                )
        latent_frames = (frames - 1) // self.temporal + 1
        if latent_frames % self.patch[0]:
            raise ValueError(
                f"{frames} frames are {latent_frames} latent ones, which the model's patches of {self.patch[0]} do not "
                f"divide; use {(latent_frames // self.patch[0] * self.patch[0]) * self.temporal + 1} frames"
            )
        return Clip(
            batch, self.channels, latent_frames, height // self.spatial, width // self.spatial, text_tokens
        )


_WAN: dict[str, Any] = {
    "class_name": "WanTransformer3DModel",
    "inputs": _wan,
    "channels": 16,
    "temporal": 4,
    "spatial": 8,
    "patch": (1, 2, 2),
    "text_tokens": 512,
    "text_encoder": _UMT5_XXL,
    "vae": {"Wan 2.1 VAE": 126_892_531},
}
_COGVIDEOX: dict[str, Any] = {
    "class_name": "CogVideoXTransformer3DModel",
    "inputs": _cogvideox,
    "channels": 16,
    "temporal": 4,
    "spatial": 8,
    "patch": (1, 2, 2),
    "text_tokens": 226,
    "text_encoder": _T5_XXL,
    "vae": {"CogVideoX VAE": 215_583_907},
}

MODELS: dict[str, PublishedModel] = {
    "wan2.1-1.3b": PublishedModel(
        arguments={"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        heads=12,
        source="Wan-AI/Wan2.1-T2V-1.3B-Diffusers, transformer/config.json; Wan2.1/wan/configs/wan_t2v_1_3B.py",
        **_WAN,
    ),
    "wan2.1-14b": PublishedModel(
        arguments={"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
        heads=40,
        source="Wan-AI/Wan2.1-T2V-14B-Diffusers, transformer/config.json; Wan2.1/wan/configs/wan_t2v_14B.py",
        **_WAN,
    ),
    "wan2.2-5b": PublishedModel(
        arguments={
            "num_attention_heads": 24,
            "ffn_dim": 14336,
            "num_layers": 30,
            "in_channels": 48,
            "out_channels": 48,
        },
        heads=24,
        source="Wan-AI/Wan2.2-TI2V-5B-Diffusers, transformer/config.json; Wan2.2/wan/configs/wan_ti2v_5B.py",
        **(_WAN | {"channels": 48, "spatial": 16, "vae": {"Wan 2.2 VAE": 704_688_668}}),
    ),
    "hunyuan-video": PublishedModel(
        class_name="HunyuanVideoTransformer3DModel",
        arguments={},
        source="hunyuanvideo-community/HunyuanVideo, transformer/config.json: diffusers' defaults",
        inputs=_hunyuan_video,
        channels=16,
        temporal=4,
        spatial=8,
        patch=(1, 2, 2),
        text_tokens=256,
        heads=24,
        text_encoder=_LLAMA_AND_CLIP,
        vae={"HunyuanVideo VAE": 246_478_803},
    ),
    "ltx-video": PublishedModel(
        class_name="LTXVideoTransformer3DModel",
        arguments={},
        source="Lightricks/LTX-Video, transformer/config.json (2B, 0.9): diffusers' defaults",
        inputs=_ltx_video,
        channels=128,
        temporal=8,
        spatial=32,
        patch=(1, 1, 1),
        text_tokens=128,
        heads=32,
        text_encoder=_T5_XXL,
        vae={"LTX-Video VAE": 419_193_649},
    ),
    "cogvideox-2b": PublishedModel(
        arguments={},
        heads=30,
        source="THUDM/CogVideoX-2b, transformer/config.json: diffusers' defaults",
        **_COGVIDEOX,
    ),
    "cogvideox-5b": PublishedModel(
        arguments={
            "num_attention_heads": 48,
            "num_layers": 42,
            "use_rotary_positional_embeddings": True,
        },
        heads=48,
        source="THUDM/CogVideoX-5b, transformer/config.json",
        **_COGVIDEOX,
    ),
}
"""By the name that `opensora-accel plan --model` takes."""


def named_workload(
    name: str,
    *,
    frames: int,
    height: int,
    width: int,
    batch: int = 1,
    text_tokens: int | None = None,
    **options: Any,
) -> Workload:
    """Training of a published model on clips of a size.

    Args:
        batch: samples of each data rank in one pass.
        text_tokens: of a caption; by default as many as the model was published with.
        options: further fields of `Workload`.

    Raises:
        ValueError: a name that is not known, with the nearest that is; sizes that the model does not take.
    """
    if name not in MODELS:
        nearest = difflib.get_close_matches(name.lower(), MODELS, n=1, cutoff=0.3)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(
            f"no model is called {name!r}; {hint}known are {', '.join(MODELS)}. For any other, write its model_fn and "
            "step into a file: --step FILE.py"
        )
    published = MODELS[name]
    clip = published.clip(frames, height, width, batch, text_tokens or published.text_tokens)
    tokens = clip.frames * clip.height * clip.width
    for size in published.patch:
        tokens //= size
    return workload_of_model(
        name,
        published.build,
        partial(published.inputs, clip),
        batch=batch,
        num_tokens=tokens,
        text_tokens=clip.text_tokens,
        num_heads=published.heads,
        **options,
    )
