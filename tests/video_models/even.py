"""The models for which diffusers has a context-parallel plan, at sizes that its plans take: all of them divide."""

from __future__ import annotations

import torch

from tests.models import wan, wan_inputs
from tests.video_models.case import Case
from tests.video_models.histories import helios, helios_inputs
from tests.video_models.ltx import ltx, ltx2, ltx2_inputs, ltx_inputs
from tests.video_models.minimax_h3 import inputs as minimax_inputs
from tests.video_models.minimax_h3 import minimax_h3
from tests.video_models.wan import chrono_edit, chrono_edit_inputs

GRID, TEXT = (4, 3, 4), 12
NO_MASK = {"encoder_attention_mask": None}
"""The kernels of diffusers' ring take none."""

EVEN = {
    "Wan": Case(
        lambda: wan(torch.float32, heads=12), lambda: wan_inputs(torch.float32, frames=4, height=6, width=8)
    ),
    "ChronoEdit": Case(lambda: chrono_edit(heads=12), lambda: chrono_edit_inputs(frames=4, width=8)),
    "Helios": Case(lambda: helios(heads=12), lambda: helios_inputs(past=False)),
    "LTX-Video": Case(lambda: ltx(heads=12), lambda: ltx_inputs(grid=GRID, text=TEXT) | NO_MASK),
    "LTX-2": Case(
        lambda: ltx2(heads=12),
        # One timestep a clip: the plan splits no timesteps of tokens.
        lambda: (
            ltx2_inputs(grid=GRID, text=TEXT)
            | NO_MASK
            | {"timestep": torch.tensor([100.0, 700.0]), "audio_encoder_attention_mask": None}
        ),
    ),
    "MiniMax-H3": Case(lambda: minimax_h3(heads=12), lambda: minimax_inputs(text=8, audio=7)),
}
"""12 heads; 48 video tokens, or 45 + 15 of text and audio."""
