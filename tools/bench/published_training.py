"""Published seconds and memory of training steps, with the settings that are told and those that are assumed.

    source        NeMo DFM, docs/performance-summary.md
    settings      Wan 14B, 37,440 tokens a sample, FSDP2 over 8 H100
    published     175.88 TFLOP/s a GPU, by the page's own count 35.3 s a step

become a `Step`: what it takes to trace it, and the figure that was measured of it. `published.py` sets the planner's
forecast beside each.

Not compared are steps whose trained weights are in bf16 without fp32 ones, as NeMo Automodel's of Qwen-Image-Edit and
finetrainers' of LTX-Video: a Plan trains fp32 weights. Nor those of compiled blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from opensora_accel import Plan
from opensora_accel.planner.candidates import Passes, Request, Residents
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.models import MODELS, named_workload
from opensora_accel.planner.search import exact
from opensora_accel.planner.workload import Workload, workload_of_model

GIB = 2**30
Inputs = Callable[[nn.Module, torch.dtype], Mapping[str, Any]]


@dataclass(frozen=True)
class Figure:
    """What was published of a step.

    `of`: seconds of a step, or memory of a GPU that torch's allocator has "reserved".
    """

    of: Literal["seconds", "reserved"]
    value: float

    @property
    def unit(self) -> str:
        return "s" if self.of == "seconds" else "GiB"


@dataclass(frozen=True)
class Step:
    """A training step that others have measured."""

    source: str
    what: str
    hardware: str
    plan: Plan
    workload: Callable[[], Workload]
    figure: Figure
    passes: Passes = field(default_factory=Passes)
    residents: Residents = field(default_factory=Residents)

    def forecast(self) -> tuple[float, float]:
        """The low and the high end of what the planner foresees of the figure, in its unit."""
        hardware = Hardware.named(self.hardware)
        request = Request(
            ((self.workload(), 1.0),), hardware, self.plan.world_size,
            precision=self.plan.precision, residents=self.residents,
        )  # fmt: skip
        found = exact(request, self.plan, self.passes)
        if self.figure.of == "seconds":
            return found.step_time_s
        assert found.trace is not None
        low, high = found.memory_bytes
        # What the driver and the communicators take, the allocator does not count.
        communicators = hardware.communicator_bytes * len(found.trace.groups)
        return (low - hardware.context_bytes) / GIB, (high - hardware.context_bytes - communicators) / GIB


# ---- models, and how they are trained


def _cosmos(_model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """93 frames of 704 × 1,280."""
    return {
        "hidden_states": torch.randn(1, 16, 24, 88, 160, dtype=dtype),
        "timestep": torch.rand(1, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, 512, 1024, dtype=dtype),
        "fps": 16,
        "condition_mask": torch.zeros(1, 1, 24, 88, 160, dtype=dtype),
        "return_dict": False,
    }


def _built(class_name: str, dtype: torch.dtype | None = None, lora: int = 0, **arguments: Any) -> nn.Module:
    """A class of diffusers, its weights in a dtype, or frozen with adapters of a rank at attention's projections."""
    import diffusers

    model: nn.Module = getattr(diffusers, class_name)(**arguments)
    if dtype is not None:
        model = model.to(dtype)
    if lora:
        from peft import LoraConfig

        model.requires_grad_(False)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(LoraConfig(r=lora, lora_alpha=lora, target_modules=targets))  # type: ignore[operator]
    return model


def _workload(class_name: str, inputs: Inputs, **arguments: Any) -> Workload:
    return workload_of_model(class_name, partial(_built, class_name, **arguments), inputs)


def _clip(
    name: str,
    frames: int,
    height: int,
    width: int,
    *,
    dtype: torch.dtype | None = None,
    lora: int = 0,
    **sizes: int,
) -> Workload:
    """A model that the planner knows by name."""
    published, named = MODELS[name], named_workload(name, frames=frames, height=height, width=width, **sizes)
    return dataclasses.replace(
        named, model_fn=partial(_built, published.class_name, dtype, lora, **published.arguments)
    )


_BF16 = torch.bfloat16


def nemo_wan() -> Iterator[Step]:
    """github.com/NVIDIA-NeMo/DFM, docs/performance-summary.md: pretraining of Wan 2.1 14B, 37,440 tokens a sample.

    Told: FSDP2 over 8 and over 64 H100, 175.88 and 228.85 TFLOP/s a GPU, which are 35.3 and 27.1 s a step by the
    page's own 165.9 GFLOP a token; Megatron on 32 GB300 with context parallelism 2, 64 samples a step, 6,161.63
    tokens/s a GPU, which are 12.15 s. Assumed: fp32 weights; whole blocks recomputed on H100, as nothing else fits, and
    none on GB300, as the recipe's name says; 93 frames of 480 × 832; 400 Gb/s a GPU between nodes; Megatron's way is
    taken for Ulysses.
    """
    workload = partial(_clip, "wan2.1-14b", 93, 480, 832)
    for ranks, seconds in ((8, 35.3), (64, 27.1)):
        plan = Plan(dp_shard=ranks, sharding="zero3", precision="bf16", checkpoint="full")
        yield Step(
            "NeMo DFM, Wan 14B", f"37,440 tokens, FSDP2 on {ranks} H100", "h100x8-ib400", plan, workload,
            Figure("seconds", seconds),
        )  # fmt: skip
    yield Step(
        "NeMo DFM, Wan 14B", "37,440 tokens, cp=2 on 32 GB300", "gb300x72",
        Plan(dp_shard=16, ulysses=2, sharding="zero2", precision="bf16"), workload, Figure("seconds", 12.15), Passes(4),
    )  # fmt: skip


