"""One small table per model family, found by the model's class name and structure."""

from __future__ import annotations

import difflib

from torch import nn

from shardformer.policy.allegro import ALLEGRO
from shardformer.policy.anyflow import ANYFLOW, ANYFLOW_FAR
from shardformer.policy.base import Policy
from shardformer.policy.cogvideox import COGVIDEOX
from shardformer.policy.cosmos import COSMOS
from shardformer.policy.cosmos3 import COSMOS3
from shardformer.policy.easyanimate import EASYANIMATE
from shardformer.policy.flux import FLUX, FLUX2
from shardformer.policy.helios import HELIOS
from shardformer.policy.hunyuan_video import FRAMEPACK, HUNYUAN_VIDEO, HUNYUAN_VIDEO_AUTHORS
from shardformer.policy.hunyuan_video15 import HUNYUAN_VIDEO15
from shardformer.policy.identity import is_meant_for, misfit
from shardformer.policy.joyimage import JOYIMAGE_EDIT, JOYIMAGE_EDIT_PLUS
from shardformer.policy.kandinsky import KANDINSKY5, KANDINSKY5_AUTHORS, KANDINSKY6, KANDINSKY6_SR
from shardformer.policy.latte import LATTE, LATTE_AUTHORS
from shardformer.policy.ltx import (
    LTX,
    LTX2,
    LTX2_AUTHORS,
    LTX2_AUTHORS_VIDEO,
    LTX2_VIDEOX,
    LTX_AUTHORS,
    SANA_WM_REFINER,
    SANA_WM_REFINER_GATED,
)
from shardformer.policy.minimax_h3 import MINIMAX_H3
from shardformer.policy.mochi import MOCHI
from shardformer.policy.motif_video import MOTIF_VIDEO
from shardformer.policy.open_sora import MMDIT, STDIT3, STDIT3_SPATIAL
from shardformer.policy.open_sora_plan import OPEN_SORA_PLAN
from shardformer.policy.qwen_image import QWEN_IMAGE
from shardformer.policy.sana_video import SANA_VIDEO
from shardformer.policy.skyreels_v2 import SKYREELS_V2, SKYREELS_V2_AUTHORS
from shardformer.policy.stable_diffusion3 import SD3, SD35
from shardformer.policy.step_video import STEP_VIDEO
from shardformer.policy.t5 import T5_ENCODER
from shardformer.policy.unsupported import UNSUPPORTED
from shardformer.policy.wan import (
    WAN,
    WAN_ANIMATE,
    WAN_ANIMATE2,
    WAN_AUTHORS,
    WAN_MUSUBI,
    WAN_VACE,
    WAN_VIDEOX,
)
from shardformer.policy.z_image import Z_IMAGE

__all__ = ["UNSUPPORTED", "Policy", "find_policy", "has_policy", "model_names", "tables_named"]

_POLICIES = (
    WAN,
    WAN_VACE,
    WAN_ANIMATE,
    WAN_ANIMATE2,
    WAN_MUSUBI,
    WAN_VIDEOX,
    SKYREELS_V2_AUTHORS,
    WAN_AUTHORS,
    SKYREELS_V2,
    ANYFLOW,
    ANYFLOW_FAR,
    HELIOS,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO15,
    FRAMEPACK,
    HUNYUAN_VIDEO_AUTHORS,
    COGVIDEOX,
    LTX,
    LTX2,
    LTX2_VIDEOX,
    LTX2_AUTHORS,
    LTX2_AUTHORS_VIDEO,
    LTX_AUTHORS,
    SANA_WM_REFINER_GATED,
    SANA_WM_REFINER,
    MOCHI,
    MOTIF_VIDEO,
    ALLEGRO,
    COSMOS,
    COSMOS3,
    EASYANIMATE,
    KANDINSKY5,
    KANDINSKY5_AUTHORS,
    KANDINSKY6,
    KANDINSKY6_SR,
    MINIMAX_H3,
    LATTE,
    LATTE_AUTHORS,
    SANA_VIDEO,
    STDIT3,
    STDIT3_SPATIAL,
    MMDIT,
    OPEN_SORA_PLAN,
    STEP_VIDEO,
    FLUX,
    FLUX2,
    QWEN_IMAGE,
    JOYIMAGE_EDIT,
    JOYIMAGE_EDIT_PLUS,
    SD35,
    SD3,
    Z_IMAGE,
    T5_ENCODER,
)


def model_names() -> tuple[str, ...]:
    """Class names of the models that have a policy."""
    return tuple(dict.fromkeys(name for policy in _POLICIES for name in policy.models))


def tables_named(name: str) -> tuple[Policy, ...]:
    """The tables for models of a class name, for `shardformer.shard(model, plan, policy=…)`.

    Whoever passes a table says that the model computes what the table speaks of.
    """
    return tuple(policy for policy in _POLICIES if name in policy.models)


def find_policy(model: nn.Module) -> Policy:
    """The policy for the model's class or one of its bases, if the model is what that policy speaks of.

    A name is not enough: other packages have classes of the same name that compute something else, or modules of the
    same names with other code in them (`identity.py`).

    Raises:
        ValueError: none fits. The message has the reason, if it is known, the part of the model that a policy fits, or
            the closest name and how to write one.
    """
    named = _policies_of(model)
    misfits = {policy: misfit(model, policy) for policy in named}
    for policy, reason in misfits.items():
        if reason is None:
            return policy
    name = type(model).__name__
    if named:
        reasons = "; or ".join(dict.fromkeys(str(reason) for reason in misfits.values()))
        known = next(cls.__name__ for cls in type(model).__mro__ if tables_named(cls.__name__))
        raise ValueError(
            f"{name} of {type(model).__module__} has the name of a model with a policy, but is another one: "
            f"{reasons}. If it computes something else, have a policy proposed (opensora-accel policy) or write one "
            "(docs/policies.md); if it computes the same, say so by passing the table, shardformer.shard(model, plan, "
            f'policy=shardformer.policy.tables_named("{known}")[0]), and prove it with opensora_accel.verify'
        )
    if name in UNSUPPORTED:
        raise ValueError(f"{name} has no policy: {UNSUPPORTED[name]}")
    for path, module in model.named_modules():
        if path and has_policy(module):
            raise ValueError(
                f"{name} has no policy, but its part {path!r} is a {type(module).__name__}, which has: shard that "
                f"(shardformer.shard(model.get_submodule({path!r}), plan)) and call the whole as before"
            )
    # Without a cutoff there always is one, and it shows how such a name is written.
    closest = difflib.get_close_matches(name, model_names(), n=1, cutoff=0.0)
    raise ValueError(
        f"no policy for {name}; the closest is {closest[0]}'s. There are policies for {', '.join(model_names())}; for "
        "your own model have one proposed, opensora-accel policy --model my_model.py:make_model --inputs "
        "my_model.py:make_inputs, or pass policy=shardformer.Policy(...), a table of what is split and gathered where: "
        "docs/policies.md writes one from nothing"
    )


def has_policy(model: nn.Module) -> bool:
    """Whether a policy is meant for the model's class, by its name and its package."""
    return any(is_meant_for(model, policy) for policy in _policies_of(model))


def _policies_of(model: nn.Module) -> list[Policy]:
    # A user's subclass computes what its base does, unless its structure or its code says otherwise.
    classes = {cls.__name__ for cls in type(model).__mro__}
    return [policy for policy in _POLICIES if classes & set(policy.models)]
