"""Factors that are no power of a number of ranks, on numbers made for it."""

import pytest
import torch

from opensora_accel.verify.fit import Samples, are_factors, find_remedy, find_scale, fit_ranks, fit_slices
from opensora_accel.verify.shapes import MeshShape

SHAPES = [MeshShape.of({"data": d, "sequence": s}) for d, s in ((2, 2), (1, 4), (4, 1), (1, 3))]
AXES = ("data", "sequence")
EXPECTED = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)


def scaled(factor_of, expected=EXPECTED):
    return [Samples(s, (factor_of(s) * expected,) * s.world_size, expected) for s in SHAPES]


@pytest.mark.parametrize(
    ("factor_of", "name"),
    [
        (lambda p: (p - 1) / p, "sequence⁻¹ · (sequence − 1)"),
        (lambda p: p / (p - 1), "sequence · (sequence − 1)⁻¹"),
        (lambda p: 1 / (p - 1), "(sequence − 1)⁻¹"),
    ],
)
def test_ranks_counted_without_the_own_one_are_named(factor_of, name):
    found = scaled(lambda s: factor_of(s.degree("sequence")) if s.degree("sequence") > 1 else 1.0)
    remedy = find_remedy(found, AXES)
    assert str(remedy.factor) == name and remedy.factor.axes == ("sequence",) and remedy.is_everywhere


@pytest.mark.parametrize(
    ("factor_of", "name"),
    [(lambda p: 2.0, "2"), (lambda p: 2 / p, "2 · sequence⁻¹"), (lambda p: p / 2, "0.5 · sequence")],
)
def test_a_number_where_an_axis_is_used_is_named(factor_of, name):
    found = scaled(lambda s: factor_of(s.degree("sequence")) if s.degree("sequence") > 1 else 1.0)
    remedy = find_remedy(found, AXES)
    assert str(remedy.factor) == name and not remedy.is_everywhere
    assert find_scale(found, AXES) == remedy


def test_one_wrong_number_has_no_factor():
    """It would always fit; two that agree tell something."""
    one = torch.ones(1, dtype=torch.float64)
    assert find_scale(scaled(lambda s: 1.7 if s.world_size == 3 else 1.0, one), AXES) is None
    assert (
        str(find_scale(scaled(lambda s: 1.7 if s.degree("sequence") > 2 else 1.0, one), AXES).factor) == "1.7"
    )


def test_as_many_ranks_as_numbers_prove_nothing():
    torch.manual_seed(0)
    parts = [[torch.randn(3, dtype=torch.float64)] for _ in range(3)]
    assert fit_ranks(parts, [torch.randn(3, dtype=torch.float64)]) is None


def test_factors_of_ranks_hold_for_some_parameters_only():
    parts = [EXPECTED, 2 * EXPECTED]
    assert are_factors(parts, [2.0, 4.0], EXPECTED)
    assert not are_factors(parts, [2.0, 2.0], EXPECTED)


def test_factors_of_slices():
    torch.manual_seed(0)
    expected = torch.randn(2, 5, 11, 3, dtype=torch.float64)
    factors = torch.tensor([0.5] * 4 + [1.5] * 4 + [3.0] * 3, dtype=torch.float64).view(1, 1, 11, 1)
    found = Samples(SHAPES[3], (expected * factors,), expected)
    assert fit_slices(found, 3) == pytest.approx([0.5, 1.5, 3.0])
    assert fit_slices(found, 2) is None
    assert fit_slices(Samples(SHAPES[3], (2 * expected,), expected), 3) is None