def cosmos() -> Iterator[Step]:
    """github.com/nvidia-cosmos/cosmos-predict2, documentations/post-training_video2world_agibot_fisheye.md, 2.2.

    Told: 93 frames of 704 × 1,280; 2B on 8 GPUs with context parallelism 2, 14B on 32 with 8; FSDP over all;
    attention's output and some products kept. The seconds have the encoding of the clip in them. Assumed: fp32 weights,
    Ulysses, 512 tokens of text, 400 Gb/s a GPU between nodes, A100 SXM of 80 GB, no mask of padding.
    """
    small = dict(num_attention_heads=16, num_layers=28)
    large = dict(num_attention_heads=40, num_layers=36)
    both = dict(in_channels=17, extra_pos_embed_type=None, concat_padding_mask=False)
    for device, seconds_2b, seconds_14b in (
        ("b200", 6.05, 6.27),
        ("h100nvl", 10.07, 8.72),
        ("a100", 22.5, 22.14),
    ):
        for name, sizes, ulysses, seconds in (("2B", small, 2, seconds_2b), ("14B", large, 8, seconds_14b)):
            ranks = 4 * ulysses
            yield Step(
                "Cosmos-Predict2", f"{name}, 84,480 tokens, cp={ulysses} on {ranks} {device}", f"{device}x8-ib400",
                Plan(dp_shard=4, ulysses=ulysses, sharding="zero3", precision="bf16", checkpoint="selective"),
                partial(_workload, "CosmosTransformer3DModel", _cosmos, **sizes, **both), Figure("seconds", seconds),
                residents=Residents(ema=True),
            )  # fmt: skip


def cogvideox() -> Iterator[Step]:
    """github.com/a-r-r-o-w/cogvideox-factory, README.md, memory requirements: 49 frames of 480 × 720 on one A100.

    Told: AdamW or its 8-bit form, autocast, latents and captions cached, the column before validation. Assumed: GiB
    that torch's allocator has reserved; adapters at attention's projections, base weights in 16 bits; fp32 weights
    where all are trained, as the tables' differences say (51.9 GiB of weights, gradients and moments of 5B).
    """
    rows: tuple[tuple[str, int, bool, int, str, float], ...] = (
        ("2b", 16, False, 1, "adamw", 43.764),
        ("2b", 256, False, 1, "adamw", 45.826),
        ("2b", 16, True, 4, "adamw", 21.803),
        ("5b", 16, True, 4, "adamw", 46.492),
        ("5b", 256, True, 1, "adamw", 22.119),
        ("2b", 0, True, 1, "adamw", 33.934),
        ("2b", 0, True, 4, "adamw", 38.281),
        ("2b", 0, True, 4, "adamw-8bit", 27.930),
        ("5b", 0, True, 1, "adamw-8bit", 52.826),
        ("5b", 0, True, 4, "adamw-8bit", 66.648),
    )
    for name, lora, is_checkpointed, batch, optimizer, reserved in rows:
        trained = f"LoRA of rank {lora}" if lora else f"all weights, {optimizer}"
        what = f"CogVideoX-{name}, {trained}, batch {batch}{', checkpoints' if is_checkpointed else ''}"
        plan = Plan(checkpoint="full" if is_checkpointed else "none", precision="bf16")
        workload = partial(
            _clip, f"cogvideox-{name}", 49, 480, 720, batch=batch, lora=lora, dtype=_BF16 if lora else None
        )
        yield Step(
            "cogvideox-factory", what, "a100", plan, workload, Figure("reserved", reserved),
            residents=Residents(optimizer=optimizer),
        )  # fmt: skip


def finetrainers() -> Iterator[Step]:
    """github.com/a-r-r-o-w/finetrainers, docs/training/hunyuan_video.md: 49 frames of 512 × 768 on one GPU.

    Told: LoRA of rank 128, whole blocks recomputed, latents and captions cached. Assumed: GiB that torch's allocator
    has reserved.
    """
    yield Step(
        "finetrainers", "HunyuanVideo, LoRA of rank 128", "h100", Plan(checkpoint="full", precision="bf16"),
        partial(_clip, "hunyuan-video", 49, 512, 768, dtype=_BF16, lora=128), Figure("reserved", 42.387),
    )  # fmt: skip


SOURCES: tuple[Callable[[], Iterator[Step]], ...] = (
    nemo_wan, cosmos, cogvideox, finetrainers,
)  # fmt: skip
