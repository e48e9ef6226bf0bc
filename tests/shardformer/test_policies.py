"""Every policy against its real model: output, input gradients and all parameter gradients of one device, in fp64."""

import pytest
import torch

import shardformer
from opensora_accel import Plan
from shardformer.policy import model_names
from tests.shardformer.conformance import errors
from tests.tolerances import RELATIVE
from tests.video_models import CASES

MESHES = {
    "ulysses 2": Plan(ulysses=2),
    "ring 2": Plan(ring=2),
    "ring 3": Plan(ring=3),
    "ring 2 × ulysses 2": Plan(ring=2, ulysses=2),
    # More ranks than heads, and recomputation, which meets the model's hooks or not.
    "ulysses 4, checkpoint": Plan(ulysses=4, checkpoint="full", offload=1.0),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_device(ranks, name, mesh):
    plan = MESHES[mesh]
    for found in ranks(plan.world_size, errors, name, plan):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < RELATIVE[torch.float64], worst


@pytest.mark.parametrize("name", CASES)
def test_gradients_under_the_models_own_checkpointing(ranks, name):
    for found in ranks(2, errors, name, Plan(ulysses=2), True):
        assert max(found.values()) < RELATIVE[torch.float64]


def test_every_policy_has_a_case():
    made = {type(case.make()).__name__ for case in CASES.values()}
    assert set(model_names()) <= made | {"T5EncoderModel", "UMT5EncoderModel"}
    assert made <= set(model_names())


@pytest.mark.parametrize("name", CASES)
def test_the_blocks_are_named(name):
    assert len(shardformer.blocks_of(CASES[name].make())) >= 2
