"""Encoders of captions, and their tokenizers: read from a folder, or small ones that are drawn, to try a run out."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opensora_accel.documents import read_json
from opensora_accel.training.captions import (
    VISION_TOKENS,
    InTemplate,
    TextEncoder,
    TextShape,
    TextStates,
    num_picture_tokens,
    width_of,
    width_of_connectors,
)
from opensora_accel.training.codec import VAE_STEM
from opensora_accel.training.llava import LlavaEncoder, picture_states
from opensora_accel.training.pretrained import (
    PRETRAINED_DTYPES,
    load_pretrained,
    read_description,
    unloadable,
    with_defaults,
)
from opensora_accel.training.sections import TextConfig

# How transformers names the files of weights.
TEXT_STEM = "model"
_VOCABULARY = 2048
# Where transformers keeps how frames are prepared: alone, or among what prepares all that an encoder takes.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
# Pixels a side of a frame's token of a small encoder, and the most that a frame has.
_SMALL_SIDE, _SMALL_PIXELS = 16, 16 * 16 * 8
_VOCABULARIES = ("tokenizer.json", "spiece.model", "vocab.json")
# Files that were saved with a head, or by an older release, have one of these before each name, or in the place of what
# the model's own names have there.
_PREFIXES: dict[str, dict[str, str]] = {
    "llama": {"model.": ""},
    "gemma2": {"model.": ""},
    # The reading part of a model that sees pictures too.
    "gemma3_text": dict.fromkeys(("language_model.model.", "model.language_model.", "model."), ""),
    "qwen2_vl_text": dict.fromkeys(("model.language_model.", "language_model.model.", "model."), ""),
    "qwen2_5_vl_text": dict.fromkeys(("model.language_model.", "language_model.model.", "model."), ""),
    "qwen3_vl": {"model.": ""},
    "qwen3_vl_text": dict.fromkeys(("model.language_model.", "language_model.", "model."), ""),
    "clip_text_model": {"text_model.": ""},
    "llava": {
        "language_model.model.": "language_model.",
        "vision_tower.vision_model.": "vision_tower.",
        "model.vision_tower.vision_model.": "vision_tower.",
        "model.": "",
    },
}


def build_text_encoder(
    config: TextConfig,
    tokenizer_json: str,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    taken: Sequence[TextStates] = (TextStates(),),
    number: int = 0,
    *,
    outline: bool = False,
) -> TextEncoder:
    """The encoder of a folder; without one a small, randomly initialised T5 over `tokenizer_json`.

    A pretrained one has `config.dtype`. The small one has `dtype`, that of the run: it is drawn and not published, its
    size is nothing, and so a run in fp64 has no rounding in it.

    Args:
        taken: which states a family takes, of each of its encoders.
        number: which of them, 0 or 1.
        outline: of an encoder from a folder, only its tokenizer and sizes; it takes no memory, and cannot compute.

    Raises:
        FileNotFoundError, ValueError: the folder holds no such encoder with its tokenizer.
    """
    if config.path:
        return _load(config, taken[number], *text_paths(config, taken)[number], None if outline else device)
    return _small(config, taken[number].of_small_encoder, tokenizer_json, seed + number, device, dtype)


def text_paths(config: TextConfig, taken: Sequence[TextStates]) -> list[tuple[str, str]]:
    """Option and folder of each encoder that a family takes states of.

    Raises:
        ValueError: there is one too many, or too few.
    """
    both = ("text.path", config.path), ("text.path_2", config.path_2)
    if taken[0].connectors and not config.path_2:
        raise ValueError(
            f"this model takes what {' or '.join(taken[0].connectors)} makes of the encoder's states; set text.path_2 "
            f"to its folder, as connectors beside {config.path}"
        )
    if len(taken) == 2 and not config.path_2:
        raise ValueError(
            f"this model takes states of two encoders; set text.path_2 to the folder of the second, of type "
            f"{' or '.join(taken[1].encoders)}, as text_encoder_2 beside {config.path}"
        )
    if len(taken) == 1 and config.path_2 and not taken[0].connectors:
        raise ValueError("this model takes states of one encoder; leave text.path_2 out")
    return list(both[: len(taken)])


def text_shapes(config: TextConfig, taken: Sequence[TextStates]) -> list[TextShape]:
    """Of the states of each encoder that `build_text_encoder` gives, without loading one."""
    widths = [config.width * (2 if each.connectors else 1) for each in taken]
    if config.path:
        folders = zip(taken, text_paths(config, taken), strict=True)
        widths = [
            width_of_connectors(_connectors_of(config, each))
            if each.connectors
            else width_of(_config_of(*named, each).get_text_config(), each)
            for each, named in folders
        ]
    return [
        TextShape(1 if each.pooled else each.length or config.length, width)
        for each, width in zip(taken, widths, strict=True)
    ]


def picture_tokens(config: TextConfig, taken: TextStates, height: int, width: int) -> int:
    """The most states that an encoder gives of one frame of this size and what it reads before it.

    No tokenizer is looked at: a token has one character, or more.
    """
    if isinstance(taken.picture, InTemplate):
        sizes = _config_of("text.path", config.path, taken) if config.path else _small_llava(config, 1, 0)
        return -(-picture_states(sizes) // min(taken.picture.step, taken.picture.step_of_empty))
    processor = processor_of(config.path, taken) if config.path else _small_processor()
    return len(taken.picture.format(1)) + 2 + num_picture_tokens(processor, height, width)


def processor_of(path: str, taken: TextStates) -> Any:
    """What prepares frames for the encoder in a folder, whose settings lie in it, or beside it as diffusers has them.

    Raises:
        FileNotFoundError, ValueError: there are none, or they do not work.
    """
    from transformers import CLIPImageProcessorPil, Qwen2VLImageProcessorPil

    cls: Any = Qwen2VLImageProcessorPil
    folder_name = "processor"
    if isinstance(taken.picture, InTemplate):
        cls, folder_name = CLIPImageProcessorPil, "image_processor"
    own, absolute = Path(path), Path(os.path.abspath(path))
    beside = absolute.with_name(absolute.name.replace("text_encoder", folder_name))
    for file in (folder / name for folder in (own, beside) for name in _PROCESSORS):
        if file.is_file():
            settings = read_json(file, dict[str, Any])
            try:
                return cls.from_dict(settings.get("image_processor", settings))
            except Exception as error:
                raise unloadable(cls, "text.path", str(file), error) from error
    raise FileNotFoundError(
        f"text.path {own} does not say how frames that are given are prepared: there is no {' or '.join(_PROCESSORS)} "
        f"in it or in {beside}; copy the folder {folder_name} of the pipeline"
    )


def _small_processor() -> Any:
    from transformers import Qwen2VLImageProcessorPil

    size = {"shortest_edge": _SMALL_SIDE**2, "longest_edge": _SMALL_PIXELS}
    return Qwen2VLImageProcessorPil(size=size, patch_size=_SMALL_SIDE // 2)


def _small(
    config: TextConfig,
    taken: TextStates,
    tokenizer_json: str,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> TextEncoder:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    if isinstance(taken.picture, InTemplate):
        return _small_that_sees_in_template(config, taken, tokenizer, seed, device, dtype)
    if taken.picture:
        return _small_that_sees(config, taken, tokenizer, seed, device, dtype)
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
    return TextEncoder(tokenizer, model.to(device, dtype), taken.length or config.length, taken)


def _small_that_sees(
    config: TextConfig, taken: TextStates, tokenizer: Any, seed: int, device: torch.device, dtype: torch.dtype
) -> TextEncoder:
    """A small Qwen3-VL, in place of the small T5."""
    from transformers import Qwen3VLConfig, Qwen3VLModel

    tokenizer.add_special_tokens({"additional_special_tokens": VISION_TOKENS})
    start, pad, end = tokenizer.convert_tokens_to_ids(VISION_TOKENS)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    reads = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.width,
        "intermediate_size": 2 * config.width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": rope,
    }
    sees = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": config.width,
        "patch_size": _SMALL_SIDE // 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    known = {"image_token_id": pad, "vision_start_token_id": start, "vision_end_token_id": end}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: Any = Qwen3VLModel(Qwen3VLConfig(text_config=reads, vision_config=sees, **known))
    prepared = _small_processor()
    return TextEncoder(
        tokenizer,
        model.to(device, dtype),
        taken.length or config.length,
        taken,
        processor=prepared,
    )


def _small_llava(config: TextConfig, vocabulary: int, image_token: int) -> Any:
    """The configuration of a small LLaVA, of 16 states of a picture."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    sees = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=2 * _SMALL_SIDE,
        patch_size=_SMALL_SIDE // 2,
    )
    reads = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=config.width,
        intermediate_size=2 * config.width,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return LlavaConfig(vision_config=sees, text_config=reads, image_token_index=image_token)


