"""One small table per model family, found by the model's class name."""

from __future__ import annotations

import difflib

from torch import nn

from shardformer.policy.allegro import ALLEGRO
from shardformer.policy.anyflow import ANYFLOW
from shardformer.policy.base import Policy
from shardformer.policy.cogvideox import COGVIDEOX
from shardformer.policy.cosmos import COSMOS
from shardformer.policy.easyanimate import EASYANIMATE
from shardformer.policy.helios import HELIOS
from shardformer.policy.hunyuan_video import FRAMEPACK, HUNYUAN_VIDEO
from shardformer.policy.hunyuan_video15 import HUNYUAN_VIDEO15
from shardformer.policy.kandinsky import KANDINSKY5, KANDINSKY6
from shardformer.policy.latte import LATTE
from shardformer.policy.ltx import LTX, LTX2
from shardformer.policy.minimax_h3 import MINIMAX_H3
from shardformer.policy.mochi import MOCHI
from shardformer.policy.open_sora import MMDIT, STDIT3
from shardformer.policy.sana_video import SANA_VIDEO
from shardformer.policy.skyreels_v2 import SKYREELS_V2
from shardformer.policy.t5_encoder import T5_ENCODER
from shardformer.policy.wan import WAN, WAN_VACE

__all__ = ["Policy", "find_policy", "model_names"]

_POLICIES = (
    WAN,
    WAN_VACE,
    SKYREELS_V2,
    ANYFLOW,
    HELIOS,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO15,
    FRAMEPACK,
    COGVIDEOX,
    LTX,
    LTX2,
    MOCHI,
    ALLEGRO,
    COSMOS,
    EASYANIMATE,
    KANDINSKY5,
    KANDINSKY6,
    MINIMAX_H3,
    LATTE,
    SANA_VIDEO,
    STDIT3,
    MMDIT,
    T5_ENCODER,
)


def model_names() -> tuple[str, ...]:
    """Class names of the models that have a policy."""
    return tuple(name for policy in _POLICIES for name in policy.models)


def find_policy(model: nn.Module) -> Policy:
    """The policy for the model's class or one of its bases; ValueError with the closest name where none fits."""
    classes = [cls.__name__ for cls in type(model).__mro__]
    for policy in _POLICIES:
        if any(name in classes for name in policy.models):
            return policy
    closest = difflib.get_close_matches(classes[0], model_names(), n=1, cutoff=0.0)
    raise ValueError(
        f"no policy for {classes[0]}; the closest is {closest[0]}'s. There are policies for "
        f"{', '.join(model_names())}; for your own model pass policy=shardformer.Policy(...), a table of what is "
        "split and gathered where (shardformer/policy/wan.py is one of twenty lines)"
    )
