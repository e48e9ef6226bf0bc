"""One model with one kind of input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    """The model in fp32, with weights that are random and the same in every process."""
    inputs: Callable[[], Inputs]
    """Arguments of its forward for a batch of two, floating-point ones in fp32."""
    differentiated: tuple[str, ...] = ("hidden_states",)
    """Inputs, by their paths, whose gradient is compared besides the parameters'."""
    enable_checkpointing: Callable[[nn.Module], None] = lambda model: model.enable_gradient_checkpointing()
    """How its users turn on the checkpointing that the model brings along."""


def change_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with every tensor changed, also in tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value):
        return replace(value, **change_tensors(vars(value), change))
    if isinstance(value, dict):
        return {name: change_tensors(item, change) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(change_tensors(item, change) for item in value)
    return value


def wan_like(heads: int = 3, layers: int = 2) -> dict[str, Any]:
    """Arguments of the models that are built like Wan."""
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": heads,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": layers,
    }


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text_mask(lengths: tuple[int, ...], total: int) -> Tensor:
    """[B, total], true for the first `lengths` tokens of each caption."""
    return torch.arange(total) < torch.tensor(lengths)[:, None]
