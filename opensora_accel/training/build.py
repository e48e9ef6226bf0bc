"""The parts of a run, made from its configuration: device, model, encoders; checked against each other."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import psutil
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from opensora_accel.communications import gather_objects
from opensora_accel.deferred import deferred_init
from opensora_accel.experimental import experiment
from opensora_accel.parallel_states import get_mesh
from opensora_accel.plan import Plan
from opensora_accel.training.adapters import SavedAdapter, add_adapters, read_adapter
from opensora_accel.training.buckets import Bucket, batch_sizes
from opensora_accel.training.captions import TextShape, TextStates
from opensora_accel.training.classes import (
    arguments_of,
    import_class,
    is_path,
    make,
    name_in,
    parameters_of,
    taker_of,
)
from opensora_accel.training.codec import Codec, LatentShape, check_multiple, latent_shape
from opensora_accel.training.conditions import KINDS, Condition, Conditioning, Given, check_conditions
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.options import check_argument
from opensora_accel.training.pictures import PictureStates, picture_shape
from opensora_accel.training.pretrained import in_one_line, read_description, unloadable, with_defaults
from opensora_accel.training.recipes import (
    RECIPES,
    Inputs,
    Recipe,
    Sizes,
    check_conditioning,
    check_recipe,
    patches_of,
)
from opensora_accel.training.sampler import Portion
from opensora_accel.training.sections import DataConfig, ModelConfig
from opensora_accel.training.sound import sound_shape
from opensora_accel.training.text_encoders import picture_tokens
from opensora_accel.weights import load_weights
from shardformer.engine import frozen_dtype
from shardformer.policy import model_names

logger = logging.getLogger(__name__)

# Arguments that count from 0.
_NUMBERS_OF_LAYERS = ("vace_layers",)
# More take minutes to make, even without their weights.
_MOST_LAYERS = 1000


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
            shapes[bucket] = with_references(check_sizes(bucket, codec, outline), config.data)
    conditioning = conditioning_of(config, codec)
    check_conditions(config.conditions, config.data.sizes, codec.latent_frames, conditioning)
    check_conditioning(recipe, conditioning, config)
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


def is_same(value: Any, needed: Any) -> bool:
    """Whether an argument of a model has this value; JSON has lists for tuples."""
    return bool((list(value) if isinstance(value, tuple) else value) == needed)


def _hint(argument: str, recipe: Recipe, codec: Codec) -> str:
    """Where an argument that does not fit may come from."""
    ways = [each for each in recipe.frames if not each.always]
    extra = max((each.num_channels(codec.channels, codec.latent_frames.temporal) for each in ways), default=0)
    pictures = " (pictures' states, as image-to-video models take them, come from image.path)"
    not_yet = " (first frames that are given are not trained in this family yet)"
    channels = "" if any(each.frames for each in (recipe, *recipe.variants)) else not_yet
    if extra:
        channels = f" (conditions, as --conditions.i2v_head 1, take {extra} of {codec.channels + extra})"
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


def inputs_of_one(
    config: TrainConfig,
    codec: Codec,
    shape: LatentShape,
    texts: Sequence[TextShape],
    arguments: Mapping[str, Any],
) -> Inputs:
    """What a model is called with for one clip, of latents [C, t, h, w] of this shape, and the longest caption."""
    texts = with_pictures(texts, picture_tokens_of(config, *(size * codec.spatial for size in shape[2:])))
    return Inputs(
        latents=torch.empty(1, *shape),
        timestep=torch.empty(1, shape[1]) if config.flow.is_forced else torch.empty(1),
        texts=[torch.empty(1, *each) for each in texts],
        text_masks=[torch.ones(1, each.length, dtype=torch.bool) for each in texts],
        condition=condition_of_one(config, codec, shape),
        spatial=codec.spatial,
        latent_frames=codec.latent_frames,
        config=arguments,
        sound=sound_of_one(config, codec.latent_frames.num_frames(shape[1])),
    )


def with_pictures(texts: Sequence[TextShape], num_states: int) -> list[TextShape]:
    """Shapes of captions' states, the first encoder's with so many of frames that it sees."""
    first, *others = texts
    return [TextShape(first.length + num_states, first.width), *others]


def sound_of_one(config: TrainConfig, num_frames: int) -> Tensor | None:
    """Latents [1, C, L, M] of the sound of one clip of so many frames; None of a model that makes none.

    No file is looked at for it: without `data.frame_rate` there are 25 frames a second.
    """
    taken = recipe_of(config.model).sound
    if taken is None:
        return None
    seconds = num_frames / (config.data.frame_rate or 25.0)
    return torch.empty(1, *sound_shape(config.codec, taken).latents(seconds))


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


def model_class(config: ModelConfig) -> Any:
    """The class of diffusers, or the author's.

    Raises:
        ValueError: this trainer does not know how to call it, or it cannot be imported.
    """
    import diffusers

    name = _class_name(config)
    return import_class(config.class_name) if is_path(config.class_name) else getattr(diffusers, name)


def recipe_of(config: ModelConfig) -> Recipe:
    """How the configured model is called.

    Raises:
        ValueError: this trainer does not know.
    """
    recipe = RECIPES[_class_name(config)]
    if not recipe.variants:
        return recipe
    arguments = given_arguments(config)
    if brings_config(config):
        arguments = with_defaults(taker_of(model_class(config)), arguments)
    return next((each for each in recipe.variants if each.is_for(arguments)), recipe)


def brings_config(config: ModelConfig) -> bool:
    """Whether the weights of a run come with the arguments of their model; an author's may be a file alone."""
    return bool(config.path) and (
        not is_path(config.class_name) or (Path(config.path) / "config.json").is_file()
    )


