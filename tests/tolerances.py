"""The one table of tolerances. Where nothing is reduced across ranks, tests ask for equality instead."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def bf16_bound(num_roundings: int, cancellation: float = 1.0) -> float:
    """How far a gradient on ranks in bf16 may lie from one device's in bf16, as a share of its norm.

    Both multiply the same bf16 weights and add up products in fp32. A sum over samples or tokens, g = mean of the
    ranks' g_r, is then rounded to bf16: once on one device, part by part on ranks. With 8 bits of significand rounding
    moves by at most u = 2⁻⁸: by u·|g| here and u·mean|g_r| there, u·(1 + κ)·|g| together. The cancellation κ =
    mean|g_r| / |g| is 1 where all parts point one way. FSDP2 averages in fp32, which adds nothing.

    What hangs on such a sum differs at each of n roundings on its way. Those are independent, and each operator is
    taken to pass an error on as it passes the gradient: together √n of one (Higham and Mary, "A New Approach to
    Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41, 2019), not n.

    The longest way in a model of L blocks is that to the text's first layer. Of data parallel ranks: FSDP2 adds up what
    the text's keys and values get block by block (2L), and the three operators before the weight follow: n = 2L + 3.
    Where tokens are spread, the keys of the text get a part of their gradient on each rank, and it passes their norm
    and projection: n = 2L + 6. A ring also rounds each block's attention apart from one device's kernel, its output
    and dq, dk, dv: n = 6L + 6.
    """
    return 2.0**-8 * math.sqrt(num_roundings) * (1 + cancellation)


RELATIVE = {
    # Sums over ranks are added in another order than on one device: a few units in the last place of the
    # largest element (2.2e-16, 1.2e-7), times the depth of the models used here.
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    # Two blocks under a ring without cancellation: 3.3e-2.
    torch.bfloat16: bf16_bound(18),
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
