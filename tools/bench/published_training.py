"""Published seconds and memory of training steps, with the settings that are told and those that are assumed.

    source        NeMo DFM, docs/performance-summary.md
    settings      Wan 14B, 37,440 tokens a sample, FSDP2 over 8 H100
    published     175.88 TFLOP/s a GPU, by the page's own count 35.3 s a step

become a `Step`: what it takes to trace it, and the figure that was measured of it. `published.py` sets the planner's
forecast beside each.

On a Hopper NeMo's and finetrainers' attention is assumed to be torch's FlashAttention-2. Today's torch prefers cuDNN's;
which one their torch took is not told.

Some of what is assumed was chosen when figures and forecasts stood side by side, because it explains them: that, which
step of cogvideox-factory's runs is told, and how fast Cosmos encodes. Such figures are not as blind as the others.

Not compared are steps whose trained weights are in bf16 without fp32 ones, as NeMo Automodel's of Qwen-Image-Edit and
finetrainers' of LTX-Video: a Plan trains fp32 weights. Nor those of compiled blocks.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from published_parts import Inputs, autocast_loop, encoding, of_kernel
from published_rows import GIB, Row
from torch import nn

from opensora_accel import Plan
from opensora_accel.planner.candidates import Passes, Request, Residents
from opensora_accel.planner.cost import Placement
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.models import MODELS, named_workload
from opensora_accel.planner.search import exact, repeated_s, simulated
from opensora_accel.planner.trace import Trace
from opensora_accel.planner.workload import Workload, workload_of_model


@dataclass(frozen=True)
class Figure:
    """What was published of a step.

    `of`: seconds of a step, or the most memory of a GPU that torch's allocator has "allocated" or "reserved", or has
    reserved "in the first step".
    """

    of: Literal["seconds", "allocated", "reserved", "in the first step"]
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
    # Seconds of what a step does beside the passes of the model.
    beside: Callable[[Hardware], float] | None = None
    # Whether torch's attention is taken for FlashAttention-2 on a GPU for which today's torch prefers cuDNN's.
    with_flash: bool = False
    residents: Residents = field(default_factory=Residents)

    def row(self) -> Row:
        """The figure with its forecast."""
        hardware = Hardware.named(self.hardware)
        request = Request(
            ((self.workload(), 1.0),), hardware, self.plan.world_size,
            precision=self.plan.precision, residents=self.residents,
        )  # fmt: skip
        with mock.patch.dict(os.environ, of_kernel(self.with_flash)):
            found = exact(request, self.plan, self.passes)
        trace, figure = found.trace, self.figure
        assert trace is not None
        row = Row(self.source, self.what, figure.unit, figure.value)
        if figure.of == "seconds":
            seconds = partial(_seconds, trace, self.passes, self.beside)
            return dataclasses.replace(row, hardware=hardware, seconds=seconds)
        first = figure.of == "in the first step"
        allocator = trace.storages.replayed(
            state_ratio=self.residents.state_ratio / 2, num_steps=1 if first else 2
        )
        no_tensors = ("context", "communication buffers", "allocator slack")
        live = sum(size for kind, size in found.bytes_by_kind.items() if kind not in no_tensors)
        if first:
            live = allocator.most_live_bytes
        size = live if figure.of == "allocated" else live + allocator.lost_bytes
        return dataclasses.replace(row, what=f"{self.what}: memory {figure.of}", size=size / GIB)


def _seconds(
    trace: Trace, passes: Passes, beside: Callable[[Hardware], float] | None, hardware: Hardware
) -> float:
    """Of a step on a hardware, with what it has beside the model's passes."""
    timeline = simulated(trace, hardware, Placement.on(hardware, trace.plan.world_size))
    # `exact` traces two microbatches at most, and others follow.
    step_s = repeated_s(trace, timeline, passes.accumulation / min(2, passes.accumulation))
    return step_s + (beside(hardware) if beside else 0.0)


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