def _class_name(config: ModelConfig) -> str:
    name = name_in(config.class_name)
    if config.path and not is_path(config.class_name):
        name = str(read_description("model.path", config.path, "a diffusers model").get("_class_name", ""))
    choice = f"choose one of {', '.join(RECIPES)}"
    if name in RECIPES:
        home = RECIPES[name].home
        if home and not is_path(config.class_name):
            raise ValueError(
                f"{name} is its author's class, and not one of diffusers; set model.class_name to where it is "
                f"imported, as {home}:{name}, with the folder of its repository on PYTHONPATH"
            )
        if is_path(config.class_name) and not home:
            raise ValueError(f"{name} is taken from diffusers; set model.class_name to its name alone")
        return name
    if name in model_names():
        raise ValueError(
            f"model class {name!r} has no recipe yet, which would say how this trainer is to call it; {choice}, or "
            "call shardformer.shard in a loop of your own (docs/policies.md)"
        )
    raise ValueError(f"model class {name!r} cannot be trained here; {choice}")


def model_arguments(config: TrainConfig, codec: Codec, texts: Sequence[TextShape]) -> dict[str, Any]:
    """The arguments that the model is made with.

    Raises:
        ValueError: its class does not take one of them, or not with this value.
    """
    given, recipe = given_arguments(config.model), recipe_of(config.model)
    if config.flow.causal_block_size:
        given["num_frame_per_block"] = config.flow.causal_block_size
    if brings_config(config.model):
        return {**given, **recipe.forced}
    return {**recipe.fresh, **derived_arguments(config, codec, texts), **given}


def given_arguments(config: ModelConfig) -> dict[str, Any]:
    """The model's arguments that the configuration names, or all of them, as its folder has them.

    Raises:
        ValueError: its class does not take one of them, or not with this value.
    """
    cls = model_class(config)
    if not brings_config(config):
        return _checked_arguments(cls, config.config)
    # Read again: load_config would leave out of sight what is wrong with the file.
    description = read_description("model.path", config.path, "a diffusers model")
    if not is_path(config.class_name):
        return {name: value for name, value in description.items() if not name.startswith("_")}
    if config.config:
        raise ValueError(
            f"model.path {config.path} has a config.json; leave model.config out, or give the file of weights alone"
        )
    # Those of transformers say more, as which release wrote them.
    return {name: description[name] for name in parameters_of(cls) if name in description}


def all_arguments(config: ModelConfig) -> dict[str, Any]:
    """The arguments that are given, and for the others those of a model that begins without weights, or its class's."""
    fresh = {} if brings_config(config) else recipe_of(config).fresh
    return with_defaults(taker_of(model_class(config)), {**fresh, **given_arguments(config)})


def derived_arguments(config: TrainConfig, codec: Codec, texts: Sequence[TextShape]) -> dict[str, Any]:
    """Arguments that follow from the encoders, and whether frames are given.

    Raises:
        ValueError: no arguments fit them.
    """
    recipe = recipe_of(config.model)
    sizes = Sizes(
        channels=codec.channels,
        input_channels=codec.channels + _condition_channels(config, codec),
        texts=texts,
        spatial=codec.spatial,
        temporal=codec.latent_frames.temporal,
        picture_width=_picture_shape(config)[1] if config.image.is_used else None,
        sound=None if recipe.sound is None else sound_shape(config.codec, recipe.sound),
        arguments=all_arguments(config.model),
    )
    recipe.check(sizes)
    return recipe.derive(sizes)


def texts_of(config: TrainConfig) -> tuple[TextStates, ...]:
    """What the run's model takes of captions; an encoder sees frames where the run gives them."""
    recipe = recipe_of(config.model)
    taken = recipe.text
    if config.conditions.are_used or recipe.begins_with_a_frame:
        return taken
    return tuple(dataclasses.replace(each, picture="") for each in taken)


