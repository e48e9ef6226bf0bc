"""The parts of a run, made from its configuration: device, model, encoders; checked against each other."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

import shardformer
from opensora_accel.parallel_states import get_mesh, get_parallel_group
from opensora_accel.plan import Plan
from opensora_accel.training.codec import Codec, check_multiple, latent_shape
from opensora_accel.training.config import ModelConfig, TrainConfig
from opensora_accel.training.together import from_all_ranks
from opensora_accel.verify import lift_casts
from shardformer.policy import model_names

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}
"""Of the weights; bf16 computes in bf16 on fp32 weights."""

TRAINABLE = ("WanTransformer3DModel", "SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel")
"""Models that a latent, a timestep and a caption are enough for; `derived_arguments` are theirs."""


def local_device() -> torch.device:
    """This rank's GPU, or the CPU, as `init_parallel` has chosen."""
    if get_mesh().device_type == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def build_model(
    config: ModelConfig, codec: Codec, text_width: int, seed: int, dtype: torch.dtype
) -> nn.Module:
    """The transformer in fp32, with the same weights on every rank; `dtype` is what it will run in.

    Raises ValueError for a class that has no policy, an argument that it does not take (with the nearest it does),
    or channels that do not fit the codec and the text encoder.
    """
    cls = model_class(config)
    derived = derived_arguments(codec.channels, text_width)
    arguments = model_arguments(config, codec.channels, text_width)
    # Without memory first: a wrong width must not fill the machine before it is found.
    with torch.device("meta"):
        outline = cls.from_config(arguments)
    for argument, needed in derived.items():
        if outline.config[argument] != needed:
            raise ValueError(
                f"the model's {argument} is {outline.config[argument]}, but the codec and text encoder give {needed}; "
                f"leave model.config.{argument} out, or choose a codec and text encoder that fit"
            )
    _check_memory(outline, dtype)
    if config.path:
        return cls.from_pretrained(config.path, local_files_only=True, torch_dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cls(**arguments)


def model_class(config: ModelConfig) -> Any:
    """The class of diffusers; ValueError for one that this loop does not know how to call."""
    import diffusers

    name = _class_in(config.path) if config.path else config.class_name
    if name in TRAINABLE:
        return getattr(diffusers, name)
    choice = f"choose one of {', '.join(TRAINABLE)}"
    if name in model_names():
        raise ValueError(
            f"model class {name!r} takes other inputs than this trainer has (latent, timestep, caption); {choice}, or "
            "call shardformer.shard in a loop of your own (docs/policies.md)"
        )
    raise ValueError(f"model class {name!r} cannot be trained here; {choice}")


def model_arguments(config: ModelConfig, num_channels: int, text_width: int) -> dict[str, Any]:
    """What the model is made with; ValueError for an argument that its class does not take."""
    cls = model_class(config)
    if config.path:
        return dict(cls.load_config(config.path, local_files_only=True))
    _check_arguments(cls, config.config)
    return {**derived_arguments(num_channels, text_width), **_tuples(config.config)}


def derived_arguments(num_channels: int, text_width: int) -> dict[str, int]:
    """Arguments that follow from the codec and the text encoder."""
    return {"in_channels": num_channels, "out_channels": num_channels, "text_dim": text_width}


def _check_memory(outline: nn.Module, dtype: torch.dtype) -> None:
    """Every rank of this machine builds the whole model on the host before it is sharded."""
    num_parameters = sum(parameter.numel() for parameter in outline.parameters())
    needed = dtype.itemsize * num_parameters * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = psutil.virtual_memory().available
    # One verdict, before any rank has taken memory: a rank that refused alone would leave the others waiting.
    if any(from_all_ranks(needed > available)):
        raise ValueError(
            f"{type(outline).__name__} with this model.config has {num_parameters / 1e9:.1f} B parameters: "
            f"{needed / 2**30:.0f} GiB for the ranks of this machine, where {available / 2**30:.0f} GiB are "
            "free; set model.config.num_layers, num_attention_heads and ffn_dim lower"
        )


def _class_in(path: str) -> str:
    description = Path(path) / "config.json"
    if not description.is_file():
        raise FileNotFoundError(
            f"model.path {path} has no config.json; give the local folder of a diffusers model"
        )
    return json.loads(description.read_text(encoding="utf-8")).get("_class_name", "")


def _check_arguments(cls: type, arguments: dict[str, Any]) -> None:
    known = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]  # type: ignore[misc]
    for name in arguments:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise ValueError(f"{cls.__name__} has no argument {name!r}; {hint}It takes {', '.join(known)}")


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """JSON's and TOML's lists as the tuples that model configs are made of."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def check_sizes(config: TrainConfig, codec: Codec, model: nn.Module) -> tuple[int, int, int, int]:
    """The latent shape [C, t, h, w] of a clip; ValueError where it does not fit codec, patches or data ranks."""
    shape = latent_shape(codec, config.data.num_frames, config.data.height, config.data.width)
    patch_time, patch_height, patch_width = _patch_size(model)
    for name, unit in (("height", patch_height), ("width", patch_width)):
        reason = f"codec ({codec.spatial}) × model patch ({unit})"
        check_multiple(f"data.{name}", getattr(config.data, name), codec.spatial * unit, reason)
    if shape[1] % patch_time:
        check_multiple("the number of latent frames", shape[1], patch_time, "the model's patch in time")
    return shape


def _patch_size(model: Any) -> tuple[int, int, int]:
    return tuple(model.config.patch_size)


def tokens_per_sample(shape: tuple[int, int, int, int], model: nn.Module) -> int:
    patch_time, patch_height, patch_width = _patch_size(model)
    return (shape[1] // patch_time) * (shape[2] // patch_height) * (shape[3] // patch_width)


def parallelize(model: nn.Module, plan: Plan, device: torch.device) -> tuple[nn.Module, Callable[..., Any]]:
    """The sharded model, and what to call for a prediction whose gradients are averaged over *mixed*."""
    model = model.train().to(device)
    if model.dtype != DTYPES[plan.precision]:
        model = model.to(DTYPES[plan.precision])
    if plan.precision == "fp64":
        lift_casts(model)
    shardformer.shard(model, plan)
    if plan.sharding != "none" or plan.mixed == 1:
        return model, model
    group = get_parallel_group("mixed")
    devices = [device] if device.type == "cuda" else None
    return model, nn.parallel.DistributedDataParallel(model, device_ids=devices, process_group=group)


def describe(config: TrainConfig, model: nn.Module, num_tokens: int, num_videos: int) -> str:
    """What is about to run, in three lines for a person."""
    size = sum(parameter.numel() for parameter in model.parameters())
    plan = config.plan
    degrees = ", ".join(
        f"{field.name}={getattr(plan, field.name)}"
        for field in dataclasses.fields(plan)
        if getattr(plan, field.name) != field.default
    )
    clip = f"{config.data.num_frames} × {config.data.height} × {config.data.width}"
    return (
        f"{type(model).__name__}, {size / 1e6:.2f} M parameters, on {dist.get_world_size()} rank(s)\n"
        f"plan: {degrees or 'one device'}\n"
        f"data: {num_videos} videos in {config.data.folder}, clips of {clip}, {num_tokens} tokens each, "
        f"{config.data.batch_size} per step"
    )
