"""Open-Sora's own: STDiT3 (v1.2) and MMDiT (v2)."""

from __future__ import annotations

from typing import Any

import torch

from opensora_accel.checkpoint import set_grad_checkpoint
from tests.opensora_models import mmdit, mmdit_inputs, stdit3, stdit3_inputs
from tests.video_models.case import Case


def stdit3_case(**options: Any) -> Case:
    return Case(
        lambda: stdit3(torch.float32),
        lambda: stdit3_inputs(torch.float32, **options),
        ("x", "y"),
        set_grad_checkpoint,
    )


def mmdit_case(**config: Any) -> Case:
    return Case(
        lambda: mmdit(torch.float32, **config),
        lambda: mmdit_inputs(torch.float32),
        ("img", "txt", "cond"),
        set_grad_checkpoint,
    )


OPEN_SORA = {
    "STDiT3": stdit3_case(),
    "STDiT3, frames given": stdit3_case(masked=True),
    "MMDiT": mmdit_case(),
    "MMDiT, unfused": mmdit_case(fused_qkv=False, use_liger_rope=True),
}
