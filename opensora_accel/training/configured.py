"""The model that a configuration names: its class, the recipe of its family, its arguments, and what it takes.

Nothing is made here. Arguments come from `model.config`, or from the folder of `model.path`; what neither says follows
from the encoders, or is the class's own. So of Wan, trained from nothing with a VAE of 16 channels and T5, whose states
have 4096:

    model.config    {"num_layers": 12}
    derived         {"in_channels": 16, "out_channels": 16, "text_dim": 4096}, by the recipe
    its class       num_attention_heads 40, and the rest

With first frames `in_channels` is 36, as those are told behind the noisy clip (`conditions.py`).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from opensora_accel.training.captions import TextShape, TextStates
from opensora_accel.training.classes import import_class, is_path, name_in, parameters_of, taker_of
from opensora_accel.training.codec import Codec
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.options import check_argument
from opensora_accel.training.pictures import PictureStates, picture_shape
from opensora_accel.training.pretrained import read_description, with_defaults
from opensora_accel.training.recipes import RECIPES, Recipe, Sizes
from opensora_accel.training.sections import ModelConfig
from opensora_accel.training.sound import sound_shape
from shardformer.policy import model_names

# Arguments that count from 0.
_NUMBERS_OF_LAYERS = ("vace_layers",)
# More take minutes to make, even without their weights.
_MOST_LAYERS = 1000


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
        picture_width=picture_shape_of(config)[1] if config.image.is_used else None,
        sound=None if recipe.sound is None else sound_shape(config.codec, recipe.sound),
        arguments=all_arguments(config.model),
    )
    recipe.check(sizes)
    return recipe.derive(sizes)


def is_same(value: Any, needed: Any) -> bool:
    """Whether an argument of a model has this value; JSON has lists for tuples."""
    return bool((list(value) if isinstance(value, tuple) else value) == needed)


def causal_block_size(arguments: Mapping[str, Any]) -> int:
    """Latent frames of a block that attends to itself and those before it, by the model's arguments; 1 is no block."""
    return int(arguments.get("num_frame_per_block") or 1)


def texts_of(config: TrainConfig) -> tuple[TextStates, ...]:
    """What the run's model takes of captions; an encoder sees frames and references where the run gives them."""
    recipe = recipe_of(config.model)
    taken = recipe.text
    if config.conditions.are_used or recipe.begins_with_a_frame or config.data.references:
        return taken
    return tuple(dataclasses.replace(each, picture="") for each in taken)


def pictures_of(config: TrainConfig) -> PictureStates:
    """Which states the family takes of a first frame."""
    return recipe_of(config.model).pictures or PictureStates()


def picture_shape_of(config: TrainConfig) -> tuple[int, int]:
    """How many states a first frame has, and their width."""
    return picture_shape(config.image, pictures_of(config))


def conditioning_of(config: TrainConfig, codec: Codec) -> Conditioning | None:
    """How the model takes frames that are given; None where it takes none in this run.

    A family may have several ways, and its weights, or `model.config`, one: they have the channels for it.
    """
    channels = given_arguments(config.model).get("in_channels")
    follows = bool(config.data.controls or config.data.references)

    def is_asked_for(each: Conditioning) -> bool:
        if each.of_control:
            # Those weights have its channels whatever a run gives.
            return follows or each.input_channels(codec) == channels
        if each.takes_references and config.data.references:
            return True
        return each.always or (config.conditions.are_used and not follows)

    ways = [each for each in recipe_of(config.model).frames if is_asked_for(each)]
    if config.flow.is_forced:
        # There they have a time.
        ways = [each for each in ways if each.place == "latents"]
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
