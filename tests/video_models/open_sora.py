"""Open-Sora's own: STDiT3 (v1.2 and v1.3) and MMDiT (v2)."""

from __future__ import annotations

from typing import Any

import torch

from opensora_accel.checkpoint import set_grad_checkpoint
from tests.opensora_models import mmdit, mmdit_inputs, stdit3, stdit3_inputs
from tests.opensora_models.stdit3 import v13
from tests.video_models.case import Case


def stdit3_case(config: dict[str, Any] | None = None, **options: Any) -> Case:
    return Case(
        lambda: stdit3(torch.float32, **(config or {})),
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
    "STDiT3, one frame": stdit3_case(frames=1),
    "STDiT3 v1.3, frames given": stdit3_case({"release": v13}, given=(0, 2)),
    "STDiT3 v1.3, images": stdit3_case({"release": v13, "skip_temporal": True}, frames=1, batch=5),
    "MMDiT": mmdit_case(),
    "MMDiT, unfused": mmdit_case(fused_qkv=False, use_liger_rope=True),
}
