"""Sharded parameters: the training of one device, in the plan's precision, with the collectives that were asked for."""

import itertools
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import shardformer
from opensora_accel import Plan, fsdp, init_parallel, parallel_states
from opensora_accel.verify import verify
from opensora_accel.verify.communication.promise import broken_promises
from opensora_accel.verify.communication.record_step import record_step
from tests.fsdp.steps import batch, make_model, train, whole
from tests.models import wan
from tests.tiers import PROVE, some
from tests.tolerances import RELATIVE, relative_errors
from tests.verify.communication.recorded_steps import tiny_wan, wan_step


def errors_of_training(plan, accumulation, clip, device="cpu"):
    """Largest relative errors of norms, gradients and parameters, after ten steps, of one device's."""
    expected_model = make_model().to(device)
    expected_norms, expected_grads = train(expected_model, slice(None), accumulation, clip, device=device)
    init_parallel(plan, device)
    group = parallel_states.get_data_parallel_group()
    model = shardformer.shard(make_model().to(device), plan)
    rows = slice(group.rank(), None, group.size())
    norms, grads = train(model, rows, accumulation, clip, device=device)
    found = relative_errors(whole(model, grads), expected_grads)
    found |= relative_errors(
        whole(model, dict(model.named_parameters())), dict(expected_model.named_parameters())
    )
    norm_error = max(abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True))
    return max(found.values()), norm_error


# Every strategy with every kind of sequence parallelism, on 1 to 4 ranks.
PLANS = {
    "FULL_SHARD, one rank": Plan(sharding="FULL_SHARD"),
    "FULL_SHARD, ulysses": Plan(ulysses=2, sharding="FULL_SHARD"),
    "FULL_SHARD, ring": Plan(ring=3, sharding="FULL_SHARD"),
    "FULL_SHARD, ring × ulysses": Plan(ring=2, ulysses=2, sharding="FULL_SHARD"),
    "FULL_SHARD, data × ulysses": Plan(dp_shard=2, ulysses=2, sharding="FULL_SHARD"),
    "SHARD_GRAD_OP, ulysses": Plan(ulysses=3, sharding="SHARD_GRAD_OP"),
    "SHARD_GRAD_OP, data × ring": Plan(dp_shard=2, ring=2, sharding="SHARD_GRAD_OP"),
    "HYBRID_SHARD, ulysses": Plan(dp_replicate=2, ulysses=2, sharding="HYBRID_SHARD"),
    "HYBRID_SHARD, ring": Plan(dp_replicate=2, ring=2, sharding="HYBRID_SHARD"),
    "HYBRID_SHARD, within ring × ulysses": Plan(
        ring=2, ulysses=2, sharding="HYBRID_SHARD", sharding_factor=2
    ),
    "HYBRID_SHARD_ZERO2, data": Plan(dp_replicate=2, dp_shard=2, sharding="HYBRID_SHARD_ZERO2"),
    "NO_SHARD by factor, ulysses": Plan(dp_replicate=2, ulysses=2, sharding="zero2", sharding_factor=1),
    "nothing ahead": Plan(ulysses=2, sharding="FULL_SHARD", prefetch=0),
    "two ahead, checkpointed, offloaded": Plan(
        ring=2, sharding="FULL_SHARD", prefetch=2, checkpoint="full", offload=1.0
    ),
    "in host memory": Plan(ulysses=2, sharding="FULL_SHARD", cpu_offload=True),
}
CASES = [
    pytest.param(*case, marks=() if case == ("SHARD_GRAD_OP, ulysses", 3, 0.1) else PROVE)
    for case in itertools.product(PLANS, (1, 3), (0.0, 0.1))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accumulation", "clip"), CASES)
def test_training_is_that_of_one_device(ranks, name, accumulation, clip):
    plan = PLANS[name]
    for error, norm_error in ranks(plan.world_size, errors_of_training, plan, accumulation, clip):
        assert error < RELATIVE[torch.float64] and norm_error < RELATIVE[torch.float64]


def changed_in_place(plan):
    """Largest relative error of the gradients where the output is changed in place, and FSDP's warnings."""
    inputs, target = batch(0, 0, slice(0, 1))

    def step(model):
        (out,) = model(**inputs, return_dict=False)
        out -= target
        out.square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = step(make_model())
    init_parallel(plan)
    model = shardformer.shard(make_model(), plan)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        grads = whole(model, step(model))
    return max(relative_errors(grads, expected).values()), [
        str(each.message) for each in told if "view" in str(each)
    ]


def test_the_output_may_be_changed_in_place(ranks):
    for error, told in ranks(2, changed_in_place, Plan(ulysses=2, sharding="FULL_SHARD")):
        assert error < RELATIVE[torch.float64] and told == []


def verified(model, run):
    init_parallel(run.plan)
    shardformer.shard(model, run.plan)
    rows = slice(run.data_rank, None, run.data_size)
    inputs, target = batch(0, 0, rows)
    (out,) = model(**inputs, return_dict=False)
    loss = (out - target).square().mean()
    loss.backward()
    return loss


@pytest.mark.prove
@pytest.mark.parametrize("sharding", ["SHARD_GRAD_OP", "FULL_SHARD"])
def test_the_verifier_finds_them_right(sharding):
    report = verify(verified, wan, Plan(ulysses=2, ring=2, sharding=sharding))
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    some(
        [name for name in PLANS if PLANS[name].world_size > 1],
        "FULL_SHARD, data × ulysses",
        "HYBRID_SHARD, ring",
    ),
)
@pytest.mark.parametrize("precision", some(["bf16", "fp32"]))
def test_collectives_are_those_that_the_plan_promises(name, precision):
    plan = PLANS[name].replace(precision=precision)
    assert broken_promises(record_step(wan_step, tiny_wan, plan)) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"ulysses": 2, "sharding": "HYBRID_SHARD"},
            "set dp_replicate, or sharding_factor between 1 and all ranks",
        ),
        ({"dp_replicate": 2, "ulysses": 2, "sharding": "FULL_SHARD"}, 'use sharding="HYBRID_SHARD"'),
        (
            {"dp_shard": 4, "ulysses": 2, "sharding": "zero3", "sharding_factor": 3},
            "one of 1, 2, 4, 8; got 3",
        ),
        ({"ulysses": 2, "sharding_factor": 2}, 'set sharding="zero3"'),
        ({"ulysses": 2, "cpu_offload": True}, 'set sharding="zero3"'),
        ({"prefetch": -1}, "prefetch must be a whole number of blocks, at least 0; got -1"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError) as caught:
        Plan(**fields)
    assert message in str(caught.value)


def test_a_factor_splits_the_data_ranks():
    plan = Plan(dp_shard=8, ulysses=2, sharding="HYBRID_SHARD", sharding_factor=4)
    assert (plan.dp_replicate, plan.dp_shard, plan.num_shards, plan.sharding) == (4, 2, 4, "zero3")
    assert Plan.from_json(plan.to_json()) == plan and plan.shard_axes == ("dp_shard", "ring", "ulysses")
    assert Plan(ring=2, ulysses=2, sharding="zero3", sharding_factor=2).shard_axes == ("ulysses",)


@pytest.mark.parametrize(("devices", "is_refused"), [(["cuda"], True), (["cpu", "cuda"], False)])
def test_shards_on_the_host_need_a_backend_that_sends_from_there(devices, is_refused):
    group = SimpleNamespace(_device_types=[torch.device(each) for each in devices])
    with pytest.raises(ValueError, match="cpu:gloo,cuda:nccl") if is_refused else nullcontext():
        fsdp._check_backend(SimpleNamespace(get_all_groups=lambda: [group]))