def _small_that_sees_in_template(
    config: TextConfig, taken: TextStates, tokenizer: Any, seed: int, device: torch.device, dtype: torch.dtype
) -> TextEncoder:
    """A small LLaVA, in place of the small T5."""
    from transformers import CLIPImageProcessorPil, LlavaModel

    assert isinstance(taken.picture, InTemplate)
    tokenizer.add_special_tokens({"additional_special_tokens": [taken.picture.token]})
    described = _small_llava(config, len(tokenizer), tokenizer.convert_tokens_to_ids(taken.picture.token))
    side = 2 * _SMALL_SIDE
    processor = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: Any = LlavaModel(described)
    length = taken.length or config.length
    return LlavaEncoder(tokenizer, model.to(device, dtype), length, taken, processor=processor)


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


def _connectors_class(name: str) -> Any:
    from diffusers.pipelines import ltx2

    return getattr(ltx2, name)


def _connectors_of(config: TextConfig, taken: TextStates) -> dict[str, Any]:
    """The configuration of the connectors in `text.path_2`.

    Raises:
        FileNotFoundError, ValueError: there are none of the classes that the family takes, or not for this length.
    """
    what = " or ".join(taken.connectors)
    description = read_description("text.path_2", config.path_2, f"a diffusers {what}")
    if description.get("_class_name") not in taken.connectors:
        name = description.get("_class_name")
        raise ValueError(f"text.path_2 {config.path_2} holds {name!r}; what this model takes is {what}")
    description = with_defaults(_connectors_class(description["_class_name"]), description)
    units = [description[f"{stream}_connector_num_learnable_registers"] for stream in ("video", "audio")]
    if not all(units):
        raise ValueError(
            f"text.path_2 {config.path_2} has learned nothing in place of padding (num_learnable_registers), which no "
            f"published {what} lacks; copy the folder again, whole"
        )
    if config.length % math.lcm(*units):
        raise ValueError(
            f"text.length ({config.length}) must be a multiple of {math.lcm(*units)}, the states that {what} has "
            "learned in place of padding; use 1024, as it was trained"
        )
    return description


