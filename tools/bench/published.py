"""The planner's forecasts beside figures that others have published; nothing is fitted to them.

NeMo Automodel, docs/guides/diffusion/context-parallel: Wan2.1 1.3B on 8 H100, 16,384 tokens, fp32 weights, bf16
compute, FSDP2 over all ranks, no checkpoints: 54.9 GB a GPU with dp=8, 16.3 GB with dp=2 and Ulysses over 4. One sample
a data rank, the sizes of the clip and the caption's length are assumed; whether GB are 1e9 or 2**30 bytes is not told.

Open-Sora 2.0, README: 50 steps of sampling at 768 × 768 on 1, 2, 4, 8 H100 take 1,656, 863, 466, 276 s. Each step is
assumed to be three forward passes (both guidances) of 129 frames with 512 text tokens; encoding and decoding are left
out. Its class is the stand-in of tests/opensora_models.

xDiT, docs/performance/hunyuanvideo.md (github.com/xdit-project/xDiT): HunyuanVideo, 129 frames, 50 steps, Ulysses, on
H100. The model has its guidance built in, so that a step is one forward pass; attention is FlashAttention-2's.
docs/performance/cogvideo.md, with its pictures cogvideo-a100-2b.png and -5b.png (github.com/xdit-project/xdit_assets):
CogVideoX, 49 frames of 480 × 720, seconds a step on A100. A step is a forward pass of two samples, or of one where
guidance is split over two ranks ("CFG-2"). Assumed: A100s on NVLink, bf16, and that encoding and decoding take nothing.

Steps of training stand with their sources in published_training.py.

Not compared are xDiT's figures of L20, L40 and H20, which are no hardware of the planner's; of FLUX and ConsisID, where
the length of captions and what is given of a face are not told; and of Step-Video, which has no policy here. USP
(arxiv.org/abs/2405.07719, github.com/feifeibear/long-context-attention) publishes attention under a causal mask alone,
and LLaMA-3's training: the planner counts attention to all tokens, as video transformers have it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from published_training import SOURCES, Step
from torch import nn

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.observe.meshes import Run
from opensora_accel.planner.candidates import Passes, Request
from opensora_accel.planner.cost import Placement
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.models import MODELS, named_workload
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.search import communication_buffer_bytes, exact, simulated
from opensora_accel.planner.trace import Trace
from opensora_accel.planner.workload import Pass, Workload

sys.path.insert(0, str(Path(__file__).parents[2]))

H100, A100 = Hardware.named("h100x8"), Hardware.named("a100x8")


def nemo() -> list[dict[str, Any]]:
    """Memory of a GPU in training."""
    # 16 × 32 × 32 tokens.
    workload = named_workload("wan2.1-1.3b", frames=61, height=512, width=512)
    rows = []
    for plan, published in (
        (Plan(dp_shard=8, sharding="zero3", precision="bf16"), 54.9),
        (Plan(dp_shard=2, ulysses=4, sharding="zero3", precision="bf16"), 16.3),
    ):
        found = exact(Request(((workload, 1.0),), H100, 8), plan, Passes())
        low, high = (size / 1e9 for size in found.memory_bytes)
        rows.append(
            {
                "what": f"NeMo, Wan 1.3B, 16,384 tokens, dp={plan.dp_shard} cp={plan.ulysses}",
                "published": published,
                "low": low,
                "high": high,
                "unit": "GB",
            }
        )
    return rows


def open_sora() -> list[dict[str, Any]]:
    """Seconds of sampling."""
    from tests.opensora_models.mmdit import MMDiTConfig, MMDiTModel

    tokens, text, batch, steps = 33 * 48 * 48, 512, 3, 50

    def build() -> nn.Module:
        config = MMDiTConfig(
            from_pretrained=None, cache_dir=None, in_channels=64, vec_in_dim=768, context_in_dim=4096, hidden_size=3072,
            mlp_ratio=4.0, num_heads=24, depth=19, depth_single_blocks=38, axes_dim=[16, 56, 56], theta=10_000,
            qkv_bias=True, guidance_embed=False, cond_embed=True,
        )  # fmt: skip
        model: nn.Module = MMDiTModel(config).bfloat16()
        return model

    workload = Workload(
        "Open-Sora 2.0",
        build,
        _sampling(lambda _model: _mmdit_inputs(batch, tokens, text)),
        batch=batch,
        num_tokens=tokens,
        text_tokens=text,
        num_heads=24,
    )
    # Seconds, and GB of the fullest device, which holds T5-XXL, CLIP and the VAE too.
    published = {1: (1656.0, 60.3), 2: (863.0, 48.3), 4: (466.0, 44.3), 8: (276.0, 44.3)}
    hunyuan, cogvideox = MODELS["hunyuan-video"], MODELS["cogvideox-5b"]
    beside = {
        **cogvideox.text_encoder,
        "CLIP-L": hunyuan.text_encoder["CLIP-L"],
        **hunyuan.vae,
    }
    rows = []
    for ranks, (seconds, gigabytes) in published.items():
        what, plan = f"Open-Sora 2.0, 768 px, 50 steps, {ranks} H100", Plan(ulysses=ranks)
        trace = trace_step(workload, plan)
        rows.append(_seconds(what, seconds, trace, H100, steps))
        # A traced step ends with an optimizer, and sampling has none.
        sampled = (each.device_bytes - each.bytes_by_kind.get("optimizer state", 0) for each in trace.memory)
        low = max(sampled) + 2 * sum(beside.values()) + H100.context_bytes
        high = low * (1 + H100.allocator_slack) + communication_buffer_bytes(trace, H100)
        rows.append(
            {
                "what": f"{what}: memory",
                "published": gigabytes,
                "low": low / 1e9,
                "high": high / 1e9,
                "unit": "GB",
            }
        )
    return rows


def xdit_hunyuan() -> list[dict[str, Any]]:
    """Seconds of sampling a clip."""
    published = {
        (720, 1280): {1: 1904.08, 2: 925.04, 4: 514.08, 8: 337.58},
        (960, 960): {1: 1735.01, 2: 934.09, 3: 645.45, 6: 367.02},
    }
    # The package flash_attn, which xDiT asks for: torch's flash is the same kernel.
    with mock.patch.dict(os.environ, TORCH_CUDNN_SDPA_DEPRIORITIZED="1"):
        return [
            _seconds(
                f"xDiT, HunyuanVideo, 129 × {height} × {width}, 50 steps, {ranks} H100", seconds,
                trace_step(_sampled_model("hunyuan-video", 129, height, width, 1, H100), Plan(ulysses=ranks)), H100, 50,
            )
            for (height, width), rows in published.items()
            for ranks, seconds in rows.items()
        ]  # fmt: skip


def xdit_cogvideox() -> list[dict[str, Any]]:
    """Seconds of a step."""
    # With both halves of guidance in a batch, and on two ranks of their own.
    ways = {
        "1 A100": (Plan(), 2),
        "Ulysses-2": (Plan(ulysses=2), 2),
        "Ring-2": (Plan(ring=2), 2),
        "CFG-2": (Plan(), 1),
        "Ulysses-2 × CFG-2": (Plan(ulysses=2), 1),
        "Ring-2 × CFG-2": (Plan(ring=2), 1),
    }
    published = {
        "cogvideox-2b": (1.44, 0.87, 0.88, 0.74, 0.48, 0.47),
        "cogvideox-5b": (4.07, 2.38, 2.44, 2.12, 1.27, 1.27),
    }
    return [
        _seconds(
            f"xDiT, {name}, a step, {way}", seconds,
            trace_step(_sampled_model(name, 49, 480, 720, batch, A100), plan), A100,
        )
        for name, rows in published.items()
        for (way, (plan, batch)), seconds in zip(ways.items(), rows, strict=True)
    ]  # fmt: skip


def _sampled_model(
    name: str, frames: int, height: int, width: int, batch: int, hardware: Hardware
) -> Workload:
    """A forward pass of a published model in bf16."""
    trained = named_workload(name, frames=frames, height=height, width=width, batch=batch)
    published = MODELS[name]
    clip = published.clip(frames, height, width, batch, published.text_tokens)
    return dataclasses.replace(
        trained,
        architecture=hardware.architecture,
        model_fn=lambda: published.build().bfloat16(),
        prepare=_sampling(lambda model: published.inputs(clip, model, torch.bfloat16)),
    )


def _sampling(inputs: Callable[[nn.Module], Mapping[str, Any]]) -> Callable[[nn.Module, Run], Pass]:
    """What prepares a forward pass alone."""

    def prepare(model: nn.Module, run: Run) -> Pass:
        init_parallel(run.plan, "cpu")
        sharded = shardformer.shard(model, run.plan) if run.plan.sequence > 1 else model
        given = inputs(model)

        def one_pass(_is_last: bool) -> None:
            with torch.no_grad():
                sharded(**given)

        return one_pass

    return prepare


def _seconds(what: str, published: float, trace: Trace, hardware: Hardware, steps: int = 1) -> dict[str, Any]:
    """A row of the table."""
    placement = Placement.on(hardware, trace.plan.world_size)
    low, high = (steps * simulated(trace, hardware.bound(sign), placement).step_s for sign in (-1, 1))
    return {"what": what, "published": published, "low": low, "high": high, "unit": "s"}


def _mmdit_inputs(batch: int, tokens: int, text: int) -> Mapping[str, Any]:
    """As tests/opensora_models/mmdit makes them, at the published size."""
    return {
        "img": torch.randn(batch, tokens, 64, dtype=torch.bfloat16),
        "img_ids": torch.zeros(batch, tokens, 3),
        "txt": torch.randn(batch, text, 4096, dtype=torch.bfloat16),
        "txt_ids": torch.zeros(batch, text, 3),
        "timesteps": torch.full((batch,), 0.5, dtype=torch.bfloat16),
        "y_vec": torch.randn(batch, 768, dtype=torch.bfloat16),
        "cond": torch.randn(batch, tokens, 68, dtype=torch.bfloat16),
    }


def training(steps: Callable[[], Iterator[Step]]) -> list[dict[str, Any]]:
    """Seconds or memory of training steps."""
    rows = []
    for step in steps():
        what, figure = f"{step.source}, {step.what}", step.figure
        low, high = step.forecast()
        rows.append(
            {
                "what": what if figure.of == "seconds" else f"{what}: memory {figure.of}",
                "published": figure.value,
                "low": low,
                "high": high,
                "unit": figure.unit,
            }
        )
    return rows


TABLES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    **{steps.__name__: partial(training, steps) for steps in SOURCES},
    "nemo": nemo,
    "open_sora": open_sora,
    "xdit_hunyuan": xdit_hunyuan,
    "xdit_cogvideox": xdit_cogvideox,
}


def main() -> int:
    """Prints a table in markdown; 0."""
    parser = argparse.ArgumentParser(
        "python tools/bench/published.py", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", choices=tuple(TABLES), help="one of the publications")
    chosen = parser.parse_args().only
    print("| what | published | forecast | error of the middle |\n|---|---|---|---|")
    found: dict[str, list[tuple[float, bool]]] = {"seconds": [], "memory": []}
    for name, rows_of in TABLES.items():
        for row in rows_of() if chosen in (None, name) else ():
            error = (row["low"] + row["high"]) / 2 / row["published"] - 1
            kind = "seconds" if row["unit"] == "s" else "memory"
            found[kind].append((error, row["low"] <= row["published"] <= row["high"]))
            print(
                f"| {row['what']} | {row['published']:,.4g} {row['unit']} | {row['low']:,.4g} to {row['high']:,.4g} "
                f"{row['unit']} | {error:+.0%} |",
                flush=True,
            )
    for kind, errors in found.items():
        if errors:
            sizes = [abs(error) for error, _holds in errors]
            print(
                f"{kind}, figures: {len(errors)}, median error {statistics.median(sizes):.0%}, worst {max(sizes):.0%}, "
                f"{sum(holds for _error, holds in errors)} within their interval"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
