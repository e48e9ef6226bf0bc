"""When two norms count as the same: to the last bit of an fp32 sum, or to one more rounding of a half."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shardformer.modeling.norms.order import HALVES

Mode = Literal["strict", "fast"]

SHARE_OF_FLIPS = 0.01
"""Of half values, how many may round the other way because the fp32 value before them lies a last bit off. Sums in
another order flip 5e-6 of bf16 and 1e-4 of fp16 values; an order that rounds elsewhere flips a quarter."""


def agree(out: Tensor, expected: Tensor, mode: Mode) -> bool:
    """Whether `out` may stand for `expected`.

    `strict`: fp32 to 4 units in the last place of its row's largest value; of halves at most `SHARE_OF_FLIPS` off,
    by one unit. `fast`: fp32 to 16 units, halves to two, any number of them.
    """
    if out.dtype != expected.dtype or out.shape != expected.shape:
        return False
    if torch.equal(out, expected):
        return True
    difference = (out.double() - expected.double()).abs()
    row = expected.double().abs().amax(-1, keepdim=True)
    slack = row * torch.finfo(torch.float32).eps * (4 if mode == "strict" else 16)
    if out.dtype not in HALVES:
        return bool((difference <= slack).all())
    unit = torch.finfo(out.dtype).eps * expected.double().abs().clamp_min(torch.finfo(out.dtype).tiny)
    if mode == "fast":
        return bool((difference <= slack + 2 * unit).all())
    flips = (difference > 0).sum().item()
    return bool((difference <= slack + unit).all()) and flips <= max(1, SHARE_OF_FLIPS * out.numel())


def largest_difference(out: Tensor, expected: Tensor) -> float:
    """Over the largest value expected of the row."""
    row = expected.double().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return ((out.double() - expected.double()).abs() / row).max().item()


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """In the Frobenius norm; `exact` in fp64 on the CPU."""
    return ((actual.detach().cpu().double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def gradient_allowance(error: float, mode: Mode) -> float:
    """The error that a replacement's gradient may have, where the original's is `error`, both against fp64."""
    fp32 = torch.finfo(torch.float32).eps
    return 1.25 * error + 4 * fp32 if mode == "strict" else 2 * error + 16 * fp32
