"""What the model sees of a clip's first frame beside its latents: the states of an image encoder, which is frozen.

Image-to-video models attend to them as to the text. Of a clip of which the first frame is given Wan 2.1 sees what CLIP
does (`PictureStates` says what others take):

    frame [H, W, 3] ──► shortest side to 224, cropped to 224 × 224, normalised ──► CLIP, layer before the last
                    ──► states [257, 1280]: one for the picture and one for each of 16 × 16 patches

A clip whose first frame is not given has zeros. Sizes are those of the encoder; the small one has 5 states, or 4 where
it is a SigLIP, which has none for the whole picture.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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


@dataclass(frozen=True)
class PictureStates:
    """Which states of which encoder a family takes of a first frame."""

    # Its type, as transformers names it.
    encoder: Literal["clip_vision_model", "siglip_vision_model"] = "clip_vision_model"
    # The layer whose output is taken, −2 the last but one; None is what the encoder gives, behind its last norm.
    layer: int | None = -2
    # How many tokens of text the model counts on behind them; None is any number.
    text_length: int | None = None
    # Whether the model sees a batch either with pictures of all its clips or with none.
    of_all: bool = False


class PictureEncoder:
    """A frozen image encoder and what prepares pictures for it. Nothing is fetched."""

    def __init__(self, processor: Any, model: Any, taken: PictureStates = PictureStates()):
        self.processor, self._layer = processor, taken.layer
        self.model = model.eval().requires_grad_(False)
        self.num_states, self.width = _shape_of(model.config.to_dict(), taken)

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
            states.append(out.last_hidden_state if self._layer is None else out.hidden_states[self._layer])
        return torch.cat(states)


def build_picture_encoder(
    config: ImageConfig,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    taken: PictureStates = PictureStates(),
    *,
    outline: bool = False,
) -> PictureEncoder:
    """The encoder from `config.path` in `config.dtype`, or a small, randomly initialised one in `dtype`.

    Args:
        taken: which states a family takes.
        outline: of an encoder from `config.path`, only its sizes; it takes no memory, and cannot compute.

    Raises:
        FileNotFoundError, ValueError: `config.path` holds no such image encoder with what prepares its pictures.
    """
    import transformers

    family = {"clip_vision_model": "CLIP", "siglip_vision_model": "Siglip"}[taken.encoder]
    names = ("{}VisionModel", "{}VisionConfig", "{}ImageProcessorPil")
    cls, config_cls, processor_cls = (getattr(transformers, name.format(family)) for name in names)
    if config.path:
        description = _description(config, taken)
        settings = read_processor(config)
        try:
            processor = processor_cls.from_dict(settings)
        except Exception as error:
            raise unloadable(processor_cls, "image.path", config.path, error) from error
        model = load_pretrained(
            cls,
            lambda: cls(config_cls.from_dict(description)),
            "image.path",
            config.path,
            IMAGE_STEM,
            PRETRAINED_DTYPES[config.dtype],
            None if outline else device,
            prefixes={_PREFIX: ""},
        )
        return PictureEncoder(processor, model, taken)
    side = {"height": _SMALL, "width": _SMALL}
    sizes: dict[str, Any] = {"size": side}
    if taken.encoder == "clip_vision_model":
        sizes = {"size": {"shortest_edge": _SMALL}, "crop_size": side}
    processor = processor_cls(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = cls(config_cls(**_small(config)))
    return PictureEncoder(processor, model.to(device, dtype), taken)


def picture_shape(config: ImageConfig, taken: PictureStates = PictureStates()) -> tuple[int, int]:
    """States of a picture and their width, [N, width], of the encoder that `build_picture_encoder` gives."""
    return _shape_of(_description(config, taken) if config.path else _small(config), taken)


def read_processor(config: ImageConfig) -> dict[str, Any]:
    """How pictures are prepared: the settings that lie in the encoder's own folder, or beside it as diffusers has it.

    Raises:
        FileNotFoundError: there are none.
        ValueError: they are damaged.
    """
    own, absolute = Path(config.path), Path(os.path.abspath(config.path))
    beside = absolute.with_name(absolute.name.replace("image_encoder", "image_processor"))
    # As HunyuanVideo 1.5 has it.
    extractor = absolute.with_name(absolute.name.replace("image_encoder", "feature_extractor"))
    for folder in (own, beside, extractor):
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
        f"{f', in {beside} or in {extractor}' if beside != absolute else ''}; put the file of its image processor there"
    )


def _description(config: ImageConfig, taken: PictureStates) -> dict[str, Any]:
    description = read_description("image.path", config.path, "an image encoder")
    kind = description.get("model_type")
    sizes = [description.get(name) for name in ("hidden_size", "image_size", "patch_size")]
    if kind != taken.encoder or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(
            f"image.path {config.path} holds a {kind!r} model; the encoder of this family is {taken.encoder}, as "
            "image_encoder of its image-to-video pipeline"
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


def _shape_of(sizes: dict[str, Any], taken: PictureStates) -> tuple[int, int]:
    num_patches = (sizes["image_size"] // sizes["patch_size"]) ** 2
    # CLIP has a state for the whole picture too.
    return num_patches + (taken.encoder == "clip_vision_model"), sizes["hidden_size"]
