"""One small table per model family, found by the model's class name and structure."""

from __future__ import annotations

import difflib
import importlib

from torch import nn

from opensora_accel import lazy
from shardformer.policy.base import (
    BlockMask,
    Blocks,
    GatherOutput,
    JointAttention,
    PackedAttention,
    PackedPositions,
    Policy,
    Positions,
    SplitInput,
    SplitOutput,
    Text,
    WholeSequence,
)
from shardformer.policy.identity import is_meant_for, misfit
from shardformer.policy.tensors import ColumnParallel, RowParallel, TensorLayer, TensorRegion
from shardformer.policy.unsupported import UNSUPPORTED

__all__ = [
    "FAMILIES",
    "UNSUPPORTED",
    "BlockMask",
    "Blocks",
    "ColumnParallel",
    "GatherOutput",
    "JointAttention",
    "PackedAttention",
    "PackedPositions",
    "Policy",
    "Positions",
    "RowParallel",
    "SplitInput",
    "SplitOutput",
    "TensorLayer",
    "TensorRegion",
    "Text",
    "WholeSequence",
    "counts",
    "find_policy",
    "frames",
    "grids",
    "has_policy",
    "model_names",
    "tables_named",
    "tables_of",
]

# Modules of functions that few tables need are loaded by those.
__getattr__, __dir__ = lazy.attach(__name__)

FAMILIES = {
    "wan": (
        "WanTransformer3DModel",
        "ChronoEditTransformer3DModel",
        "WanVACETransformer3DModel",
        "WanAnimateTransformer3DModel",
        "WanModel",
        "CausalWanModel",
        "Wan2_2Transformer3DModel",
    ),
    "wan_animate2": ("WanAnimate2Transformer3DModel",),
    "skyreels_v2": ("SkyReelsV2Transformer3DModel",),
    "anyflow": ("AnyFlowTransformer3DModel", "AnyFlowFARTransformer3DModel"),
    "helios": ("HeliosTransformer3DModel",),
    "hunyuan_video": (
        "HunyuanVideoTransformer3DModel",
        "HunyuanVideoFramepackTransformer3DModel",
        "HYVideoDiffusionTransformer",
    ),
    "hunyuan_video15": ("HunyuanVideo15Transformer3DModel",),
    "cogvideox": ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"),
    "ltx": (
        "LTXVideoTransformer3DModel",
        "LTX2VideoTransformer3DModel",
        "LTXModel",
        "Transformer3DModel",
        "SanaWMLTX2RefinerTransformer3DModel",
    ),
    "mochi": ("MochiTransformer3DModel",),
    "motif_video": ("MotifVideoTransformer3DModel",),
    "allegro": ("AllegroTransformer3DModel",),
    "cosmos": ("CosmosTransformer3DModel",),
    "cosmos3": ("Cosmos3OmniTransformer",),
    "easyanimate": ("EasyAnimateTransformer3DModel",),
    "kandinsky": (
        "Kandinsky5Transformer3DModel",
        "DiffusionTransformer3D",
        "Kandinsky6Transformer3DModel",
        "Kandinsky6SRTransformer3DModel",
    ),
    "minimax_h3": ("MiniMaxH3Transformer3DModel",),
    "latte": ("LatteTransformer3DModel", "Latte"),
    "sana_video": ("SanaVideoTransformer3DModel",),
    "open_sora": ("STDiT3", "MMDiTModel"),
    "open_sora_plan": ("OpenSoraT2V_v1_3",),
    "step_video": ("StepVideoModel",),
    "flux": ("FluxTransformer2DModel", "Flux2Transformer2DModel"),
    "qwen_image": ("QwenImageTransformer2DModel",),
    "joyimage": ("JoyImageEditTransformer3DModel", "JoyImageEditPlusTransformer3DModel"),
    "stable_diffusion3": ("SD3Transformer2DModel",),
    "z_image": ("ZImageTransformer2DModel",),
    "t5": ("T5EncoderModel", "UMT5EncoderModel"),
}
"""Class names of the models whose tables a module of this folder has. It is loaded when one of them is asked for.

Of several tables that fit a model the first one in its module is taken.
"""


def model_names() -> tuple[str, ...]:
    """Class names of the models that have a policy."""
    return tuple(dict.fromkeys(name for names in FAMILIES.values() for name in names))


def tables_named(name: str) -> tuple[Policy, ...]:
    """The tables for models of a class name, for `shardformer.shard(model, plan, policy=…)`.

    Whoever passes a table says that the model computes what the table speaks of.
    """
    families = [family for family, names in FAMILIES.items() if name in names]
    return tuple(policy for family in families for policy in tables_of(family) if name in policy.models)


def tables_of(family: str) -> list[Policy]:
    """All tables of a module of this folder, in the order in which they are looked at."""
    named = vars(importlib.import_module(f"{__name__}.{family}"))
    return [table for name, table in named.items() if isinstance(table, Policy) and not name.startswith("_")]


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
    tables = [policy for cls in type(model).__mro__ for policy in tables_named(cls.__name__)]
    return list(dict.fromkeys(tables))
