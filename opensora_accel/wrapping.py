"""Changing one module's forward without touching its class, its name or its parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def wrap_forward(module: nn.Module, wrap: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Replaces `module.forward` by `wrap(module.forward)` on this instance; returns the function that undoes it.

    Wrappers nest; they are undone in reverse order. Module hooks run outside of the wrapper. Until then the module
    refuses `copy.deepcopy`.
    """
    before = {name: vars(module).get(name) for name in ("forward", "__deepcopy__")}
    original = module.forward
    module.forward = functools.wraps(original)(wrap(original))
    module.__deepcopy__ = refuse_copy  # type: ignore[assignment]

    def undo() -> None:
        for name, value in before.items():
            if value is None:
                delattr(module, name)
            else:
                setattr(module, name, value)

    return undo


def refuse_pickle(_protocol: int) -> None:
    """Stands for `__reduce_ex__` of a sharded model: what would be read back is not this model.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "a sharded model cannot be pickled whole, as by torch.save(model); save its weights, "
        "torch.save(model.state_dict(), path) or model.save_pretrained(folder), and shard the model that loads them"
    )


def refuse_copy(_memo: dict[int, Any]) -> None:
    """Stands for `__deepcopy__` of a wrapped model, whose copy would run the original's weights.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "a model whose forward was wrapped (sharded or checkpointed) cannot be deep-copied; copy it before "
        "shardformer.shard() or checkpoint_blocks(), or build a second model and load this one's state_dict()"
    )
