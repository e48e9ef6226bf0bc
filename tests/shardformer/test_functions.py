"""Functions of a model's package are replaced for as long as a model that asked for it is there."""

import gc
import sys
from functools import wraps

import pytest
from torch import nn

import shardformer
from opensora_accel import Plan, init_parallel
from shardformer.functions import replace_function
from tests.video_models import CASES


def scale(x):
    return x


class Model(nn.Module):
    pass


def times(number):
    def wrap(function):
        @wraps(function)
        def scaled(x):
            return number * function(x)

        return scaled

    return wrap


@pytest.fixture(autouse=True)
def original():
    before = scale
    yield before
    assert scale is before


def test_each_model_takes_back_its_own():
    one, other = Model(), Model()
    undo_one, undo_other = (
        replace_function(one, "scale", times(2)),
        replace_function(other, "scale", times(3)),
    )
    assert scale(1) == 6
    undo_one()
    assert scale(1) == 3
    undo_one()  # once is enough
    assert scale(1) == 3
    undo_other()


def test_a_model_that_is_gone_has_taken_back_its_own():
    one, other = Model(), Model()
    replace_function(one, "scale", times(2))
    replace_function(other, "scale", times(3))
    del one
    gc.collect()
    assert scale(1) == 3
    del other
    gc.collect()


def test_what_somebody_else_made_of_it_stays(original):
    model, here = Model(), sys.modules[__name__]
    undo = replace_function(model, "scale", times(2))
    here.scale = times(5)(scale)
    undo()
    assert scale(1) == 10
    here.scale = original


def is_left(name):
    init_parallel(Plan(ulysses=2))
    model = CASES[name].make()
    package = sys.modules[type(model).__module__]
    before = package.rope_apply
    shardformer.shard(model, Plan(ulysses=2))
    assert package.rope_apply is not before
    del model
    gc.collect()
    return package.rope_apply is not before


def test_a_sharded_model_leaves_nothing_in_its_authors_package(ranks):
    assert ranks(2, is_left, "Wan 2.1, VideoX-Fun's") == [False, False]
