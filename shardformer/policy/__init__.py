"""One small table per model family, found by the model's class name."""

from __future__ import annotations

import difflib

from torch import nn

from shardformer.policy.allegro import ALLEGRO
from shardformer.policy.anyflow import ANYFLOW
from shardformer.policy.base import Policy
from shardformer.policy.cogvideox import COGVIDEOX
from shardformer.policy.cosmos import COSMOS
from shardformer.policy.cosmos3 import COSMOS3
from shardformer.policy.easyanimate import EASYANIMATE
from shardformer.policy.helios import HELIOS
from shardformer.policy.hunyuan_video import FRAMEPACK, HUNYUAN_VIDEO
from shardformer.policy.hunyuan_video15 import HUNYUAN_VIDEO15
from shardformer.policy.kandinsky import KANDINSKY5, KANDINSKY6
from shardformer.policy.latte import LATTE
from shardformer.policy.ltx import LTX, LTX2
from shardformer.policy.minimax_h3 import MINIMAX_H3
from shardformer.policy.mochi import MOCHI
from shardformer.policy.motif_video import MOTIF_VIDEO
from shardformer.policy.open_sora import MMDIT, STDIT3
from shardformer.policy.sana_video import SANA_VIDEO
from shardformer.policy.skyreels_v2 import SKYREELS_V2
from shardformer.policy.t5 import T5_ENCODER
from shardformer.policy.unsupported import UNSUPPORTED
from shardformer.policy.wan import WAN, WAN_ANIMATE, WAN_VACE

__all__ = ["UNSUPPORTED", "Policy", "find_policy", "model_names"]

_POLICIES = (
    WAN,
    WAN_VACE,
    WAN_ANIMATE,
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
    MOTIF_VIDEO,
    ALLEGRO,
    COSMOS,
    COSMOS3,
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
    """The policy for the model's class or one of its bases.

    Raises ValueError where none fits: with the reason, if it is known, the part of the model that a policy fits, or
    the closest name and how to write one.
    """
    found = _policy_of(model)
    if found is not None:
        return found
    name = type(model).__name__
    if name in UNSUPPORTED:
        raise ValueError(f"{name} has no policy: {UNSUPPORTED[name]}")
    for path, module in model.named_modules():
        if path and _policy_of(module) is not None:
            raise ValueError(
                f"{name} has no policy, but its part {path!r} is a {type(module).__name__}, which has: shard that "
                f"(model.get_submodule({path!r})), before the whole is wrapped"
            )
    closest = difflib.get_close_matches(name, model_names(), n=1, cutoff=0.0)
    raise ValueError(
        f"no policy for {name}; the closest is {closest[0]}'s. There are policies for {', '.join(model_names())}; for "
        "your own model pass policy=shardformer.Policy(...), a table of what is split and gathered where: "
        "docs/policies.md writes one from nothing"
    )


def _policy_of(model: nn.Module) -> Policy | None:
    classes = {cls.__name__ for cls in type(model).__mro__}
    return next((policy for policy in _POLICIES if classes & set(policy.models)), None)
