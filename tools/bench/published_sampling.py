"""Published seconds and memory of sampling, with the settings that are told and those that are assumed.

Open-Sora 2.0, README: 50 steps of sampling at 768 × 768 on 1, 2, 4, 8 H100 take 1,656, 863, 466, 276 s. Each step is
assumed to be three forward passes (both guidances) of 129 frames with 512 text tokens, with FlashAttention-3, which its
repository looks for and which is taken to be as fast as cuDNN's; decoding comes on top. Its class is the stand-in of
tests/opensora_models. GB are GiB by opensora/utils/misc.py. Of memory 4 and 8 H100 are left out: 44.3 is what the table
has for 256 × 256 on 2 and 4 too, so that what is sampled is not what fills it.

xDiT, docs/performance/hunyuanvideo.md (github.com/xdit-project/xDiT): HunyuanVideo, 129 frames, 50 steps, Ulysses, on
H100. The model has its guidance built in, so that a step is one forward pass; attention is FlashAttention-2's. Assumed:
without a mask; decoding in the seconds, which are called the generation time.
docs/performance/cogvideo.md, with its pictures cogvideo-a100-2b.png and -5b.png (github.com/xdit-project/xdit_assets):
CogVideoX, 49 frames of 480 × 720, seconds a step on A100. A step is a forward pass of two samples, or of one where
guidance is split over two ranks ("CFG-2"). Assumed: bf16, and A100s on PCIe, as what two ranks lose by exchanging 4.1
and 9.2 GB, 0.15 and 0.35 s, are 26 GB/s: read off the very figures that are compared.

CogVideo, README (github.com/zai-org/CogVideo): CogVideoX-2B and -5B, 50 steps for 49 frames of 480 × 720 on one GPU.
A100: about 90 and 180 s, H100: about 45 and 90. Assumed: SXM, FlashAttention-2, both halves of guidance in a batch; the
VAE decodes on top. That they saved memory, which takes about 10 % longer, is told, and not foreseen.

Not compared are xDiT's figures of L20, L40 and H20, which are no hardware of the planner's; of FLUX and ConsisID, where
the length of captions and what is given of a face are not told; and of Step-Video, which has no policy here. USP
(arxiv.org/abs/2405.07719, github.com/feifeibear/long-context-attention) publishes attention under a causal mask alone,
and LLaMA-3's training: the planner counts attention to all tokens, as video transformers have it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from published_parts import decoding, decoding_cogvideox, of_kernel, sampling, seconds_of
from published_rows import GIB, Row
from torch import nn

from opensora_accel import Plan
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.models import MODELS, named_workload
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.trace import Trace
from opensora_accel.planner.workload import Workload

sys.path.insert(0, str(Path(__file__).parents[2]))

H100, A100, A100_PCIE = (Hardware.named(name) for name in ("h100x8", "a100x8", "a100pciex8"))
_BF16 = torch.bfloat16


def open_sora() -> Iterator[Row]:
    """Seconds of sampling, and GiB of the fullest device."""
    from tests.opensora_models.mmdit import MMDiTConfig, MMDiTModel

    tokens, text, batch, latents = 33 * 48 * 48, 512, 3, (33, 96, 96)

    def build() -> nn.Module:
        config = MMDiTConfig(
            from_pretrained=None, cache_dir=None, in_channels=64, vec_in_dim=768, context_in_dim=4096, hidden_size=3072,
            mlp_ratio=4.0, num_heads=24, depth=19, depth_single_blocks=38, axes_dim=[16, 56, 56], theta=10_000,
            qkv_bias=True, guidance_embed=False, cond_embed=True,
        )  # fmt: skip
        model: nn.Module = MMDiTModel(config).to(_BF16)
        return model

    workload = Workload(
        "Open-Sora 2.0",
        build,
        sampling(lambda _model: _mmdit_inputs(batch, tokens, text)),
        batch=batch,
        num_tokens=tokens,
        text_tokens=text,
        num_heads=24,
    )
    # T5-XXL, CLIP and the VAE lie on the device too.
    beside = {
        **MODELS["cogvideox-5b"].text_encoder,
        "CLIP-L": MODELS["hunyuan-video"].text_encoder["CLIP-L"],
        **MODELS["hunyuan-video"].vae,
    }
    for ranks, seconds, gibibytes in (
        (1, 1656.0, 60.3),
        (2, 863.0, 48.3),
        (4, 466.0, None),
        (8, 276.0, None),
    ):
        what, plan = f"768 px, 50 steps, {ranks} H100", Plan(ulysses=ranks)
        trace = trace_step(workload, plan)
        yield _sampled("Open-Sora 2.0", what, seconds, trace, H100, 50, partial(decoding, latents))
        if gibibytes is not None:
            # A traced step ends with an optimizer, and sampling has none.
            live = max(
                each.device_bytes - each.bytes_by_kind.get("optimizer state", 0) for each in trace.memory
            )
            size = (live + 2 * sum(beside.values())) / GIB
            yield Row("Open-Sora 2.0", f"{what}: memory allocated", "GiB", gibibytes, size=size)


def xdit_hunyuan() -> Iterator[Row]:
    """Seconds of sampling a clip."""
    published = {
        (720, 1280): {1: 1904.08, 2: 925.04, 4: 514.08, 8: 337.58},
        (960, 960): {1: 1735.01, 2: 934.09, 3: 645.45, 6: 367.02},
    }
    with mock.patch.dict(os.environ, of_kernel(with_flash=True)):
        for (height, width), rows in published.items():
            decoded = partial(decoding, (33, height // 8, width // 8))
            for ranks, seconds in rows.items():
                trace = trace_step(_model("hunyuan-video", 129, height, width, 1, H100), Plan(ulysses=ranks))
                what = f"HunyuanVideo, 129 × {height} × {width}, 50 steps, {ranks} H100"
                yield _sampled("xDiT, HunyuanVideo", what, seconds, trace, H100, 50, decoded)


def xdit_cogvideox() -> Iterator[Row]:
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
    for name, rows in published.items():
        for (way, (plan, batch)), seconds in zip(ways.items(), rows, strict=True):
            trace = trace_step(_model(name, 49, 480, 720, batch, A100_PCIE), plan)
            yield _sampled("xDiT, CogVideoX", f"{name}, a step, {way}", seconds, trace, A100_PCIE)


def cogvideo() -> Iterator[Row]:
    """Seconds of sampling a clip."""
    with mock.patch.dict(os.environ, of_kernel(with_flash=True)):
        for hardware, published in ((A100, (90.0, 180.0)), (H100, (45.0, 90.0))):
            for name, seconds in zip(("cogvideox-2b", "cogvideox-5b"), published, strict=True):
                trace = trace_step(_model(name, 49, 480, 720, 2, hardware), Plan())
                what = f"{name}, 50 steps, {hardware.name.partition('x')[0]}"
                yield _sampled("CogVideo", what, seconds, trace, hardware, 50, decoding_cogvideox)


def _model(name: str, frames: int, height: int, width: int, batch: int, hardware: Hardware) -> Workload:
    """A forward pass of a published model in bf16."""
    trained = named_workload(name, frames=frames, height=height, width=width, batch=batch)
    published = MODELS[name]
    clip = published.clip(frames, height, width, batch, published.text_tokens)
    return dataclasses.replace(
        trained,
        architecture=hardware.architecture,
        model_fn=lambda: published.build().to(_BF16),
        prepare=sampling(lambda model: published.inputs(clip, model, _BF16)),
    )


def _sampled(
    source: str,
    what: str,
    published: float,
    trace: Trace,
    hardware: Hardware,
    steps: int = 1,
    beside: Callable[[Hardware], float] = lambda hardware: 0.0,
) -> Row:
    def seconds(fitted: Hardware) -> float:
        return steps * seconds_of(trace, fitted) + beside(fitted)

    return Row(source, what, "s", published, hardware, seconds)


def _mmdit_inputs(batch: int, tokens: int, text: int) -> Mapping[str, Any]:
    """As tests/opensora_models/mmdit makes them, at the published size."""
    return {
        "img": torch.randn(batch, tokens, 64, dtype=_BF16),
        "img_ids": torch.zeros(batch, tokens, 3),
        "txt": torch.randn(batch, text, 4096, dtype=_BF16),
        "txt_ids": torch.zeros(batch, text, 3),
        "timesteps": torch.full((batch,), 0.5, dtype=_BF16),
        "y_vec": torch.randn(batch, 768, dtype=_BF16),
        "cond": torch.randn(batch, tokens, 68, dtype=_BF16),
    }


SOURCES: tuple[Callable[[], Iterator[Row]], ...] = (
    open_sora, xdit_hunyuan, xdit_cogvideox, cogvideo,
)  # fmt: skip
