"""One small table per model family, found by the model's class name and structure."""

from __future__ import annotations

import difflib

from torch import nn

from shardformer.paths import find
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
from shardformer.policy.joyimage import JOYIMAGE_EDIT, JOYIMAGE_EDIT_PLUS
from shardformer.policy.kandinsky import KANDINSKY5, KANDINSKY6, KANDINSKY6_SR
from shardformer.policy.latte import LATTE
from shardformer.policy.ltx import LTX, LTX2, LTX_AUTHORS, SANA_WM_REFINER, SANA_WM_REFINER_GATED
from shardformer.policy.minimax_h3 import MINIMAX_H3
from shardformer.policy.mochi import MOCHI
from shardformer.policy.motif_video import MOTIF_VIDEO
from shardformer.policy.open_sora import MMDIT, STDIT3, STDIT3_SPATIAL
from shardformer.policy.open_sora_plan import OPEN_SORA_PLAN
from shardformer.policy.qwen_image import QWEN_IMAGE
from shardformer.policy.sana_video import SANA_VIDEO
from shardformer.policy.skyreels_v2 import SKYREELS_V2
from shardformer.policy.stable_diffusion3 import SD3, SD35
from shardformer.policy.t5 import T5_ENCODER
from shardformer.policy.unsupported import UNSUPPORTED
from shardformer.policy.wan import WAN, WAN_ANIMATE, WAN_ANIMATE2, WAN_AUTHORS, WAN_VACE
from shardformer.policy.z_image import Z_IMAGE

__all__ = ["UNSUPPORTED", "Policy", "find_policy", "has_policy", "model_names"]

_POLICIES = (
    WAN,
    WAN_VACE,
    WAN_ANIMATE,
    WAN_ANIMATE2,
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
    KANDINSKY6,
    KANDINSKY6_SR,
    MINIMAX_H3,
    LATTE,
    SANA_VIDEO,
    STDIT3,
    STDIT3_SPATIAL,
    MMDIT,
    OPEN_SORA_PLAN,
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


def find_policy(model: nn.Module) -> Policy:
    """The policy for the model's class or one of its bases, if the model is built as that policy says.

    A name is not enough: other repositories have classes of the same name that compute something else. So every
    module that the policy names must be there, and no setting may be one that the policy cannot serve.

    Raises:
        ValueError: none fits. The message has the reason, if it is known, the part of the model that a policy fits, or
            the closest name and how to write one.
    """
    named = _policies_of(model)
    misfits = {policy: _misfit(model, policy) for policy in named}
    for policy, misfit in misfits.items():
        if misfit is None:
            return policy
    name = type(model).__name__
    if named:
        reasons = "; or ".join(dict.fromkeys(str(misfit) for misfit in misfits.values()))
        raise ValueError(
            f"{name} of {type(model).__module__} has the name of a model with a policy, but is not built like it: "
            f"{reasons}. If it computes something else, write a policy for it (docs/policies.md)"
        )
    if name in UNSUPPORTED:
        raise ValueError(f"{name} has no policy: {UNSUPPORTED[name]}")
    for path, module in model.named_modules():
        if path and _policies_of(module):
            raise ValueError(
                f"{name} has no policy, but its part {path!r} is a {type(module).__name__}, which has: shard that "
                f"(shardformer.shard(model.get_submodule({path!r}), plan)) and call the whole as before"
            )
    # Without a cutoff there always is one, and it shows how such a name is written.
    closest = difflib.get_close_matches(name, model_names(), n=1, cutoff=0.0)
    raise ValueError(
        f"no policy for {name}; the closest is {closest[0]}'s. There are policies for {', '.join(model_names())}; for "
        "your own model pass policy=shardformer.Policy(...), a table of what is split and gathered where: "
        "docs/policies.md writes one from nothing"
    )


def has_policy(model: nn.Module) -> bool:
    """Whether a policy is meant for the model's class, by its name."""
    return bool(_policies_of(model))


def _policies_of(model: nn.Module) -> list[Policy]:
    # A user's subclass computes what its base does, unless its structure says otherwise.
    classes = {cls.__name__ for cls in type(model).__mro__}
    return [policy for policy in _POLICIES if classes & set(policy.models)]


def _misfit(model: nn.Module, policy: Policy) -> str | None:
    """Why a model that has the right name does not have the structure that the policy speaks of."""
    for setting, reason in policy.unfit:
        config = getattr(model, "config", None)
        value = getattr(config if hasattr(config, setting) else model, setting, None)
        # A setting that is off, or empty, or that the model does not know, is in nobody's way.
        if value not in (None, False, (), []):
            return f"its {setting} is {value!r}, and {reason}"
    for path in policy.paths:
        try:
            find(model, path)
        except ValueError as error:
            return str(error)
    return None
