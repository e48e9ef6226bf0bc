"""What a run may ask of a family's model, by its recipe and by the pipeline that its folder lies in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opensora_accel.documents import read_json
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.levels import NUM_LEVELS, snr_shift_scale
from opensora_accel.training.pictures import PictureStates
from opensora_accel.training.recipes.base import Recipe
from opensora_accel.training.sections import FlowConfig

logger = logging.getLogger(__name__)


def check_recipe(recipe: Recipe, config: TrainConfig) -> None:
    """Checks a run against the family of its model, and the pipeline that the model's folder lies in.

    Raises:
        ValueError: an option is for models of other families, or for other weights.
    """
    family = recipe.models[0]
    _check_given(family, recipe, config)
    if recipe.begins_with_a_frame:
        _check_first_frame(family, config)
    _check_pictures(family, recipe.pictures, config)
    _check_forcing(family, recipe, config)
    if recipe.references_in_rows:
        _check_references_in_rows(family, config)
    if config.codec.sound_path and not recipe.makes_sound:
        raise ValueError(f"{family} makes no sound; leave codec.sound_path out")
    if recipe.sound is not None and recipe.sound.shift is not None and config.flow.weighting != "none":
        raise ValueError(
            f"{family} makes sound at times of its own, of which flow.weighting knows nothing; leave it out"
        )
    _warn_of_guidance(family, recipe, config)
    _warn_of_padding(family, recipe, config)
    if config.data.frame_rate and not recipe.takes_frame_rate:
        raise ValueError(f"{family} is not told the frame rate; leave data.frame_rate out")
    if recipe.levels is None and config.flow.min_snr:
        raise ValueError(f"{family} has no levels of noise, which flow.min_snr weighs; leave it out")
    if recipe.levels is not None:
        _check_levels(family, config)
        _check_shift(config)
    _check_times(config)


def check_rows(config: TrainConfig, recipe: Recipe, arguments: Mapping[str, Any]) -> None:
    """Checks a run whose clips share rows.

    Args:
        arguments: those that the model was made with.

    Raises:
        ValueError: the model takes no such rows, or something of the run has no place in them.
    """
    family = recipe.models[0]
    if recipe.row is None:
        from opensora_accel.training.recipes import RECIPES

        with_rows = ", ".join(name for name, each in RECIPES.items() if each.row is not None)
        raise ValueError(
            f"a call of {family} takes clips of one size, and no rows of several (data.packed_tokens); leave that out, "
            f"or train one of {with_rows}"
        )
    told = recipe.row.refuses(config, arguments)
    if told:
        raise ValueError(f"rows of several clips (data.packed_tokens) of {family} have no {told}")
    if config.optim.accumulation > 1:
        raise ValueError(
            "the rows of a data rank run one after another, so that data.batch_size says how many gradients are added "
            f"up: multiply it by optim.accumulation ({config.optim.accumulation}), and leave that out"
        )
    if config.plans:
        raise ValueError("a row has clips of several buckets, which bucket_plans tells apart; leave it out")
    if config.data.regularisation:
        raise ValueError(
            "clips of data.regularisation are asked for twice, which rows are not; leave it out, or data.packed_tokens"
        )


def _check_given(family: str, recipe: Recipe, config: TrainConfig) -> None:
    """Raises ValueError where a family takes nothing of what is given, or in another way."""
    if config.conditions.are_used and not recipe.frames:
        others = "a model that takes them, as WanTransformer3DModel"
        if any(each.frames for each in recipe.variants):
            others = "those of its weights that begin with a frame (another model.config)"
        raise ValueError(
            f"{family} takes no frames that are given; leave all of conditions but t2v out, or choose {others}"
        )
    _check_beside(family, recipe, config)
    given = "the frames that are given" if config.conditions.are_used else "references"
    if (
        (config.conditions.are_used or config.data.references)
        and recipe.text[0].picture
        and config.text.cache
    ):
        raise ValueError(
            f"{family}'s encoder of captions sees {given}, and text.cache embeds captions alone, at the start; set "
            "text.cache to False, and cache_folder to keep what the encoder gave"
        )
    if config.flow.frame_guidance != 1 and not (recipe.guided_by_frames and config.conditions.are_used):
        raise ValueError(
            "flow.frame_guidance is for samples that begin with frames, of a model that learns clips without them too, "
            f"as Open-Sora's MMDiTModel, and this run of {family} has none; leave it out"
        )


def _check_beside(family: str, recipe: Recipe, config: TrainConfig) -> None:
    """Raises ValueError where the family takes nothing of what lies beside clips."""
    if config.data.controls and not recipe.follows_controls:
        raise ValueError(
            f"{family} follows no controls; leave data.controls out, or choose a model that does: "
            "WanVACETransformer3DModel or EasyAnimateTransformer3DModel"
        )
    if config.data.references and not recipe.takes_references:
        raise ValueError(
            f"{family} takes no references; leave data.references out, or choose a model that does: "
            "WanVACETransformer3DModel, EasyAnimateTransformer3DModel or MiniMaxH3Transformer3DModel"
        )
    has_several = recipe.references_in_rows or recipe.latent_frames_before(config.data)
    if config.data.references_of_each > 1 and not has_several:
        raise ValueError(
            f"{family} takes one reference, in the place of a first frame; set data.num_references to 1, or choose a "
            "model that takes several, as WanVACETransformer3DModel"
        )
    if config.data.reference_side and not recipe.references_in_rows:
        raise ValueError(
            f"{family} takes references in the size of clips, on white; leave data.reference_side out"
        )


def _check_references_in_rows(family: str, config: TrainConfig) -> None:
    """Raises ValueError where references are not as the family takes them, or are for its other weights."""
    path = Path(config.model.path).resolve() if config.model.path else None
    if not config.data.references:
        if path is not None and path.name == "transformer_ref":
            raise ValueError(
                f"{config.model.path} makes clips from references, and this run gives none; set data.references to a "
                "folder with them, or choose the folder transformer beside it"
            )
        return
    if path is not None and path.name == "transformer" and path.with_name("transformer_ref").is_dir():
        raise ValueError(
            f"{config.model.path} is given no references by its pipeline; choose the folder transformer_ref beside it, "
            "or leave data.references out"
        )
    if not config.data.reference_side:
        raise ValueError(
            f"{family} takes each reference in its own shape; set data.reference_side to the pixels of its shorter "
            "side: 2048, as its pipeline has it, or less, which takes fewer tokens"
        )
    if config.conditions.are_used:
        raise ValueError(
            f"{family} takes references, or frames that are given, by weights of their own; leave all of conditions "
            "but t2v out, or data.references"
        )
    if config.sample_captions:
        raise ValueError(
            f"sample_captions have no references, without which {family} of these weights makes no clip; leave "
            "sample_captions out: samples of clips (num_samples) have theirs"
        )


def _check_first_frame(family: str, config: TrainConfig) -> None:
    """Raises ValueError where a clip would not begin with a frame that is given, or with more."""
    what = f"{family} of this model.config begins every clip with its first frame"
    kinds = {kind for kind, weight in config.conditions.weights.items() if weight}
    if kinds != {"i2v_head"}:
        raise ValueError(
            f"{what}, which is all that is given; set conditions.i2v_head to 1, and conditions.t2v and all others to 0"
        )
    if any(size.num_frames == 1 for size in config.data.sizes):
        raise ValueError(
            f"{what}, which leaves nothing to learn of an image; set data.num_frames higher, or leave sizes of one "
            "frame out of data.buckets"
        )


def _check_forcing(family: str, recipe: Recipe, config: TrainConfig) -> None:
    """Checks times of latent frames against the family and the pipeline that the model's folder lies in.

    Raises:
        ValueError: the family takes none, or frames are given as pictures beside them, as no pipeline does.
    """
    if config.flow.is_forced:
        if not recipe.takes_forcing:
            raise ValueError(
                f"{family} takes one time for a clip; leave flow.diffusion_forcing out, or choose a model whose latent "
                "frames have times of their own, as SkyReelsV2Transformer3DModel"
            )
        if config.image.is_used:
            raise ValueError(
                f"{family} takes a frame that is given as latents alone where latent frames have times of their own; "
                "leave image.path and image.width out, or flow.diffusion_forcing"
            )
        return
    index = Path(config.model.path).resolve().parent / "model_index.json"
    if not recipe.takes_forcing or not config.model.path or not index.is_file():
        return
    if (
        "DiffusionForcing" in str(read_json(index, dict[str, Any]).get("_class_name"))
        and dist.get_rank() == 0
    ):
        logger.warning(
            "%s, says %s, was trained with a time for each latent frame, and is trained here with one for a clip; set "
            "flow.diffusion_forcing to non-decreasing to keep what it learned",
            config.model.path,
            index,
        )


def _warn_of_guidance(family: str, recipe: Recipe, config: TrainConfig) -> None:
    """Warns where published weights that were distilled from guided answers would be guided, or asked without text."""
    flow = config.flow
    if recipe.published.get("flow.caption_drop") != 0 or not config.model.path:
        return
    if (flow.caption_drop or flow.guidance != 1) and dist.get_rank() == 0:
        logger.warning(
            "%s answers as if it were guided, and is never asked without a caption: flow.caption_drop is %g, where 0 "
            "is meant, and flow.guidance %g, where 1 is",
            family,
            flow.caption_drop,
            flow.guidance,
        )


def _warn_of_padding(family: str, recipe: Recipe, config: TrainConfig) -> None:
    """Warns where a model of a pipeline would learn from captions of another length than the pipeline gives it."""
    usual = recipe.text[0].padded_to
    if config.model.path and usual not in (None, config.text.length) and dist.get_rank() == 0:
        logger.warning(
            "%s sees the padding of a caption, and its pipeline always pads to %d tokens; text.length is %d: set it to "
            "%d for weights that the pipeline is to load",
            family,
            usual,
            config.text.length,
            usual,
        )


def check_conditioning(recipe: Recipe, conditioning: Conditioning | None, config: TrainConfig) -> None:
    """Checks how frames are given against the pipeline that the model's folder lies in.

    Raises:
        ValueError: its weights would learn to take frames in a way in which no pipeline gives them any.
    """
    if conditioning is None or conditioning.place != "latents" or not config.conditions.are_used:
        return
    if not config.conditions.learn_given:
        raise ValueError(
            "frames that are given in the place of noise are never in the loss; leave conditions.learn_given out"
        )
    if recipe.takes_forcing and not config.flow.is_forced:
        raise ValueError(
            f"{recipe.models[0]} takes frames in the place of noise where latent frames have times of their own; set "
            "flow.diffusion_forcing, or choose weights of an image-to-video model"
        )
    # A family with one way alone has a pipeline for that.
    if len(recipe.frames) == 1 or not config.model.path or config.flow.is_forced:
        return
    index = Path(config.model.path).resolve().parent / "model_index.json"
    if not index.is_file():
        if dist.get_rank() == 0:
            logger.warning(
                "%s has no channels for frames that are given, and learns to take them in the place of noise, as Wan "
                "2.2 5B does; no model_index.json beside it says whether its pipeline gives any so",
                config.model.path,
            )
    elif not read_json(index, dict[str, Any]).get("expand_timesteps"):
        raise ValueError(
            f"{config.model.path} has no channels for frames that are given, and {index} says that its pipeline puts "
            "none in the place of noise (expand_timesteps); leave all of conditions but t2v out, or choose weights of "
            "an image-to-video model"
        )


def _check_pictures(family: str, taken: PictureStates | None, config: TrainConfig) -> None:
    """Raises ValueError where a run's pictures are not as the family takes them."""
    if taken is None:
        if config.image.is_used:
            raise ValueError(f"{family} takes no states of a picture; leave image.path and image.width out")
        return
    length = config.text.length
    if config.image.is_used and length != (taken.text_length or length):
        raise ValueError(
            f"a model that takes pictures' states counts on {taken.text_length} tokens of text behind them; "
            f"text.length is {length}: set it to {taken.text_length}, or leave image.path and image.width out"
        )
    if taken.of_all and config.conditions.are_used:
        if not config.image.is_used:
            raise ValueError(
                f"{family} sees a first frame that is given as a picture too; set image.path to the image_encoder of "
                "its image-to-video pipeline, or image.width to try a small one"
            )
        if config.conditions.t2v:
            raise ValueError(
                f"{family} learns to begin with a frame, or from text alone, each in a run of its own; set "
                "conditions.t2v to 0"
            )


