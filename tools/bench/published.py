"""The planner's forecasts beside figures that others have published; nothing is fitted to them.

NeMo Automodel, docs/guides/diffusion/context-parallel: Wan2.1 1.3B on 8 H100, 16,384 tokens, fp32 weights, bf16
compute, FSDP2 over all ranks, no checkpoints: 54.9 GB a GPU with dp=8, 16.3 GB with dp=2 and Ulysses over 4. One sample
a data rank, the sizes of the clip and the caption's length are assumed; whether GB are 1e9 or 2**30 bytes is not told.

Open-Sora 2.0, README: 50 steps of sampling at 768 × 768 on 1, 2, 4, 8 H100 take 1,656, 863, 466, 276 s. Each step is
assumed to be three forward passes (both guidances) of 129 frames with 512 text tokens; encoding and decoding are left
out. Its class is the stand-in of tests/opensora_models.

xDiT and USP publish latencies of other models and machines without all of the settings that a forecast needs (steps,
guidance, batch, kernels): they are not compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.planner.candidates import Passes, Request
from opensora_accel.planner.cost import Placement
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.models import named_workload
from opensora_accel.planner.search import exact, simulated
from opensora_accel.planner.trace import trace_step
from opensora_accel.planner.workload import Pass, Workload
from opensora_accel.verify.meshes import Run

sys.path.insert(0, str(Path(__file__).parents[2]))

H100 = Hardware.named("h100x8")


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

    def prepare(model: nn.Module, run: Run) -> Pass:
        init_parallel(run.plan, "cpu")
        sharded = shardformer.shard(model, run.plan) if run.plan.sequence > 1 else model
        given = _mmdit_inputs(batch, tokens, text)

        def one_pass(_is_last: bool) -> None:
            with torch.no_grad():
                sharded(**given)

        return one_pass

    workload = Workload(
        "Open-Sora 2.0", build, prepare, batch=batch, num_tokens=tokens, text_tokens=text, num_heads=24
    )
    rows = []
    for ranks, published in ((1, 1656.0), (2, 863.0), (4, 466.0), (8, 276.0)):
        trace = trace_step(workload, Plan(ulysses=ranks))
        placement = Placement.on(H100, ranks)
        low, high = (steps * simulated(trace, H100.bound(sign), placement).step_s for sign in (-1, 1))
        rows.append(
            {
                "what": f"Open-Sora 2.0, 768 px, 50 steps, {ranks} H100",
                "published": published,
                "low": low,
                "high": high,
                "unit": "s",
            }
        )
    return rows


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


TABLES: dict[str, Callable[[], list[dict[str, Any]]]] = {"nemo": nemo, "open_sora": open_sora}


def main() -> int:
    """Prints a table in markdown; 0."""
    parser = argparse.ArgumentParser(
        "python tools/bench/published.py", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", choices=tuple(TABLES), help="one of the publications")
    chosen = parser.parse_args().only
    print("| what | published | forecast | error of the middle |\n|---|---|---|---|")
    for name, rows_of in TABLES.items():
        for row in rows_of() if chosen in (None, name) else ():
            middle = (row["low"] + row["high"]) / 2
            print(
                f"| {row['what']} | {row['published']:,.4g} {row['unit']} | {row['low']:,.4g} to {row['high']:,.4g} "
                f"{row['unit']} | {middle / row['published'] - 1:+.0%} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