def _by_accelerate(
    name: str,
    frames: int,
    height: int,
    width: int,
    batch: int,
    lora: int,
    is_checkpointed: bool,
    by_lists: bool = True,
) -> Workload:
    """Training in autocast, with adapters of a rank on weights in bf16, or of all weights in fp32.

    `by_lists`: as torch's AdamW steps, with temporary lists of all parameters' size; bitsandbytes has none.
    """
    published = MODELS[name]
    clip = published.clip(frames, height, width, batch, published.text_tokens)
    return dataclasses.replace(
        named_workload(name, frames=frames, height=height, width=width, batch=batch),
        model_fn=partial(
            _built, published.class_name, torch.bfloat16 if lora else None, lora, **published.arguments
        ),
        prepare=autocast_loop(partial(published.inputs, clip), is_checkpointed),
        fused_optimizer=not by_lists,
    )


def nemo_wan() -> Iterator[Step]:
    """github.com/NVIDIA-NeMo/DFM, docs/performance-summary.md: pretraining of Wan 2.1 14B, 37,440 tokens a sample.

    Told: FSDP2 over 8 and over 64 H100, 175.88 and 228.85 TFLOP/s a GPU, which are 35.3 and 27.1 s a step by the
    page's own 165.9 GFLOP a token; Megatron on 32 GB300 with context parallelism 2, 64 samples a step, 6,161.63
    tokens/s a GPU, which are 12.15 s. Assumed: fp32 weights; torch's FlashAttention-2 and whole blocks recomputed on
    H100, as nothing else fits, and none on GB300, as the recipe's name says; 93 frames of 480 × 832; 400 Gb/s a GPU
    between nodes; Megatron's way is taken for Ulysses.
    """
    workload = partial(named_workload, "wan2.1-14b", frames=93, height=480, width=832)
    for ranks, seconds in ((8, 35.3), (64, 27.1)):
        plan = Plan(dp_shard=ranks, sharding="zero3", precision="bf16", checkpoint="full")
        yield Step(
            "NeMo DFM, Wan 14B", f"37,440 tokens, FSDP2 on {ranks} H100", "h100x8-ib400", plan, workload,
            Figure("seconds", seconds), with_flash=True,
        )  # fmt: skip
    yield Step(
        "NeMo DFM, Wan 14B", "37,440 tokens, cp=2 on 32 GB300", "gb300x72",
        Plan(dp_shard=16, ulysses=2, sharding="zero2", precision="bf16"), workload, Figure("seconds", 12.15), Passes(4),
    )  # fmt: skip


def nemo_automodel() -> Iterator[Step]:
    """github.com/NVIDIA-NeMo/Automodel, docs/guides/diffusion: context parallelism of Wan2.1 1.3B on 8 H100.

    Told: 16,384 tokens, fp32 weights, bf16 compute, FSDP2 over all ranks, no checkpoints, 54.9 GB a GPU with dp=8 and
    16.3 with dp=2 and Ulysses over 4. GB are GiB that the allocator had allocated: recipes/diffusion/train.py prints
    max_memory_allocated() / 1024**3. Assumed: one sample a data rank, 61 frames of 512 × 512, 512 tokens of text.
    """
    workload = partial(named_workload, "wan2.1-1.3b", frames=61, height=512, width=512)
    for shards, ulysses, gibibytes in ((8, 1, 54.9), (2, 4, 16.3)):
        plan = Plan(dp_shard=shards, ulysses=ulysses, sharding="zero3", precision="bf16")
        yield Step(
            "NeMo Automodel, Wan 1.3B", f"16,384 tokens, dp={shards} cp={ulysses}", "h100x8", plan, workload,
            Figure("allocated", gibibytes), with_flash=True,
        )  # fmt: skip


