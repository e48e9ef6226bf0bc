"""A tiny real run for tests: generated clips, a tiny Wan, 75 tokens and 3 heads that divide by neither 2 nor 4."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from opensora_accel import Plan

TINY_WAN = {
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "ffn_dim": 32,
    "freq_dim": 32,
    "rope_max_seq_len": 32,
}


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
        "model": {"config": dict(TINY_WAN)},
        "plan": dataclasses.asdict(plan or Plan()),
    }
    for name, value in changes.items():
        *tables, key = name.split(".")
        place = values
        for table in tables:
            place = place.setdefault(table, {})
        place[key] = value
    return config_from_dict(values, "the test")


def losses(config: Any) -> list[float]:
    """Of the first four steps."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    return [trainer.step()["loss"] for _ in range(4)]
