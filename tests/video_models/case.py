"""One model with one kind of input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    """Inputs whose gradient is compared besides the parameters'."""
    enable_checkpointing: Callable[[nn.Module], None] = lambda model: model.enable_gradient_checkpointing()
    """How its users turn on the checkpointing that the model brings along."""


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text_mask(lengths: tuple[int, ...], total: int) -> Tensor:
    """[B, total], true for the first `lengths` tokens of each caption."""
    return torch.arange(total) < torch.tensor(lengths)[:, None]
