"""Times a step of the bundled trainer beside a loop of thirty lines over the same model of diffusers, in one process.

Claim: `Trainer.step` takes at most 1.02 times the plain step, with samples that any mesh would draw, checks of every
clip, and metrics written. Both decode the same videos by the same function, fold the pixels to latents, embed their
captions once before, clip gradients and step AdamW. Of a turn each takes one step; "ratio" is the trainer's time over
the plain loop's of the same round. In bf16 the trainer computes by its plan, and the plain loop by autocast. In fp32 a
GPU's products are TF32's.

    python tools/bench/trainer_step.py --rounds 40
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
import psutil
import torch
import torch.nn.functional as F
from harness import Report, make_claim, make_table
from torch import nn
from torch.distributed.tensor import DTensor

from opensora_accel.parallel_states import reset, start_distributed
from opensora_accel.training.config import TrainConfig, config_from_dict
from opensora_accel.training.loop import Trainer
from opensora_accel.training.metrics import Tracker
from opensora_accel.training.tiny_run import write_clips
from opensora_accel.training.video import read_clip

MOST = 1.02
PATCH, TEXT_LENGTH, TEXT_WIDTH = 4, 16, 64
# Sizes of Wan, and of a clip: frames, height, width; clips of a step.
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"heads": 4, "head_dim": 64, "layers": 4, "clip": (9, 64, 96), "batch": 2},
    # 8,640 tokens. Weights, gradients and moments of both lie there at the same time: 24 GB.
    "cuda": {"heads": 12, "head_dim": 128, "layers": 16, "clip": (9, 192, 320), "batch": 1},
    "quick": {"heads": 2, "head_dim": 12, "layers": 1, "clip": (5, 24, 40), "batch": 2},
}


def config_of(folder: Path, sizes: dict[str, Any], rounds: int, precision: str) -> TrainConfig:
    """A run of the trainer that keeps no averaged weights, as the plain loop keeps none."""
    num_frames, height, width = sizes["clip"]
    hidden = sizes["heads"] * sizes["head_dim"]
    model = {
        "num_attention_heads": sizes["heads"],
        "attention_head_dim": sizes["head_dim"],
        "ffn_dim": 4 * hidden,
    }
    return config_from_dict(
        {
            "output": str(folder / "run"),
            "steps": 10 * rounds + 100,
            "data": {
                "folder": str(folder / "clips"),
                "num_frames": num_frames,
                "height": height,
                "width": width,
                "batch_size": sizes["batch"],
            },
            "model": {"config": {**model, "num_layers": sizes["layers"]}},
            "codec": {"patch": PATCH},
            "text": {"length": TEXT_LENGTH, "width": TEXT_WIDTH},
            "optim": {"lr": 1e-4, "ema_decay": 0.0},
            "plan": {"precision": precision},
        },
        "the benchmark",
    )


class PlainLoop:
    """What one writes down for one device: nothing is checked, written or kept."""

    def __init__(self, config: TrainConfig, device: torch.device):
        from diffusers import WanTransformer3DModel

        data = config.data
        self.config, self.device, self.precision = data, device, config.plan.precision
        self.files = sorted(Path(data.folder).glob("*.mp4"))
        channels = 3 * PATCH**2
        self.model = WanTransformer3DModel(
            **config.model.config, in_channels=channels, out_channels=channels, text_dim=TEXT_WIDTH
        ).to(device)
        self.texts = torch.randn(len(self.files), TEXT_LENGTH, TEXT_WIDTH, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.rng = random.Random(0)

    def step(self) -> float:
        data, num_frames = self.config, self.config.num_frames
        numbers = self.rng.sample(range(len(self.files)), data.batch_size)
        size = {"height": data.height, "width": data.width}
        clips = [read_clip(self.files[n], self.rng.randrange(4), num_frames, **size) for n in numbers]
        pixels = torch.stack(clips).to(self.device).permute(0, 4, 1, 2, 3) / 127.5 - 1
        clean = F.pixel_unshuffle(pixels.transpose(1, 2), PATCH).transpose(1, 2)
        noise = torch.randn_like(clean)
        times = torch.randn(len(clean), device=self.device).sigmoid()
        t = times.view(-1, 1, 1, 1, 1)
        noisy = (1 - t) * clean + t * noise
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            (answer,) = self.model(noisy, 1000 * times, self.texts[numbers], return_dict=False)
        loss = F.mse_loss(answer.float(), noise - clean)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and returns 0."""
    parser = harness.make_parser("trainer_step", __doc__, 30)
    told = "default: bf16 on a GPU, where torch is 2.12 or newer, else fp32"
    parser.add_argument("--precision", choices=("bf16", "fp32"), help=told)
    options = harness.parse_options(parser, arguments, {"quick": {"rounds": 2}})
    has_bf16 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    options.precision = options.precision or ("bf16" if options.device == "cuda" and has_bf16 else "fp32")
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    sizes = SIZES["quick" if options.quick else options.device]
    report = Report(options, sizes=sizes, note="one process; both sides in turns, one step each")
    start_distributed()
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_clips(Path(folder) / "clips", num_frames=sizes["clip"][0] + 8)
            config = config_of(Path(folder), sizes, options.rounds, options.precision)
            measured = measure(config, device, options.rounds)
    finally:
        reset(destroy_process_group=True)
    report.result["rows"] = [measured]
    columns = {"trainer, ms": "trainer", "plain loop, ms": "plain loop", "ratio": "ratio"}
    report.show(make_table("A step", columns, [measured]))
    value = None if options.quick else measured["ratio"]["median"]
    report.result["claims"].append(
        make_claim("a step of the trainer over one of the plain loop", value, "at most", MOST)
    )
    report.finish()
    return 0


def measure(config: TrainConfig, device: torch.device, rounds: int) -> dict[str, Any]:
    """Times of both, in turns."""
    trainer, plain = Trainer(config), PlainLoop(config, device)
    state = trainer.state.model.state_dict()
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}
    plain.model.load_state_dict(whole)
    Path(config.output).mkdir(parents=True, exist_ok=True)
    with Tracker(config, "bench", 0, config.steps) as tracker:

        def step() -> None:
            begun = time.perf_counter()
            metrics = trainer.step()
            assert metrics is not None
            step_s = time.perf_counter() - begun
            memory_gib = psutil.Process().memory_info().rss / 2**30
            speed = {"tokens_per_s": metrics["tokens"] / step_s, "step_s": step_s, "memory_gib": memory_gib}
            tracker.step(trainer.state.step, metrics | speed)

        sides = {"trainer": step, "plain loop": plain.step}
        times = harness.take_turns(
            {name: partial(harness.time_ms, side, device) for name, side in sides.items()}, rounds
        )
    row = {name: harness.spread(values) for name, values in times.items()}
    return row | {"ratio": harness.ratios(times["trainer"], times["plain loop"])}


if __name__ == "__main__":
    raise SystemExit(main())
