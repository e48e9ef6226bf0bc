"""Factors, missing sums and the axes that an error goes with, on numbers made for it; every cause has words."""

import itertools

import pytest
import torch

from opensora_accel import Plan
from opensora_accel.observe.meshes import MeshShape, meshes_of
from opensora_accel.verify.causes import Cause, Where, count_names
from opensora_accel.verify.fit import (
    Factor,
    Samples,
    are_factors,
    as_shares,
    find_remedy,
    fit_powers,
    fit_ranks,
    fit_slices,
)
from opensora_accel.verify.later_steps import InLaterStep

SHAPES = [MeshShape.of({"data": d, "sequence": s}) for d, s in ((2, 2), (1, 4), (4, 1), (1, 3))]
AXES = ("data", "sequence")
EXPECTED = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)


def samples(of_rank):
    """`of_rank(shape, rank)` is the gradient that a rank found."""
    return [Samples(s, tuple(of_rank(s, r) for r in range(s.world_size)), EXPECTED) for s in SHAPES]


@pytest.mark.parametrize("data", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("sequence", [-2, -1, 0, 1, 2])
def test_a_scale_is_named_by_its_powers(data, sequence):
    found = samples(lambda s, r: EXPECTED * s.degree("data") ** data * s.degree("sequence") ** sequence)
    remedy = find_remedy(found, AXES)
    assert remedy.missing == ()
    assert dict(remedy.factor.exponents) == {a: e for a, e in zip(AXES, (data, sequence), strict=True) if e}
    assert remedy.factor.constant == pytest.approx(1)
    assert all(each.is_right for each in found) == (data == sequence == 0)


def test_a_constant_is_one():
    remedy = find_remedy(samples(lambda s, r: 2 * EXPECTED / s.degree("sequence")), AXES)
    assert str(remedy.factor) == "2 · sequence⁻¹"


@pytest.mark.parametrize("axes", [("data",), ("sequence",), ("data", "sequence")])
@pytest.mark.parametrize("averaged", [True, False])
def test_a_missing_sum_is_named_by_its_axes(axes, averaged):
    torch.manual_seed(0)

    def parts(shape):
        found = [torch.randn(4, dtype=torch.float64) for _ in range(shape.world_size)]
        for ranks in shape.groups(axes):
            rest = (EXPECTED * (len(ranks) if averaged else 1)) - sum(found[r] for r in ranks[1:])
            found[ranks[0]] = rest
        return found

    by_shape = {shape: parts(shape) for shape in SHAPES}
    remedy = find_remedy(samples(lambda s, r: by_shape[s][r]), AXES)
    assert remedy.missing == axes
    assert dict(remedy.factor.exponents) == (dict.fromkeys(axes, 1) if averaged else {})


def test_what_no_factor_explains_is_not_explained():
    assert find_remedy(samples(lambda s, r: EXPECTED + s.degree("sequence") - 1), AXES) is None
    assert fit_powers({SHAPES[0]: 2.0, SHAPES[1]: 3.0, SHAPES[2]: 7.0, SHAPES[3]: 11.0}, AXES) is None
    wrong_shape = [Samples(SHAPES[1], (EXPECTED[:2],) * 4, EXPECTED)]
    assert find_remedy(wrong_shape, AXES) is None and wrong_shape[0].error() == float("inf")


def test_nan_is_never_right():
    assert not Samples(SHAPES[1], (EXPECTED * float("nan"),) * 4, EXPECTED).is_right


def test_below_the_floor_nothing_is_told():
    tiny = Samples(SHAPES[1], (EXPECTED * 1e-17,) * 4, EXPECTED * -1e-17, floor=1e-8)
    assert tiny.is_right and not tiny.is_provable
    assert not Samples(SHAPES[1], (EXPECTED,) * 4, EXPECTED * 1e-17, floor=1e-8).is_right


def test_factors_of_single_ranks():
    torch.manual_seed(0)
    parts = [[torch.randn(5, dtype=torch.float64)] for _ in range(3)]
    expected = [sum(part[0] for part in parts)]
    scaled = [[part[0] * factor] for part, factor in zip(parts, (0.5, 1.5, 3.0), strict=True)]
    assert fit_ranks(scaled, expected) == pytest.approx([0.5, 1.5, 3.0])
    assert fit_ranks([[torch.randn(5, dtype=torch.float64)] for _ in range(3)], expected) is None


@pytest.mark.parametrize(
    ("bad", "axes", "words"),
    [
        (lambda s: s.degree("sequence") > 1, ("sequence",), "over sequence"),
        (lambda s: s.degree("sequence") > 2, ("sequence",), "wherever sequence has 3 ranks or more"),
        (lambda s: s.degree("data") > 1, ("data",), "over data"),
        (lambda s: s.world_size == 4 and s.degree("data") == 2, AXES, "where data and sequence are used together"),
        (lambda s: True, AXES, "on every mesh"),
        (lambda s: s.degree("sequence") == 3, (), "on sequence=3 only"),
    ],
)  # fmt: skip
def test_an_error_goes_with_the_simplest_rule(bad, axes, words):
    found = Where.of([s for s in SHAPES if bad(s)], [s for s in SHAPES if not bad(s)], AXES)
    assert (found.axes, str(found)) == (axes, words)


def test_ring_and_ulysses_together_are_called_sequence():
    factor = Factor((("ring", -1), ("ulysses", -1)))
    assert str(factor.composed(("dp_replicate", "ring", "ulysses"))) == "sequence⁻¹"
    assert str(Factor((("ulysses", -1),)).composed(("dp_replicate", "ring", "ulysses"))) == "ulysses⁻¹"
    assert str(Factor((("ulysses", -1),)).composed(("ulysses",))) == "ulysses⁻¹"


def test_names_are_counted():
    assert count_names(["a", "b"], 2) == "all 2 parameters"
    assert count_names(list("abcdef"), 9) == "6 of 9 parameters (a, b, c, d, … 2 more)"


PLANS = [
    Plan(),
    Plan(ulysses=8),
    Plan(ring=4, ulysses=2, checkpoint="full"),
    Plan(dp_replicate=16, ulysses=8),
    Plan(dp_replicate=2, dp_shard=64, ring=8, sharding="zero3"),
]


@pytest.mark.parametrize("max_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_small_meshes_tell_every_axis_of_a_plan_apart(plan, max_ranks):
    shapes = [MeshShape.of(mesh) for mesh in meshes_of(plan, max_ranks)]
    used = [axis for axis in shapes[0].axes if any(s.degree(axis) > 1 for s in shapes)]
    assert set(used) >= {axis for axis, degree in MeshShape.of(plan).degrees if degree > 1}
    assert max(s.world_size for s in shapes) <= max_ranks
    together = any(all(s.degree(axis) > 1 for axis in used) for s in shapes)
    assert together == ((len(used) < 3 and max_ranks >= 4) or 2 ** len(used) <= max_ranks)
    for one, other in itertools.permutations(used, 2):
        assert any(s.degree(one) > 1 and s.degree(other) == 1 for s in shapes)
    for shape in shapes:
        assert (shape.plan.checkpoint, shape.plan.sharding) == (plan.checkpoint, plan.sharding)
    with pytest.raises(ValueError, match="max_ranks must be at least 2"):
        meshes_of(plan, 1)


def test_a_shape_places_its_ranks_as_a_device_mesh_does():
    shape = MeshShape.of({"dp_replicate": 2, "ring": 2, "dp_shard": 3})
    assert shape.coordinates(7) == {"dp_replicate": 1, "ring": 0, "dp_shard": 1}
    assert [shape.data_rank(r) for r in range(12)] == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert shape.groups(["ring"])[0] == [0, 3] and len(shape.groups(["ring"])) == 6
    assert (
        str(shape) == "dp_replicate=2 × ring=2 × dp_shard=3" and str(MeshShape.of({"data": 1})) == "one rank"
    )


# Factors that are no power of a number of ranks.


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
    assert find_remedy(found, AXES, is_summed=True) == remedy


def test_one_wrong_number_has_no_factor():
    """It would always fit; two that agree tell something."""
    one = torch.ones(1, dtype=torch.float64)
    assert find_remedy(scaled(lambda s: 1.7 if s.world_size == 3 else 1.0, one), AXES, is_summed=True) is None
    assert (
        str(
            find_remedy(
                scaled(lambda s: 1.7 if s.degree("sequence") > 2 else 1.0, one), AXES, is_summed=True
            ).factor
        )
        == "1.7"
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


def test_every_cause_has_words():
    where = Where((SHAPES[0],), "over", ("data",))
    for kind in Cause.__subclasses__():
        if kind is InLaterStep:
            continue
        by = Factor((("data", -1),))
        cause = kind(where, ("a.weight",), 2, ("data",), by)
        for each in (cause, InLaterStep.of(cause, 2)):
            assert each.what and each.remedy, kind
            assert each.to_dict()["kind"] == cause.kind


@pytest.mark.parametrize(
    ("factors", "shares"),
    [
        ([4 / 11, 4 / 11, 3 / 11], "4:4:3"),
        ([12 / 11, 12 / 11, 9 / 11], "4:4:3"),
        ([11 / 12, 11 / 12, 11 / 9], "4:4:3"),
        ([2 * 64 / 127, 2 * 63 / 127], "64:63"),
        # Any two numbers whose mean is 1 are shares of something.
        ([1.2345678, 0.7654322], ""),
        ([1.0 + 1 / 4096, 1.0 - 1 / 4096], ""),
        ([0.7, 0.9], ""),
        ([0.5, 0.5], ""),
    ],
)
def test_shares_are_of_few_tokens(factors, shares):
    assert as_shares(factors) == shares
