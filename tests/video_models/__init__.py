"""Every model family that has a policy: the real classes, tiny, with weights and inputs at awkward sizes."""

from __future__ import annotations

from tests.video_models.case import Case
from tests.video_models.cogvideox import COGVIDEOX
from tests.video_models.hunyuan_video import HUNYUAN_VIDEO
from tests.video_models.wan import WAN

CASES: dict[str, Case] = {**WAN, **HUNYUAN_VIDEO, **COGVIDEOX}
"""By the name that tables and tests show."""
