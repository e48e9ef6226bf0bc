"""What the model sees of a clip's first frame beside its latents: the states of a CLIP image encoder, which is frozen.

Wan 2.1's image-to-video models attend to them as to the text. For a clip of which the first frame is given:

    frame [H, W, 3] ──► shortest side to 224, cropped to 224 × 224, normalised ──► CLIP, layer before the last
                    ──► states [257, 1280]: one for the picture and one for each of 16 × 16 patches

A clip whose first frame is not given has zeros. Sizes are those of the encoder; the small one has 5 states.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_accel.documents import read_text
from opensora_accel.training.pretrained import (
    PRETRAINED_DTYPES,
    load_pretrained,
    read_description,
    unloadable,
)
from opensora_accel.training.sections import ImageConfig

IMAGE_STEM = "model"
# In files of transformers before version 5 every name begins with it.
_PREFIX = "vision_model."
_PROCESSOR = "preprocessor_config.json"
# Pixels a side of a picture, and of a patch, for the small encoder.
_SMALL, _SMALL_PATCH = 32, 16


class PictureEncoder:
    """A frozen CLIP image encoder and what prepares pictures for it. Nothing is fetched."""

    def __init__(self, processor: Any, model: Any):
        self.processor = processor
        self.model = model.eval().requires_grad_(False)
        self.num_states, self.width = _shape_of(model.config.to_dict())

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] → states [B, N, width], in the encoder's type."""
        states = []
        # One by one, so that the values do not depend on which pictures come together.
        for picture in pictures:
            pixels = self.processor(images=picture.cpu().numpy(), return_tensors="pt")["pixel_values"]
            out = self.model(
                pixel_values=pixels.to(pictures.device, self.model.dtype), output_hidden_states=True
            )
            states.append(out.hidden_states[-2])
        return torch.cat(states)


def build_picture_encoder(
    config: ImageConfig, seed: int, device: torch.device, dtype: torch.dtype, *, outline: bool = False
) -> PictureEncoder:
    """The encoder from `config.path` in `config.dtype`, or a small, randomly initialised one in `dtype`.

    Args:
        outline: of an encoder from `config.path`, only its sizes; it takes no memory, and cannot compute.

    Raises:
        FileNotFoundError, ValueError: `config.path` holds no CLIP image encoder with what prepares its pictures.
    """
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    cls: Any = CLIPVisionModel
    if config.path:
        description = _description(config)
        settings = read_processor(config)
        try:
            processor = CLIPImageProcessorPil.from_dict(settings)
        except Exception as error:
            raise unloadable(CLIPImageProcessorPil, "image.path", config.path, error) from error
        model = load_pretrained(
            cls,
            lambda: cls(CLIPVisionConfig.from_dict(description)),
            "image.path",
            config.path,
            IMAGE_STEM,
            PRETRAINED_DTYPES[config.dtype],
            None if outline else device,
            prefix=_PREFIX,
        )
        return PictureEncoder(processor, model)
    side = {"height": _SMALL, "width": _SMALL}
    processor = CLIPImageProcessorPil(size={"shortest_edge": _SMALL}, crop_size=side)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = cls(CLIPVisionConfig(**_small(config)))
    return PictureEncoder(processor, model.to(device, dtype))


def picture_shape(config: ImageConfig) -> tuple[int, int]:
    """States of a picture and their width, [N, width], of the encoder that `build_picture_encoder` gives."""
    return _shape_of(_description(config) if config.path else _small(config))


def read_processor(config: ImageConfig) -> dict[str, Any]:
    """How pictures are prepared: the settings that lie in the encoder's own folder, or beside it as diffusers has it.

    Raises:
        FileNotFoundError: there are none.
        ValueError: they are damaged.
    """
    own, absolute = Path(config.path), Path(os.path.abspath(config.path))
    beside = absolute.with_name(absolute.name.replace("image_encoder", "image_processor"))
    for folder in (own, beside):
        path = folder / _PROCESSOR
        if path.is_file():
            try:
                settings = json.loads(read_text(path))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"image.path {own}: its {_PROCESSOR} is damaged ({error})") from error
            if isinstance(settings, dict):
                return settings
    raise FileNotFoundError(
        f"image.path {own} does not say how pictures are prepared: there is no {_PROCESSOR} in it"
        f"{f' or in {beside}' if beside != absolute else ''}; put the file of its image processor there"
    )


def _description(config: ImageConfig) -> dict[str, Any]:
    description = read_description("image.path", config.path, "a CLIP image encoder")
    kind = description.get("model_type")
    sizes = [description.get(name) for name in ("hidden_size", "image_size", "patch_size")]
    if kind != "clip_vision_model" or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(
            f"image.path {config.path} holds a {kind!r} model; the encoder used here is clip_vision_model, as "
            "image_encoder of Wan 2.1's image-to-video models"
        )
    return description


def _small(config: ImageConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.width,
        "intermediate_size": 2 * config.width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": _SMALL,
        "patch_size": _SMALL_PATCH,
    }


def _shape_of(sizes: dict[str, Any]) -> tuple[int, int]:
    return (sizes["image_size"] // sizes["patch_size"]) ** 2 + 1, sizes["hidden_size"]
