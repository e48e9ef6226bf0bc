"""The one table of tolerances. Where nothing is reduced across ranks, tests ask for equality instead."""

from collections.abc import Mapping

import torch
from torch import Tensor

RELATIVE = {
    # Sums over ranks are added in another order than on one device: a few units in the last place of the
    # largest element (2.2e-16, 1.2e-7, 7.8e-3), times the depth of the models used here.
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 4e-2,
}


ZERO = 1e-9
"""What is smaller than this share of the largest of its kind is zero in theory. What is found in its place is the
rounding of the processor at hand, 0 on one and 1e-16 on the next, and no number to divide by."""


def relative_error(actual: Tensor, expected: Tensor, largest: float | None = None) -> float:
    """Largest difference over the largest magnitude expected; infinite where shapes or NaNs disagree.

    `largest`: that of everything that `expected` is one of, as all gradients of a model, or all rows of a tensor. It is
    divided by where `expected` is zero but for rounding: the gradient of a bias that softmax cancels, say.
    """
    if actual.shape != expected.shape or not torch.isfinite(actual).all():
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    scale = expected.abs().max().item()
    if largest is not None and scale <= ZERO * largest:
        scale = largest
    return (actual - expected).abs().max().item() / max(scale, torch.finfo(expected.dtype).tiny)


def relative_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Of each by its name; what is zero but for rounding as a share of the largest."""
    largest = max(value.abs().max().item() for value in expected.values() if value.numel())
    return {name: relative_error(actual[name], value, largest) for name, value in expected.items()}


def assert_close(actual: Tensor, expected: Tensor, name: str = "") -> None:
    error = relative_error(actual, expected)
    assert error <= RELATIVE[expected.dtype], f"{name}: relative error {error:.2e}"
