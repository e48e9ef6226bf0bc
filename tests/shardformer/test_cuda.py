"""Models on one GPU, a rank by itself: sharded, checkpointed and offloaded they are the plain model there."""

import pytest
import torch

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER
from opensora_accel.precision import LiftOperations
from tests.shardformer.conformance import fp64_model, in_double, on_device, step
from tests.tiers import CPU_AND_GPU
from tests.tolerances import RELATIVE, relative_errors
from tests.video_models import CASES

pytestmark = pytest.mark.slow

PLANS = [Plan(), Plan(checkpoint="selective", offload=1.0), Plan(checkpoint="full", offload=1.0)]


@pytest.fixture(autouse=True)
def one_rank(parallel_registry, monkeypatch):
    """The registry, and products of fp32 that are no products of tf32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield parallel_registry
    MANAGER.close()


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("name", ["Wan", "HunyuanVideo", "LTX-Video", "CogVideoX", "MMDiT"])
def test_compiled_blocks_in_fp32(name, device):
    """By Inductor, checkpointed and offloaded; beside the plain model's blocks, compiled by it too.

    First in this file, as each takes the time of ten others, which the other processes run meanwhile.

    On a CPU Inductor of torch 2.13 gives the plain HunyuanVideo's input a gradient that is off by a half, in fp32.
    """
    init_parallel(Plan(), device_type=device)
    case, found = CASES[name], []
    inputs = on_device(case.inputs(), device)
    for model in (case.make().to(device), shardformer.shard(case.make().to(device), PLANS[2])):
        torch._dynamo.reset()
        for block in shardformer.blocks_of(model):
            block.compile()
        for _ in range(2):  # the first one of a sharded model is checked, and runs as it is
            model.zero_grad()
            result = step(model, case, inputs)
        found.append(result)
    errors = relative_errors(found[1], found[0])
    assert max(errors.values()) < RELATIVE[torch.float32], errors


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("name", CASES)
def test_a_sharded_model_in_fp64(name, device):
    init_parallel(Plan(), device_type=device)
    case = CASES[name]
    inputs = on_device(in_double(case.inputs()), device)
    with LiftOperations():
        expected = step(fp64_model(case).to(device), case, inputs)
        for plan in PLANS:
            model = shardformer.shard(fp64_model(case).to(device), plan)
            errors = relative_errors(step(model, case, inputs), expected)
            assert max(errors.values()) < RELATIVE[torch.float64], (plan, errors)


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("norms", ["strict", "fast"])
@pytest.mark.parametrize(
    "name", ["Wan", "HunyuanVideo", "LTX-2", "CogVideoX", "MiniMax-H3", "Mochi", "FLUX.2"]
)
def test_swapped_norms_in_fp32(name, norms, device):
    init_parallel(Plan(), device_type=device)
    case = CASES[name]
    inputs = on_device(case.inputs(), device)
    expected = step(case.make().to(device), case, inputs)
    model = shardformer.shard(case.make().to(device), PLANS[2], norms=norms)
    errors = relative_errors(step(model, case, inputs), expected)
    assert max(errors.values()) < RELATIVE[torch.float32], (shardformer.norms_of(model), errors)
