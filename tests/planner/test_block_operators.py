"""The kernels of a block of each model family on a GPU, as the planner counts them: a table, which a GPU confirms."""

import json

import pytest
import torch

from opensora_accel.observe.as_cuda import architecture_of
from shardformer import blocks_of
from tests.planner.block_operators import ARCHITECTURE, PUBLISHED, READ_VALUES, TABLE, foreseen, look_at
from tests.tiers import CPU_AND_GPU, NEEDS_GPU, some
from tests.video_models import CASES, outlines

RECORDED = json.loads(TABLE.read_text(encoding="utf-8"))
# One copy more is foreseen of a CPU's than it makes: 10 and 9.
DIFFERS = [("EasyAnimate", "cpu")]
IN_MAKE_TEST = ("Wan", "HunyuanVideo", "LTX-Video", "CogVideoX", "wan2.1-14b")


@pytest.mark.parametrize("name", some(RECORDED, *IN_MAKE_TEST))
def test_a_block_runs_and_keeps_what_the_table_says(name):
    # `python -m tests.planner.block_operators` writes it anew.
    found = foreseen(name, ARCHITECTURE)
    assert {kind: found[kind] for kind in RECORDED[name]} == RECORDED[name]


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("name", [name for name in RECORDED if name in CASES])
def test_a_block_with_values_runs_what_is_foreseen_for_it(name, device):
    architecture = architecture_of(torch.device(device))
    expected = RECORDED[name] if architecture == ARCHITECTURE else foreseen(name, architecture)
    found = look_at(name, device)
    if (name, device) in DIFFERS:
        expected["EasyAnimateTransformerBlock"]["backward"]["clone bfloat16"] -= 1
    assert {kind: found[kind] for kind in expected} == expected


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_block_of_a_published_model_runs_what_is_foreseen_for_it(name, device):
    test_a_block_with_values_runs_what_is_foreseen_for_it(name, device)


def test_the_table_has_every_kind_of_block():
    kinds = {kind for blocks in RECORDED.values() for kind in blocks}
    assert set(READ_VALUES) <= set(CASES)
    missing = {
        name
        for name, model in outlines().items()
        if not {type(block).__name__ for block in blocks_of(model)} <= kinds
    }
    assert missing <= set(READ_VALUES), missing


def test_no_block_is_what_a_cpu_makes_of_it():
    for blocks in RECORDED.values():
        for seen in blocks.values():
            operators = {*seen["forward"], *seen["backward"]}
            assert not any("for_cpu" in operator for operator in operators)
    seen = RECORDED["Wan"]["WanTransformerBlock"]
    assert (
        seen["forward"]["_fused_rms_norm bfloat16"] == seen["backward"]["_fused_rms_norm_backward bfloat16"]
    )