def cosmos() -> Iterator[Step]:
    """github.com/nvidia-cosmos/cosmos-predict2, documentations/post-training_video2world_agibot_fisheye.md, 2.2.

    Told: 93 frames of 704 × 1,280; 2B on 8 GPUs with context parallelism 2, 14B on 32 with 8; FSDP over all;
    attention's output and some products kept; clips are encoded in the step. Assumed: by Wan 2.1's VAE on every rank;
    fp32 weights, Ulysses, 512 tokens of text, 400 Gb/s a GPU between nodes, A100 SXM of 80 GB, no mask of padding, and
    that convolutions in NVIDIA's container are as fast as products: were they as slow as elsewhere (devices.py),
    encoding alone would take as long as the whole step on an H100 NVL.
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
                residents=Residents(ema=True), beside=encoding,
            )  # fmt: skip


def cogvideox() -> Iterator[Step]:
    """github.com/a-r-r-o-w/cogvideox-factory, training/README.md: 49 frames of 480 × 720 on one A100.

    Told: AdamW or its 8-bit form, accelerate's autocast, latents and captions cached, the column before validation; by
    utils.py GiB. Left out: what is no more than the column before training, when the text encoder is there. Assumed:
    max_memory_reserved, and adapters at attention's projections; base weights in 16 bits, and in fp32 where all are
    trained, as the column before training says; that figures are of the first step, as 8-bit moments and those on the
    host have the same ones to 0.1 % (27.930 and 27.916, 66.648 and 66.607), so that none are in them.
    """
    rows: tuple[tuple[str, int, bool, int, str, float], ...] = (
        ("2b", 16, False, 1, "adamw", 43.764),
        ("2b", 64, False, 1, "adamw", 44.314),
        ("2b", 256, False, 1, "adamw", 45.826),
        ("2b", 16, True, 4, "adamw", 21.803),
        ("2b", 64, True, 4, "adamw", 22.254),
        ("5b", 16, True, 4, "adamw", 46.492),
        ("5b", 64, True, 4, "adamw", 47.805),
        ("5b", 256, True, 1, "adamw", 22.119),
        ("2b", 0, True, 1, "adamw", 33.934),
        ("2b", 0, True, 4, "adamw", 38.281),
        ("2b", 0, True, 4, "adamw-8bit", 27.930),
        ("5b", 0, True, 1, "adamw-8bit", 52.826),
        ("5b", 0, True, 4, "adamw-8bit", 66.648),
    )
    for name, lora, is_checkpointed, batch, optimizer, reserved in rows:
        trained = f"LoRA of rank {lora}" if lora else f"all weights, {optimizer}"
        yield Step(
            "cogvideox-factory",
            f"CogVideoX-{name}, {trained}, batch {batch}{', checkpoints' if is_checkpointed else ''}",
            "a100",
            Plan(),
            partial(
                _by_accelerate,
                f"cogvideox-{name}",
                49,
                480,
                720,
                batch,
                lora,
                is_checkpointed,
                by_lists=optimizer == "adamw",
            ),
            Figure("in the first step", reserved),
            residents=Residents(optimizer=optimizer),
        )


def finetrainers() -> Iterator[Step]:
    """github.com/a-r-r-o-w/finetrainers, docs/training/hunyuan_video.md: 49 frames of 512 × 768 on one GPU.

    Told: LoRA of rank 128, whole blocks recomputed, latents and captions cached; accelerate's autocast. Assumed: GiB
    that torch's allocator has reserved.
    """
    yield Step(
        "finetrainers", "HunyuanVideo, LoRA of rank 128", "h100", Plan(),
        partial(_by_accelerate, "hunyuan-video", 49, 512, 768, 1, 128, True), Figure("reserved", 42.387),
        with_flash=True,
    )  # fmt: skip


SOURCES: tuple[Callable[[], Iterator[Step]], ...] = (
    nemo_wan, nemo_automodel, cosmos, cogvideox, finetrainers,
)  # fmt: skip
