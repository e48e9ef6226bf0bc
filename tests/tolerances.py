"""The one table of tolerances. Where nothing is reduced across ranks, tests ask for equality instead."""

import torch

RELATIVE = {
    # Sums over ranks are added in another order than on one device: a few units in the last place of the
    # largest element (2.2e-16, 1.2e-7, 7.8e-3), times the depth of the models used here.
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 4e-2,
}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest magnitude expected; infinite where shapes or NaNs disagree."""
    if actual.shape != expected.shape or not torch.isfinite(actual).all():
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    scale = max(expected.abs().max().item(), torch.finfo(expected.dtype).tiny)
    return (actual - expected).abs().max().item() / scale


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    error = relative_error(actual, expected)
    assert error <= RELATIVE[expected.dtype], f"{name}: relative error {error:.2e}"
