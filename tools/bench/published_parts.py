"""What published runs do that this package's trainer does not: loops of accelerate, and autoencoders on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import nn

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.observe import Run
from opensora_accel.planner.cost import Placement
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.search import simulated
from opensora_accel.planner.trace import Trace
from opensora_accel.planner.workload import Pass, Workload

Inputs = Callable[[nn.Module, torch.dtype], Mapping[str, Any]]
# Of AutoencoderKLHunyuanVideo in latents: frames, rows and columns of a tile, and from one tile to the next.
_TILE, _STRIDE = (5, 32, 32), (3, 24, 24)


def autocast_loop(inputs: Inputs, is_checkpointed: bool) -> Callable[[nn.Module, Run], Pass]:
    """A step as accelerate runs it with mixed_precision="bf16": weights as they are, forward under autocast.

    Blocks are recomputed by the model's own enable_gradient_checkpointing().
    """

    def prepare(model: nn.Module, run: Run) -> Pass:
        init_parallel(run.plan, "cpu")
        model.train()
        if is_checkpointed:
            model.enable_gradient_checkpointing()  # type: ignore[operator]
        given = inputs(model, torch.bfloat16)
        noise = torch.randn_like(next(iter(given.values())))

        def one_pass(_is_last: bool) -> None:
            # Traced as CUDA's by the planner.
            with torch.autocast("cpu", torch.bfloat16):
                output = model(**given)
            output = output[0] if isinstance(output, tuple) else output
            loss = (output.float() - noise).square().mean()
            del output
            loss.backward()

        return one_pass

    return prepare


def sampling(
    inputs: Callable[[nn.Module], Mapping[str, Any]],
) -> Callable[[nn.Module, Run], Pass]:
    """What prepares a forward pass alone. Attention on one rank has no mask of the text, as on several it has none."""

    def prepare(model: nn.Module, run: Run) -> Pass:
        init_parallel(run.plan, "cpu")
        sharded = shardformer.shard(model, run.plan) if run.plan.sequence > 1 else model
        given = inputs(model)
        attention = nn.functional.scaled_dot_product_attention

        def without_mask(*args: Any, attn_mask: Any = None, **kwargs: Any) -> torch.Tensor:
            return attention(*args, **kwargs)

        def one_pass(_is_last: bool) -> None:
            with torch.no_grad(), mock.patch.object(nn.functional, attention.__name__, without_mask):
                sharded(**given)

        return one_pass

    return prepare


def seconds_of(trace: Trace, hardware: Hardware) -> float:
    """Of a traced step."""
    return simulated(trace, hardware, Placement.on(hardware, trace.plan.world_size)).step_s


# ---- autoencoders


def encoding(hardware: Hardware) -> float:
    """Seconds of Wan 2.1's VAE for 93 frames of 704 × 1,280 in bf16, with convolutions as fast as products."""
    efficiencies = {name: each for name, each in hardware.efficiencies.items() if name != "gemm convolution"}
    trace = _autoencoder("AutoencoderKLWan", "encode", (1, 3, 93, 704, 1280), hardware.architecture)
    return seconds_of(trace, dataclasses.replace(hardware, efficiencies=efficiencies))


def decoding(sizes: tuple[int, int, int], hardware: Hardware) -> float:
    """Seconds of HunyuanVideo's VAE, tile by tile in 16 bits. `sizes`: frames, rows and columns of the latents.

    Of 33 frames there are 11 tiles, the last one of 3 frames: 10.6 whole ones, where a tile takes as its size.
    """
    trace = _autoencoder("AutoencoderKLHunyuanVideo", "decode", (1, 16, *_TILE), hardware.architecture)
    tiles = 1.0
    for size, tile, stride in zip(sizes, _TILE, _STRIDE, strict=True):
        tiles *= sum(min(tile, size - start) / tile for start in range(0, size, stride))
    return tiles * seconds_of(trace, hardware)


def decoding_cogvideox(hardware: Hardware) -> float:
    """Seconds of CogVideoX's VAE for 49 frames of 480 × 720."""
    trace = _autoencoder("AutoencoderKLCogVideoX", "decode", (1, 16, 13, 60, 90), hardware.architecture)
    return seconds_of(trace, hardware)


@cache
def _autoencoder(class_name: str, method: str, shape: tuple[int, ...], architecture: str) -> Trace:
    """One of diffusers with its default sizes, which are the published ones, encodes or decodes in bf16."""
    import diffusers

    def build() -> nn.Module:
        model: nn.Module = getattr(diffusers, class_name)().to(torch.bfloat16)
        return model

    def prepare(model: nn.Module, run: Run) -> Pass:
        init_parallel(run.plan, "cpu")
        given = torch.randn(*shape, dtype=torch.bfloat16)

        def one_pass(_is_last: bool) -> None:
            with torch.no_grad():
                getattr(model, method)(given)

        return one_pass

    return trace_step(Workload(class_name, build, prepare, architecture=architecture), Plan())


def of_kernel(with_flash: bool) -> dict[str, str]:
    """The environment in which torch takes FlashAttention-2, or its first choice."""
    return {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1" if with_flash else "0"}