def picture_tokens_of(config: TrainConfig, height: int, width: int) -> int:
    """The most states that frames which are given have among those of a caption, of a clip of this size."""
    taken = texts_of(config)[0]
    if not taken.picture:
        return 0
    return len(_most_ends(config).numbers) * picture_tokens(config.text, taken, height, width)


def _most_ends(config: TrainConfig) -> Given:
    """Of the kinds that the run draws, the one that gives the most ends of a clip."""
    used = [KINDS[kind] for kind, weight in config.conditions.weights.items() if weight]
    return max(used, key=lambda given: len(given.numbers))


def conditioning_of(config: TrainConfig, codec: Codec) -> Conditioning | None:
    """How the model takes frames that are given; None where it takes none in this run.

    A family may have several ways, and its weights, or `model.config`, one: they have the channels for it.
    """
    ways = [each for each in recipe_of(config.model).frames if config.conditions.are_used or each.always]
    if config.flow.is_forced:
        # There they have a time.
        ways = [each for each in ways if each.place == "latents"]
    channels = given_arguments(config.model).get("in_channels")
    fitting = [each for each in ways if each.input_channels(codec) == channels]
    return next(iter([*fitting, *ways]), None)


def conditioning_of_all(configs: Sequence[TrainConfig], codec: Codec) -> Conditioning | None:
    """That of every model of a run.

    Raises:
        ValueError: two experts take frames in different ways.
    """
    first, *others = [conditioning_of(config, codec) for config in configs]
    if any(each != first for each in others):
        channels = [given_arguments(config.model).get("in_channels") for config in configs]
        raise ValueError(
            f"model.path and model.path_2 take frames that are given in different ways (their in_channels are "
            f"{' and '.join(map(str, channels))}); choose the two of one pipeline"
        )
    return first


def _condition_channels(config: TrainConfig, codec: Codec) -> int:
    """Channels of frames that are given, behind those of latents."""
    conditioning = conditioning_of(config, codec)
    return 0 if conditioning is None else conditioning.input_channels(codec) - codec.channels


def pictures_of(config: TrainConfig) -> PictureStates:
    """Which states the family takes of a first frame."""
    return recipe_of(config.model).pictures or PictureStates()


def _picture_shape(config: TrainConfig) -> tuple[int, int]:
    return picture_shape(config.image, pictures_of(config))


def condition_of_one(config: TrainConfig, codec: Codec, shape: LatentShape) -> Condition | None:
    """Of the shapes of what the model gets of one clip, of latents [C, t, h, w] of this shape, with its first frame."""
    conditioning = conditioning_of(config, codec)
    if conditioning is None:
        return None
    # Not zeros, which some models take for no picture.
    pictures = torch.ones(1, *_picture_shape(config)) if config.image.is_used else None
    if conditioning.place == "branch":
        return Condition(torch.zeros(1, conditioning.branch_channels(codec), *shape[1:]), is_apart=True)
    if conditioning.place == "channels":
        channels = conditioning.num_channels(codec.channels, codec.latent_frames.temporal)
        latents = torch.zeros(1, channels, *shape[1:])
        return Condition(latents, pictures=pictures, is_apart=conditioning.apart)
    if conditioning.place == "rows":
        channels, _, *sides = shape
        return Condition(torch.zeros(1, channels, 2, *sides), ends=[_most_ends(config)])
    given, marks = (torch.arange(shape[1]) < 1)[None], None
    if conditioning.has_channels:
        channels = conditioning.num_channels(codec.channels, codec.latent_frames.temporal)
        marks = torch.zeros(1, channels, *shape[1:])
    return Condition(torch.zeros(1, *shape), given, pictures, marks)


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


