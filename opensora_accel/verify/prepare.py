"""A model made fit for a proof in fp64."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from opensora_accel.verify.parameters import widest


def prepare(model: nn.Module) -> list[str]:
    """Makes the model fit for a proof in fp64: no cast down, no dropout, no parameter that hides others.

    Returns what was changed, in words.
    """
    notes = []
    model._apply(widest)
    dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    for dropout in dropouts:
        dropout.p = 0.0
    if dropouts:
        notes.append(f"{len(dropouts)} dropouts were set to 0: a split sequence cannot draw the same masks")
    constant = [(n, p) for n, p in model.named_parameters() if not p.is_meta and _is_constant(p)]
    for name, parameter in constant:
        _excite(name, parameter)
    if constant:
        notes.append(
            f"{len(constant)} parameters with one value throughout (gates and biases of 0, norms of 1) were given "
            "random ones: behind a gate of 0 every gradient is 0, right or wrong"
        )
    return notes


def _is_constant(parameter: Tensor) -> bool:
    is_number = parameter.is_floating_point() or parameter.is_complex()
    return is_number and parameter.numel() > 0 and bool((parameter == parameter.flatten()[0]).all())


@torch.no_grad()
def _excite(name: str, parameter: Tensor) -> None:
    """Random values that depend on the name alone: about what is there, which keeps its sign (a scale under a root)."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    fan_in = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 25
    noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.5 / math.sqrt(fan_in)
    if parameter.any():
        parameter.mul_(noise.exp())
    else:
        parameter.add_(noise)
