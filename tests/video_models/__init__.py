"""Every model family that has a policy: the real classes, tiny, with weights and inputs at awkward sizes."""

from __future__ import annotations

import functools

import torch
from torch import nn

from tests.video_models.allegro import ALLEGRO
from tests.video_models.anyflow import ANYFLOW
from tests.video_models.authors import AUTHORS
from tests.video_models.case import Case
from tests.video_models.cogvideox import COGVIDEOX
from tests.video_models.cosmos import COSMOS
from tests.video_models.cosmos3 import COSMOS3
from tests.video_models.easyanimate import EASYANIMATE
from tests.video_models.histories import HISTORIES
from tests.video_models.hunyuan_video import HUNYUAN_VIDEO
from tests.video_models.hunyuan_video15 import HUNYUAN_VIDEO15
from tests.video_models.image_models import IMAGE_MODELS
from tests.video_models.kandinsky import KANDINSKY
from tests.video_models.latte import LATTE
from tests.video_models.ltx import LTX
from tests.video_models.minimax_h3 import MINIMAX_H3
from tests.video_models.mochi import MOCHI
from tests.video_models.motif_video import MOTIF_VIDEO
from tests.video_models.open_sora import OPEN_SORA
from tests.video_models.sana_video import SANA_VIDEO
from tests.video_models.skyreels_v2 import SKYREELS_V2
from tests.video_models.wan import WAN

CASES: dict[str, Case] = {
    **WAN,
    **SKYREELS_V2,
    **ANYFLOW,
    **HUNYUAN_VIDEO,
    **HUNYUAN_VIDEO15,
    **HISTORIES,
    **COGVIDEOX,
    **LTX,
    **MOCHI,
    **MOTIF_VIDEO,
    **ALLEGRO,
    **COSMOS,
    **COSMOS3,
    **EASYANIMATE,
    **KANDINSKY,
    **MINIMAX_H3,
    **LATTE,
    **SANA_VIDEO,
    **OPEN_SORA,
    **AUTHORS,
    **IMAGE_MODELS,
}
"""By the name that tables and tests show."""


@functools.cache
def outlines() -> dict[str, nn.Module]:
    """Every case's model without memory, for tables of tests. To be asked for when tests are collected, not on import:
    ranks import the files of tests too, and it takes a second.
    """
    with torch.device("meta"):
        return {name: case.make() for name, case in CASES.items()}