def _classes() -> dict[str, Any]:
    """Encoders by the types that transformers gives them."""
    from transformers import (
        CLIPTextModel,
        Gemma2Model,
        Gemma3TextModel,
        LlamaModel,
        LlavaModel,
        Qwen2_5_VLTextModel,
        Qwen2VLTextModel,
        Qwen3VLModel,
        Qwen3VLTextModel,
        T5EncoderModel,
        UMT5EncoderModel,
    )

    return {
        "t5": T5EncoderModel,
        "umt5": UMT5EncoderModel,
        "llama": LlamaModel,
        "llava": LlavaModel,
        "gemma2": Gemma2Model,
        "gemma3_text": Gemma3TextModel,
        "clip_text_model": CLIPTextModel,
        "qwen2_vl_text": Qwen2VLTextModel,
        "qwen2_5_vl_text": Qwen2_5_VLTextModel,
        "qwen3_vl_text": Qwen3VLTextModel,
        "qwen3_vl": Qwen3VLModel,
    }


def _config_of(option: str, folder: str, taken: TextStates) -> Any:
    """The configuration of the encoder in a folder, as its class has it: of the whole where it sees frames too.

    Raises:
        FileNotFoundError, ValueError: there is none of the types that the family takes.
    """
    from transformers import CONFIG_MAPPING

    wanted = " or ".join(taken.encoders)
    description = read_description(option, folder, f"an encoder of type {wanted}")
    kind = description.get("model_type")
    if kind not in taken.encoders:
        raise ValueError(f"{option} {folder} holds a {kind!r} model; what this model takes is {wanted}")
    whole = CONFIG_MAPPING[kind]
    # Of one that sees pictures too the part that reads is taken. Older files have its sizes beside the others.
    cls = _classes()[kind if kind in _classes() else whole.sub_configs["text_config"].model_type]
    try:
        described = whole.from_dict(description)
        config = described.get_text_config()
    except Exception as error:  # whatever it raises for values that do not work
        raise unloadable(cls, option, folder, error) from error
    if taken.picture and config is described:
        raise ValueError(
            f"{option} {folder} holds a {kind!r} model, the part that reads alone, and frames that are given are seen "
            "by the whole; choose text_encoder of the model's pipeline, or leave all of conditions but t2v out"
        )
    if isinstance(taken.layer, int) and config.num_hidden_layers <= taken.layer:
        raise ValueError(
            f"{option} {folder} has {config.num_hidden_layers} layers, and what this model takes is given by the "
            f"{taken.layer}th, below its end; choose the encoder of the model's pipeline"
        )
    if isinstance(taken.layer, int) and taken.layer >= 0:
        # What lies above is read by nobody. One layer more, or the state would be behind the last norm.
        config.num_hidden_layers = taken.layer + 1
    return described if taken.picture else config