def _check_levels(family: str, config: TrainConfig) -> None:
    """Raises ValueError where an option is for models of flow."""
    flow, default = config.flow, FlowConfig()
    for name in ("time_range", "boundary", "weighting", "huber"):
        if getattr(flow, name) != getattr(default, name):
            raise ValueError(
                f"{family} is trained at {NUM_LEVELS} levels of noise, of which flow.{name} knows nothing; leave it out"
            )
    if flow.shift in ("ltx", "open-sora-1.2"):
        raise ValueError(
            f'flow.shift="{flow.shift}" is of another family; leave it out, or give {family} a number'
        )
    if flow.sample_steps > NUM_LEVELS:
        raise ValueError(
            f"{family} has {NUM_LEVELS} levels of noise, and flow.sample_steps ({flow.sample_steps}) is more; use fewer"
        )


def _check_shift(config: TrainConfig) -> None:
    """Checks the shift of a model of noise levels against that of the pipeline that its folder lies in.

    Raises:
        ValueError: its levels have more noise, or less.
    """
    path = Path(config.model.path).resolve().parent / "scheduler" / "scheduler_config.json"
    if not config.model.path or not path.is_file():
        return
    scheduler = read_json(path, dict[str, Any])
    scale = snr_shift_scale(scheduler)
    shift = 1.0 if config.flow.shift == "auto" else float(config.flow.shift)
    if scale <= 0 or abs(shift**2 / scale - 1) <= 0.01:
        return
    if scale == 1:
        raise ValueError(
            f"{config.model.path} was trained at levels that nothing shifts, as {path} has them, and this run shifts "
            f"them by {shift:g}; leave flow.shift out"
        )
    raise ValueError(
        f"{config.model.path} was trained with a time shift of {scale**0.5:.5g}, the root of the snr_shift_scale "
        f"in {path}, and this run has {shift:g}; set flow.shift to {scale**0.5:.5g}"
    )


