"""bf16: sharded fp32 weights, gathered and computed with as those of a model that was loaded in bf16."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.verify.communication.fake_world import fake_world
from tests.fsdp.autocast import CastByAutocast
from tests.fsdp.steps import batch, whole
from tests.models import wan
from tests.test_deferred import MODELS
from tests.tiers import PROVE, some
from tests.tolerances import RELATIVE
from tests.video_models import CASES


def bf16_beside_one_device(plan):
    """Relative error of each gradient of a model in bf16 whose master weights are sharded."""
    model = wan(torch.float32)
    for name, parameter in model.named_parameters():
        if not set(name.split(".")) & set(model._keep_in_fp32_modules):
            parameter.data = parameter.data.bfloat16()
    inputs, target = batch(0, 0, slice(0, 1), torch.float32)
    in_bf16 = {name: v if name == "timestep" else v.bfloat16() for name, v in inputs.items()}
    (out,) = model(**in_bf16, return_dict=False)
    (out.float() - target).square().mean().backward()
    init_parallel(plan)
    sharded = shardformer.shard(wan(torch.float32), plan)
    seen = []
    handle = sharded.condition_embedder.register_forward_pre_hook(
        lambda module, args: seen.extend([args[0].dtype, module.time_embedder.linear_1.weight.dtype])
    )
    (found,) = sharded(**inputs, return_dict=False)
    handle.remove()
    (found.float() - target).square().mean().backward()
    grads = whole(sharded, {name: p.grad for name, p in sharded.named_parameters()})
    group = parallel_states.get_data_parallel_group(get_mixed_dp_pg=True)
    expected = {name: p.grad.float() for name, p in model.named_parameters()}
    largest = max(grad.norm() for grad in expected.values())
    dist.all_reduce(found, group=group)
    error = max(
        ((grads[name] - grad).norm() / max(grad.norm(), 1e-3 * largest)).item()
        for name, grad in expected.items()
    )
    return error, seen, {grad.dtype for grad in grads.values()}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(ulysses=2, sharding="FULL_SHARD", precision="bf16"),
        pytest.param(Plan(ring=2, sharding="SHARD_GRAD_OP", precision="bf16"), marks=PROVE),
        pytest.param(Plan(ulysses=2, sharding="zero3", sharding_factor=1, precision="bf16"), marks=PROVE),
    ],
    ids=str,
)
def test_bf16_is_that_of_a_model_loaded_in_bf16(ranks, plan):
    for error, seen, dtypes in ranks(plan.world_size, bf16_beside_one_device, plan):
        assert error < RELATIVE[torch.bfloat16]
        # A timestep of 999.5 is not rounded to 1000, and what diffusers keeps in fp32 computes in fp32.
        assert seen == [torch.float32, torch.float32] and dtypes == {torch.float32}


def test_bf16_needs_master_weights(ranks):
    ranks(1, refuse_bf16_weights)


def refuse_bf16_weights():
    plan = Plan(sharding="zero3", precision="bf16")
    init_parallel(plan)
    with pytest.raises(ValueError, match=r"call model.float\(\) before shardformer.shard"):
        shardformer.shard(wan(torch.bfloat16), plan)


# They multiply fp32 by bf16, which autocast hides, on one device that loaded them in bf16 too.
MADE_FOR_AUTOCAST = {"MMDiTModel", "WanModel"}


def operators_under_autocast(kind):
    """Of a forward and a backward: operators that autocast may cast for, and how many there are."""
    case = CASES[MODELS[kind]]
    inputs = case.inputs()
    if kind == "HunyuanVideo15Transformer3DModel":  # it takes its dtype from the timestep
        inputs["timestep"] = inputs["timestep"].bfloat16()
    plan = Plan(sharding="FULL_SHARD", precision="bf16", checkpoint="full")
    with fake_world(0, 1):
        init_parallel(plan, "cpu")
        model = shardformer.shard(case.make(), plan)
        with CastByAutocast() as mode:
            outputs = [leaf for leaf in tree_leaves(model(**inputs)) if isinstance(leaf, torch.Tensor)]
            sum(out.float().square().mean() for out in outputs).backward()
    assert all(torch.isfinite(p.grad.to_local()).all() for p in model.parameters() if p.grad is not None)
    return mode.found, mode.num_operators


@pytest.mark.parametrize("kind", some(MODELS, "WanTransformer3DModel", "MochiTransformer3DModel"))
def test_no_dtype_depends_on_a_list_of_autocast(kind):
    """Those lists differ between CPU and CUDA: rms_norm is in fp32 on CUDA since torch 2.12."""
    if kind in MADE_FOR_AUTOCAST:
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            operators_under_autocast(kind)
    else:
        found, num_operators = operators_under_autocast(kind)
        assert found == set() and num_operators > 100


@pytest.mark.parametrize(("dtype", "num_found"), [(torch.bfloat16, 1), (torch.float32, 0)])
def test_what_autocast_may_cast_is_found(dtype, num_found):
    """On CUDA both would be on, on the CPU the first one only."""
    with CastByAutocast() as mode, torch.autocast("cpu", dtype):
        torch.ones(2).cos()
    assert len(mode.found) == num_found
