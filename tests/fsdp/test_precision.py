"""bf16: sharded fp32 weights, gathered and computed with as those of a model that was loaded in bf16."""

import pytest
import torch
import torch.distributed as dist

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from tests.fsdp.steps import batch, whole
from tests.models import wan
from tests.tiers import PROVE
from tests.tolerances import RELATIVE


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
