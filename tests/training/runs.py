"""A tiny real run for tests: generated clips, a tiny Wan, 75 tokens and 3 heads that divide by neither 2 nor 4."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from opensora_accel import Plan


def make_folder(folder: Path, num_videos: int = 5, num_frames: int = 12) -> Path:
    """Moving gradients, each of another colour; small enough that decoding is nothing."""
    from opensora_accel.training.video import write_video

    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(num_videos):
        ramp = torch.arange(40).view(1, 1, 40, 1) * 4 + torch.arange(num_frames).view(-1, 1, 1, 1) * 3
        tint = torch.tensor([number * 40, 120, 200 - number * 40])
        frames = ((ramp + tint) % 256).expand(num_frames, 24, 40, 3).to(torch.uint8)
        write_video(folder / f"{number}.mp4", frames, 12)
        lines.append(
            json.dumps({"file": f"{number}.mp4", "caption": f"a gradient of colour number {number}"})
        )
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def tiny_config(folder: Path | str, output: Path | str, plan: Plan | None = None, **changes: Any) -> Any:
    """Changes are by full name: `steps=3`, `**{"data.batch_size": 2}`."""
    from opensora_accel.training.config import config_from_dict

    values: dict[str, Any] = {
        "output": str(output),
        "steps": 20,
        "num_samples": 0,
        "data": {"folder": str(folder), "num_frames": 5, "height": 24, "width": 40, "batch_size": 4},
        "codec": {"patch": 4},
        "text": {"length": 8, "width": 32},
        "optim": {"lr": 3e-3, "warmup_steps": 5},
        "model": {
            "config": {
                "num_attention_heads": 3,
                "attention_head_dim": 12,
                "num_layers": 2,
                "ffn_dim": 32,
                "freq_dim": 32,
                "rope_max_seq_len": 32,
            }
        },
        "plan": dataclasses.asdict(plan or Plan()),
    }
    for name, value in changes.items():
        *tables, key = name.split(".")
        place = values
        for table in tables:
            place = place.setdefault(table, {})
        place[key] = value
    return config_from_dict(values, "the test")
