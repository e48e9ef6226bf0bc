"""Causes from results that are made up here: `diagnose` needs no process, and changes nothing."""

import pytest
import torch

from opensora_accel.observe.meshes import MeshShape
from opensora_accel.verify import diagnose
from opensora_accel.verify.causes import (
    Hang,
    MissingGradient,
    MissingSum,
    Origin,
    Scale,
    StepFails,
    StrangeScale,
    WrongResult,
    WrongValues,
    WrongWeights,
)
from opensora_accel.verify.observation import Observation
from opensora_accel.verify.results import Expected, MeshResult, Results, find_origin

SHAPES = [MeshShape.of(mesh) for mesh in ({"data": 2, "tensor": 2}, {"tensor": 3}, {"data": 3, "tensor": 1})]
RIGHT = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
PARTS = {2: (0.4, 0.6), 3: (0.2, 0.3, 0.5)}


def observation(gradient, weights="[4] ab", loss=1.0):
    return Observation({"loss": loss}, {"a.weight": gradient}, weights={"a.weight": weights})


def results_of(of_rank):
    """`of_rank(shape, place)` is the gradient of the rank at that place, or a whole observation."""
    expected, meshes = Expected((observation(RIGHT),)), []
    for shape in SHAPES:
        found = [of_rank(shape, shape.coordinates(rank)) for rank in range(shape.world_size)]
        seen = [each if isinstance(each, Observation) else observation(each) for each in found]
        meshes.append(MeshResult(shape, expected, seen))
    return Results(meshes)


def parts(shape, place):
    """Each tensor rank's own part of the gradient."""
    return RIGHT * PARTS.get(shape.degree("tensor"), (1.0,))[place["tensor"]]


@pytest.mark.parametrize(
    ("of_rank", "kind", "axes", "factor"),
    [
        (parts, MissingSum, ("tensor",), ""),
        (lambda shape, place: 2 * parts(shape, place), MissingSum, ("tensor",), "2"),
        (lambda shape, place: RIGHT / shape.degree("tensor"), Scale, ("tensor",), "tensor⁻¹"),
        (lambda shape, place: RIGHT * shape.degree("data"), Scale, ("data",), "data"),
        (lambda shape, place: RIGHT * 0.7 ** shape.degree("tensor"), StrangeScale, ("data", "tensor"), ""),
        (lambda shape, place: RIGHT + shape.degree("tensor") - 1, WrongValues, ("tensor",), ""),
        (lambda shape, place: None if place["tensor"] else RIGHT, MissingGradient, ("tensor",), ""),
        (lambda shape, place: observation(RIGHT, loss=shape.degree("tensor")), WrongResult, ("tensor",), "tensor"),
        (lambda shape, place: observation(-RIGHT, "[4] cd"), WrongWeights, ("data", "tensor"), ""),
    ],
)  # fmt: skip
def test_a_cause_is_found_with_its_axes_and_its_factor(of_rank, kind, axes, factor):
    cause, *_ = diagnose(results_of(of_rank))
    assert (type(cause), cause.axes, cause.factor) == (kind, axes, factor)


def test_nothing_is_found_where_all_is_right():
    assert diagnose(results_of(lambda shape, place: RIGHT)) == []


def test_results_stay_as_they_are():
    results = results_of(parts)
    assert diagnose(results) == diagnose(results)


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ({0: "no answer: hangs", 1: "no answer: hangs", 2: "no answer: hangs"}, Hang),
        ({0: "no answer: hangs", 1: "RuntimeError: the disk is full"}, StepFails),
    ],
)
def test_a_failure_is_told_from_what_follows_it(errors, kind):
    expected = Expected((observation(RIGHT),))
    (cause,) = diagnose(Results([MeshResult(SHAPES[1], expected, errors=errors)]))
    assert type(cause) is kind
    assert kind is Hang or (cause.rank, cause.message) == (1, "RuntimeError: the disk is full")


@pytest.mark.parametrize(
    ("weights", "given", "are_inputs_right"),
    [
        # A row-parallel layer: each rank has some columns of its weight, or takes some channels with all of them.
        ("[4, 2] b", lambda rank, x: x, True),
        ("[4, 6] a", lambda rank, x: x[:, 3 * rank : 3 * rank + 3], True),
        # Tokens of its own, and zeros in the place of the others, add up as well, and are no input of any layer.
        ("[4, 6] a", lambda rank, x: x, False),
    ],
)
def test_partial_sums_are_right_inputs_behind_a_row_parallel_layer_only(weights, given, are_inputs_right):
    torch.manual_seed(0)
    x, middle, out = (torch.randn(5, size, dtype=torch.float64) for size in (6, 4, 4))
    parts = torch.stack([middle * 0.3, middle * 0.7])

    def seen(given, part, result, weights):
        return Observation(
            weights={"down.weight": weights},
            calls={("down", 0): ((given,), (part,)), ("act", 0): ((part,), (result,))},
        )

    shape = MeshShape.of({"tensor": 2}, ())
    turn = seen(x, middle, out, "[4, 6] a")
    ranks = [seen(given(rank, x), parts[rank], parts[rank].tanh(), weights) for rank in range(2)]
    assert find_origin(shape, [turn], ranks) == Origin("act", are_inputs_right)