def _checked_arguments(cls: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the types that the class asks for: JSON's and TOML's lists become tuples."""
    checked = {}
    hints, parameters = get_type_hints(taker_of(cls).__init__), parameters_of(cls)
    for name, value in arguments.items():
        if name not in parameters:
            nearest = difflib.get_close_matches(name, parameters, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise ValueError(
                f"{cls.__name__} has no argument {name!r}; {hint}It takes {', '.join(parameters)}"
            )
        # Some have a default and no hint.
        kind = hints.get(name, type(parameters[name].default))
        checked[name] = check_argument(kind, value, f"model.config.{name}")
        for size in value if isinstance(value, (list, tuple)) else [value]:
            least = 0 if name in _NUMBERS_OF_LAYERS else 1
            if isinstance(size, int) and not isinstance(size, bool) and size < least:
                raise ValueError(f"model.config.{name} must be at least {least}; got {value!r}")
    if arguments.get("num_layers", 1) > _MOST_LAYERS:
        raise ValueError(
            f"model.config.num_layers is {arguments['num_layers']:,}, and {_MOST_LAYERS:,} are the most; set it lower"
        )
    return checked


def check_sizes(bucket: Bucket, codec: Codec, model: Any) -> LatentShape:
    """The latent shape [C, t, h, w] of a clip of this size.

    Raises:
        ValueError: a clip does not fit the codec or the model's patches.
    """
    shape = latent_shape(codec, bucket.num_frames, bucket.height, bucket.width)
    arguments = arguments_of(model)
    patch_time, patch_height, patch_width = patches_of(arguments)
    for name, unit in (("height", patch_height), ("width", patch_width)):
        reason = f"codec ({codec.spatial}) × model patch ({unit})"
        check_multiple(f"data.{name}", getattr(bucket, name), codec.spatial * unit, reason)
    if shape[1] % patch_time:
        check_multiple("the number of latent frames", shape[1], patch_time, "the model's patch in time")
    block = causal_block_size(arguments)
    if shape[1] % block:
        check_multiple("the number of latent frames", shape[1], block, "the model's causal blocks")
    return shape


def with_references(shape: LatentShape, data: DataConfig) -> LatentShape:
    """The latent shape [C, t, h, w] of what a model makes of a clip: before it a latent frame of each reference."""
    channels, num_frames, height, width = shape
    return channels, num_frames + data.latent_frames_before, height, width


def causal_block_size(arguments: Mapping[str, Any]) -> int:
    """Latent frames of a block that attends to itself and those before it, by the model's arguments; 1 is no block."""
    return int(arguments.get("num_frame_per_block") or 1)


def tokens_per_sample(shape: LatentShape, model: Any) -> int:
    """The number of tokens that the model makes of latents [C, t, h, w] of this shape."""
    patch_time, patch_height, patch_width = patches_of(arguments_of(model))
    return (shape[1] // patch_time) * (shape[2] // patch_height) * (shape[3] // patch_width)


def describe(
    config: TrainConfig, model: nn.Module, tokens: Mapping[Bucket, int], portions: Sequence[Portion]
) -> str:
    """What is about to run, for a person: three lines, and one for each bucket."""
    model_name = f"{type(model).__name__}, {_num_parameters(model) / 1e6:.2f} M parameters"
    if config.lora.base != "whole":
        model_name += f", whose frozen layers are kept in {config.lora.base}"
    if config.flow.boundary:
        model_name = f"two experts that meet at {config.flow.boundary:g}, each a {model_name}"
    plan = config.plan
    degrees = _settings(plan, Plan())
    lines = [
        f"{model_name}, on {_ranks()}",
        f"plan: {degrees or 'one device'}",
    ]
    if config.validation.num_clips:
        look = config.validation
        lines.append(
            f"validation: {look.num_clips} files are held out, and looked at every {look.every} steps at "
            f"{look.num_times} times"
        )
    clips = [
        f"{len(set(portion.videos))} videos in {_folders(config.data)}, clips of {portion.bucket.num_frames} × "
        f"{portion.bucket.height} × {portion.bucket.width}, {tokens[portion.bucket]} tokens each, "
        f"{portion.batch_size} per step"
        for portion in portions
    ]
    for number, portion in enumerate(portions):
        own = _settings(config.plans.get(portion.bucket, plan), plan)
        clips[number] += f", with {own}" if own else ""
    if not config.data.buckets:
        return "\n".join([*lines, f"data: {clips[0]}"])
    filled = {portion.bucket for portion in portions}
    empty = [str(bucket) for bucket in config.data.sizes if bucket not in filled]
    warnings = [f"no file falls into the buckets {', '.join(empty)}"] if empty else []
    return "\n".join([*lines, "data, in each step one of", *(f"  {each}" for each in [*clips, *warnings])])


def _num_parameters(model: nn.Module) -> int:
    """How many there are; codes of 8 and 4 bits count as the weights that they stand for."""
    own = {id(each): each.numel() for each in model.parameters()}
    for module in model.modules():
        if isinstance(module, nn.Linear) and "codes" in module._parameters:
            own |= {id(module.codes): module.in_features * module.out_features, id(module.scales): 0}
    return sum(own.values())


def _folders(config: DataConfig) -> str:
    """Where the clips are, and how often those of each folder come."""
    several = (name if times == 1 else f"{name} (× {times})" for name, times in config.folders.items())
    return ", ".join(several) or config.folder


def _ranks() -> str:
    """How many ranks compute, and on what."""
    device, num_ranks = local_device(), dist.get_world_size()
    if device.type == "cuda":
        return f"{num_ranks} GPU rank(s): {torch.cuda.get_device_name(device)}, NCCL"
    return f"{num_ranks} CPU rank(s)"


def _settings(plan: Plan, usual: Plan) -> str:
    """The fields in which a plan differs from the usual one."""
    differing = [
        field.name
        for field in dataclasses.fields(plan)
        if getattr(plan, field.name) != getattr(usual, field.name)
    ]
    return ", ".join(f"{name}={getattr(plan, name)}" for name in differing)
