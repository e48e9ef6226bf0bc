"""A run's model, made from its configuration when all that could be wrong with it has been looked for.

First without memory: an argument that its class does not take, encoders that do not fit, clips that do not fit, and
sizes that this machine has no room for all end the run before anything large is made. Then with weights that are still
to be read, each rank its own shards, and adapters on it.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import psutil
import torch
from safetensors import SafetensorError
from torch import nn

from opensora_accel.communications import gather_objects
from opensora_accel.deferred import deferred_init
from opensora_accel.experimental import experiment
from opensora_accel.parallel_states import get_mesh
from opensora_accel.training.adapters import SavedAdapter, add_adapters, read_adapter
from opensora_accel.training.buckets import Bucket, batch_sizes
from opensora_accel.training.captions import TextShape
from opensora_accel.training.classes import arguments_of, make
from opensora_accel.training.codec import Codec, LatentShape
from opensora_accel.training.conditions import check_conditions
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.configured import (
    causal_block_size,
    conditioning_of,
    derived_arguments,
    is_same,
    model_arguments,
    model_class,
    recipe_of,
)
from opensora_accel.training.long_samples import check_long_samples
from opensora_accel.training.one_clip import check_sizes, inputs_of_one, tokens_per_sample, with_references
from opensora_accel.training.pretrained import in_one_line, unloadable
from opensora_accel.training.recipes import Inputs, Recipe, check_conditioning, check_recipe
from opensora_accel.training.sections import DataConfig
from opensora_accel.weights import load_weights
from shardformer.engine import frozen_dtype

logger = logging.getLogger(__name__)


def local_device() -> torch.device:
    """This rank's GPU, or the CPU, as `init_parallel` has chosen."""
    if get_mesh().device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def build_model(
    config: TrainConfig, codec: Codec, texts: Sequence[TextShape], dtype: torch.dtype
) -> tuple[nn.Module, dict[Bucket, LatentShape]]:
    """The transformer, which waits for its weights, and the latent shape of a clip of each size.

    `shardformer.parallelize` makes them: of sharded parameters each rank its own shards.

    `dtype` is what the model will run in.

    Raises:
        ValueError: before anything large is made, for a class that has no policy, an argument that it does not take
            (with the nearest it does) or that does not work, channels that do not fit the codec and the text encoder,
            clips that do not fit the model, and sizes that this machine has no memory for.
    """
    cls, recipe = model_class(config.model), recipe_of(config.model)
    check_recipe(recipe, config)
    # What the codec, the encoder and the conditions decide about the model, whatever its config says.
    derived = derived_arguments(config, codec, texts)
    arguments = model_arguments(config, codec, texts)
    source = f"model.path {config.model.path}" if config.model.path else "this model.config"
    try:
        # Without memory: whatever is wrong is found before a large model is made.
        without_memory = recipe.without_memory()
        with without_memory:
            outline = make(cls, arguments)
    except Exception as error:  # whatever its constructor raises for values that do not work
        raise ValueError(f"{cls.__name__} cannot be made with {source} ({in_one_line(error)})") from error
    made_with = arguments_of(outline)
    for argument, needed in derived.items():
        if not is_same(made_with[argument], needed):
            raise ValueError(
                f"the model's {argument} is {made_with[argument]}, but the encoders give {needed}"
                f"{_hint(argument, recipe, codec)}; leave model.config.{argument} out, or choose encoders that fit"
            )
    if config.image.is_used and made_with.get("pos_embed_seq_len") is not None:
        raise ValueError(
            f"the model takes the states of two pictures (pos_embed_seq_len is {made_with['pos_embed_seq_len']}), "
            "as Wan 2.1's for first and last frames do, and this trainer makes those of one; choose a model whose "
            "pos_embed_seq_len is null"
        )
    if config.data.frame_rate and made_with.get("inject_sample_info") is False:
        raise ValueError(
            "the model is not told the frame rate (inject_sample_info is False); leave data.frame_rate out"
        )
    shapes: dict[Bucket, LatentShape] = {}
    for bucket in config.data.sizes:
        with _named(bucket, config.data):
            shapes[bucket] = with_references(check_sizes(bucket, codec, outline), config)
    conditioning = conditioning_of(config, codec)
    check_conditions(config.conditions, config.data.sizes, codec.latent_frames, conditioning)
    check_conditioning(recipe, conditioning, config)
    block = causal_block_size(made_with)
    check_long_samples(config.flow, config.data.sizes, codec.latent_frames, block)
    _check_memory(
        config, outline, dtype, {b: tokens_per_sample(shape, outline) for b, shape in shapes.items()}
    )
    with without_memory:
        # Kernels of an author's own know no tensors without memory.
        for bucket, shape in () if recipe.home else shapes.items():
            with _named(bucket, config.data):
                inputs = inputs_of_one(config, codec, shape, texts, made_with)
                _try_shapes(recipe, outline, inputs, source)
    with deferred_init(config.seed):
        model = make(cls, arguments)
    if config.model.path:
        try:
            load_weights(model, config.model.path)
        except SafetensorError as error:
            raise unloadable(cls, "model.path", config.model.path, error) from error
    if config.lora.is_used:
        adapt(model, config, config.model.path)
    recipe.prepare(model)
    return model, shapes