def _check_times(config: TrainConfig) -> None:
    """Checks the times of a run against those of the pipeline that the model's folder lies in, where that has experts.

    The weights themselves tell nothing: an expert that is trained in the other's range learns, and is asked there by
    no pipeline.

    Raises:
        ValueError: it is the expert of other times.
    """
    folder = Path(config.model.path)
    own = {"transformer": 0, "transformer_2": 1}.get(folder.resolve().name) if config.model.path else None
    index = folder.resolve().parent / "model_index.json"
    if own is None or not index.is_file():
        return
    boundary = read_json(index, dict[str, Any]).get("boundary_ratio")
    if not isinstance(boundary, float) or not 0 < boundary < 1:
        return
    times = ((boundary, 1.0), (0.0, boundary))[own]
    first, last = config.flow.time_range
    said = f"{config.model.path} is the expert of the times {times[0]:g} to {times[1]:g}"
    if (first, last) == (0.0, 1.0):
        if dist.get_rank() == 0:
            logger.warning(
                "%s, says %s, and is trained at all times; train it at its own (flow.time_range), or both experts "
                "(flow.boundary and model.path_2)",
                said,
                index,
            )
    elif first < times[0] or last > times[1]:
        raise ValueError(
            f"{said}, and {first:g} to {last:g} are trained, where its pipeline asks the other one ({index}); set "
            f"flow.boundary (or flow.time_range) by {boundary:g}, model.path to the folder transformer and "
            "model.path_2 to transformer_2"
        )