def _has_vocabulary(folder: Path) -> bool:
    """Whether there is a tokenizer. Without a vocabulary transformers makes one all the same, of nothing but <unk>."""
    if any((folder / name).is_file() for name in _VOCABULARIES):
        return True
    # One of bytes has none.
    path = folder / "tokenizer_config.json"
    return path.is_file() and read_json(path, dict[str, Any]).get("tokenizer_class") == "ByT5Tokenizer"


def _load(
    config: TextConfig, taken: TextStates, option: str, path: str, device: torch.device | None
) -> TextEncoder:
    from transformers import AutoTokenizer

    description = _config_of(option, path, taken)
    kind = description.model_type
    cls = _classes()[kind]
    # Its tokenizer lies in the encoder's own folder, or beside it: diffusers has text_encoder and tokenizer,
    # text_encoder_2 and tokenizer_2.
    own, absolute = Path(path), Path(os.path.abspath(path))
    beside = absolute.with_name(absolute.name.replace("text_encoder", "tokenizer"))
    places = [place for place in (own, beside) if _has_vocabulary(place)]
    if not places:
        raise FileNotFoundError(
            f"{option} {own} has no tokenizer: there is no {' or '.join(_VOCABULARIES)} in it"
            f"{f' or in {beside}' if beside != absolute else ''}; put the files of its tokenizer there"
        )
    folder = places[0]
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise unloadable(AutoTokenizer, option, folder, error) from error
    dtype = PRETRAINED_DTYPES[config.dtype]
    model = load_pretrained(
        cls, lambda: cls(description), option, path, TEXT_STEM, dtype, device,
        prefixes=_PREFIXES.get(kind, {}),
    )  # fmt: skip
    connectors = None
    if taken.connectors:
        connectors = _load_connectors(config, taken, dtype, device)
    processor = processor_of(path, taken) if taken.picture else None
    encoder_cls = LlavaEncoder if isinstance(taken.picture, InTemplate) else TextEncoder
    return encoder_cls(tokenizer, model, taken.length or config.length, taken, option, connectors, processor)


def _load_connectors(
    config: TextConfig, taken: TextStates, dtype: torch.dtype, device: torch.device | None
) -> Any:
    description = _connectors_of(config, taken)
    cls = _connectors_class(description["_class_name"])
    make = partial(cls.from_config, description)
    return load_pretrained(cls, make, "text.path_2", config.path_2, VAE_STEM, dtype, device)
