"""A tiny real run for tests: generated clips, a tiny Wan, 75 tokens and 3 heads that divide by neither 2 nor 4."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from opensora_accel import Plan

# For what steps matrices or sums over all parameters: layers of 36 and 32 over 5 ranks are shards of 8, 8, 8, 8 and 4
# rows, and of 7 and 4.
SHARDED = [
    Plan(dp_shard=2, sharding="zero3"),
    Plan(ulysses=5, sharding="zero3"),
    Plan(dp_replicate=2, dp_shard=2, sharding="zero2"),
    Plan(dp_replicate=2),
    Plan(ring=3, sharding="zero3", sharding_factor=3),
]
TINY_WAN = {
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "ffn_dim": 32,
    "freq_dim": 32,
    "rope_max_seq_len": 32,
}


def class_of(name: str) -> str:
    """The class of what a table of tests names: of "MochiTransformer3DModel, preview" the first word."""
    return name.split(",")[0]


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


def save_tiny_wan(folder: Path) -> Path:
    """A folder with a Wan for latents of 48 channels, as the codec gives them, and embeddings of 32."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(**TINY_WAN, in_channels=48, out_channels=48, text_dim=32)
    model.save_pretrained(folder)
    return folder


def lora_config(clips: Path, base: Path, output: Path, plan: Plan | None = None, **changes: Any) -> Any:
    """Four steps of adapters on the model of `base`."""
    options = {"lora.rank": 2, "lora.alpha": 5.0, "optim.lr": 1e-2, "steps": 4, **changes}
    return tiny_config(clips, output, plan, model={"path": str(base)}, **options)


def assert_one_run(one: Any, other: Any) -> None:
    """That two meshes in fp64 give one run: losses, norms and gradients, as `test_loop.curve` has them of each."""
    (losses, norms, gradients), (others, other_norms, other_gradients) = one, other
    assert others == pytest.approx(losses, rel=1e-9) and other_norms == pytest.approx(norms, rel=1e-9)
    for weight, gradient in gradients.items():
        assert torch.allclose(other_gradients[weight], gradient, rtol=1e-8, atol=1e-11), weight


def losses(config: Any) -> list[float]:
    """Of the first four steps."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    return [trainer.step()["loss"] for _ in range(4)]