def _hint(argument: str, recipe: Recipe, codec: Codec) -> str:
    """Where an argument that does not fit may come from."""
    ways = [each for each in recipe.frames if not each.always]
    of_ways = [(each.num_channels(codec.channels, codec.latent_frames.temporal), each) for each in ways]
    extra = max((count for count, each in of_ways if not each.of_control), default=0)
    of_control = max((count for count, each in of_ways if each.of_control), default=0)
    pictures = " (pictures' states, as image-to-video models take them, come from image.path)"
    not_yet = " (first frames that are given are not trained in this family yet)"
    channels = "" if any(each.frames for each in (recipe, *recipe.variants)) else not_yet
    if extra:
        channels = f" (conditions, as --conditions.i2v_head 1, take {extra} of {codec.channels + extra})"
    if of_control:
        channels += (
            f" (weights that follow --data.controls have {of_control} of {codec.channels + of_control})"
        )
    return {
        "image_dim": pictures,
        "added_kv_proj_dim": pictures,
        "image_embed_dim": pictures,
        "text_embed_dim_t5": " (the trainer's recipe is for those of one encoder, as EasyAnimate 5.1)",
        "visual_cond": " (the trainer's recipe is for those that have channels for frames that are given)",
        "task_type": " (conditions.i2v_head and image.path train one that begins with a frame)",
        "max_text_seq_length": " (text.length, to which captions are padded)",
        "extra_pos_embed_type": " (of Cosmos, the recipes are for Predict 2 and 2.5)",
        "img_context_dim_in": " (Cosmos-Transfer, which takes controls and pictures, is not trained here)",
        **dict.fromkeys(("from_pretrained", "cache_dir"), " (weights are those of model.path)"),
        **dict.fromkeys(
            ("audio_in_channels", "audio_sampling_rate", "audio_hop_length"),
            " (codec.sound_path, the audio_vae of its pipeline)",
        ),
        "in_channels": channels,
    }.get(argument, "")


def adapt(model: nn.Module, config: TrainConfig, folder: str = "") -> None:
    """Puts adapters on a model that waits for its values: those of `lora.path`, or new ones.

    Args:
        folder: where those values lie, if they are read.

    Raises:
        FileNotFoundError, ValueError: as `read_adapter` and `add_adapters`, or they are of another model.
    """
    saved = saved_adapter(config)
    add_adapters(model, config.lora if saved is None else saved.config)
    if config.lora.base != "whole":
        # Afterwards, as PEFT looks at a layer's weight 21 times, which each time would be made of codes.
        experiment("quantized").quantize_frozen(model, config.lora.base, folder)
    if saved is not None:
        saved.fill(model)


def saved_adapter(config: TrainConfig) -> SavedAdapter | None:
    """The adapter that the run goes on from; None where it begins with a new one, or has none.

    Raises:
        FileNotFoundError, ValueError: as `read_adapter`.
    """
    import diffusers

    if not config.lora.path:
        return None
    pipeline = recipe_of(config.model).pipeline
    return read_adapter(config.lora.path, getattr(diffusers, pipeline) if pipeline else None)


@contextmanager
def _named(bucket: Bucket, config: DataConfig) -> Iterator[None]:
    """Adds the bucket to an error about the size of a clip, where there are several."""
    try:
        yield
    except ValueError as error:
        if not config.buckets:
            raise
        raise ValueError(f"data.buckets {bucket}: {error}") from error


def _try_shapes(recipe: Recipe, outline: nn.Module, inputs: Inputs, source: str) -> None:
    """One pass without memory and data: what does not fit is found before there are weights."""
    try:
        # What is warned of is about a CPU, where the run need not be.
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            outline(**recipe.arguments(inputs))
    except Exception as error:
        sizes = " × ".join(map(str, inputs.latents.shape[2:]))
        raise ValueError(
            f"{type(outline).__name__} with {source} cannot take clips of {sizes} latent positions "
            f"({in_one_line(error)}); change model.config, or data.num_frames, height and width"
        ) from error


def _check_memory(
    config: TrainConfig, outline: nn.Module, dtype: torch.dtype, tokens: Mapping[Bucket, int]
) -> None:
    """Every rank of this machine makes its shards of the model on the host, and decodes its clips there.

    `tokens` are those of a clip of each size.

    Communication: an object all-gather each. One verdict, before any rank has taken memory: a rank that refused alone
    would leave the others waiting.
    """
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = psutil.virtual_memory().available
    num_parameters = sum(parameter.numel() for parameter in outline.parameters())
    num_elements = num_parameters + sum(buffer.numel() for buffer in outline.buffers())
    of_whole = frozen_dtype(config.plan) if config.lora.is_used else dtype
    of_base = {"whole": of_whole.itemsize, "int8": 1, "nf4": 0.5}[config.lora.base]
    needed = of_base * num_elements * num_ranks // config.plan.num_shards
    if any(gather_objects(needed > available)):
        raise ValueError(
            f"{type(outline).__name__} with this model.config has {num_parameters / 1e9:.1f} B parameters: "
            f"{needed / 2**30:.0f} GiB for the ranks of this machine, where {available / 2**30:.0f} GiB are "
            "free; set model.config.num_layers, num_attention_heads and ffn_dim lower"
        )
    sizes = config.data.sizes
    for bucket, batch_size in batch_sizes(tokens, config.data.batch_size, sizes).items():
        clips = -(-batch_size // config.plan.data)
        # As bytes, and as the numbers that the codec makes of them.
        needed = (
            (1 + dtype.itemsize) * 3 * bucket.num_frames * bucket.height * bucket.width * clips * num_ranks
        )
        if any(gather_objects(needed > available)):
            raise ValueError(
                f"{clips} clips of {bucket.num_frames} × {bucket.height} × {bucket.width} on each rank take "
                f"{needed / 2**30:.0f} GiB on this machine, where {available / 2**30:.0f} GiB are free; set "
                "data.batch_size (with optim.accumulation for the same step), num_frames, height or width lower"
            )
