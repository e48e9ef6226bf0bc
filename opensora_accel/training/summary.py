"""What a run says of itself before it begins: its model, its ranks, its plan and its data.

That of `make train` says

    WanTransformer3DModel, 1.97 M parameters, on 2 CPU rank(s)
    plan: ulysses=2, checkpoint=full, offload=1.0
    data: 4 videos in data/bunny, clips of 5 × 32 × 56, 560 tokens each, 2 per step
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from opensora_accel.plan import Plan
from opensora_accel.training.buckets import Bucket
from opensora_accel.training.build import local_device
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.sampler import Portion
from opensora_accel.training.sections import DataConfig


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
        f"{portion.bucket.height} × {portion.bucket.width}, {tokens[portion.bucket]} tokens each"
        + ("" if config.data.packed_tokens else f", {portion.batch_size} per step")
        for portion in portions
    ]
    for number, portion in enumerate(portions):
        own = _settings(config.plans.get(portion.bucket, plan), plan)
        clips[number] += f", with {own}" if own else ""
    if not config.data.buckets and not config.data.packed_tokens:
        return "\n".join([*lines, f"data: {clips[0]}"])
    filled = {portion.bucket for portion in portions}
    empty = [str(bucket) for bucket in config.data.sizes if bucket not in filled]
    warnings = [f"no file falls into the buckets {', '.join(empty)}"] if empty else []
    which = "data, in each step one of"
    if config.data.packed_tokens:
        which = (
            f"data, in rows of at most {config.data.packed_tokens} tokens, {config.data.batch_size} per step"
        )
    return "\n".join([*lines, which, *(f"  {each}" for each in [*clips, *warnings])])


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
