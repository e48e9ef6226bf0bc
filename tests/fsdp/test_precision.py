"""bf16: sharded fp32 weights, gathered and computed with as those of a model that was loaded in bf16."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import shardformer
from opensora_accel import Plan, deferred_init, init_parallel, materialize, parallel_states
from opensora_accel.observe.fakes import fake_world
from tests.fsdp.autocast import CastByAutocast
from tests.fsdp.steps import batch, whole
from tests.models import wan, wan_inputs
from tests.test_deferred import models
from tests.tiers import PROVE, some
from tests.tolerances import bf16_bound, relative_error
from tests.video_models import CASES


def loaded_in_bf16(model):
    """As `from_pretrained(torch_dtype=torch.bfloat16)` gives it."""
    for name, parameter in model.named_parameters():
        if not set(name.split(".")) & set(model._keep_in_fp32_modules):
            parameter.data = parameter.data.bfloat16()
    return model


def gradients(model, inputs, target):
    (out,) = model(**inputs, return_dict=False)
    (out.float() - target).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def adapted():
    """LoRA on some layers of a model that waits for its values, and all else frozen."""
    from peft import LoraConfig

    with deferred_init(5):
        model = wan(torch.float32).requires_grad_(False)
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    return model


MODELS_IN_BF16 = {"all weights": lambda: wan(torch.float32), "adapters": adapted}


def bf16_beside_one_device(what, plan):
    """Of each gradient of a model in bf16 whose fp32 weights are sharded: relative errors, and its bound."""
    make = MODELS_IN_BF16[what]
    inputs, target = batch(0, 0, slice(0, 2), torch.float32)
    in_bf16 = {name: v if name == "timestep" else v.bfloat16() for name, v in inputs.items()}
    one_device = gradients(loaded_in_bf16(materialize(make())), in_bf16, target)
    init_parallel(plan)
    data_group = parallel_states.get_data_parallel_group()
    rows = slice(data_group.rank(), None, data_group.size())
    # What every rank has before anything is averaged: tokens are spread, and weights are whole.
    spread = Plan(dp_replicate=plan.data, ring=plan.ring, ulysses=plan.ulysses)
    spread_model = shardformer.shard(loaded_in_bf16(materialize(make())), spread)
    own = gradients(spread_model, {name: v[rows] for name, v in in_bf16.items()}, target[rows])
    sharded = shardformer.shard(make(), plan)
    kept = []
    embedder = sharded.condition_embedder.time_embedder
    handle = embedder.register_forward_pre_hook(
        lambda module, _args: kept.append(module.linear_1.weight.dtype)
    )
    found = gradients(sharded, {name: v[rows] for name, v in inputs.items()}, target[rows])
    handle.remove()
    assert kept == [torch.float32]  # what diffusers keeps in fp32 computes in fp32
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    group = parallel_states.get_data_parallel_group(get_mixed_dp_pg=True)
    # As `bf16_bound` counts them, for two blocks.
    num_roundings = 7 if plan.sequence == 1 else 10 if plan.ring == 1 else 18
    numbers = {}
    for name, grad in whole(sharded, found).items():
        mean, norm = own[name].float() / group.size(), own[name].float().norm() / group.size()
        dist.all_reduce(mean, group=group)
        dist.all_reduce(norm, group=group)
        expected = one_device[name].float()
        numbers[name] = {
            "beside the ranks' mean": relative_error(grad, mean),
            "beside one device": ((grad - expected).norm() / expected.norm()).item(),
            "bound": bf16_bound(num_roundings, cancellation=(norm / mean.norm()).item()),
        }
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("what", some(MODELS_IN_BF16))
@pytest.mark.parametrize(
    "plan",
    [
        Plan(ulysses=2, sharding="FULL_SHARD", precision="bf16"),
        *(
            pytest.param(plan, marks=PROVE)
            for plan in (
                Plan(dp_shard=2, sharding="FULL_SHARD", precision="bf16", checkpoint="full"),
                Plan(ring=2, sharding="SHARD_GRAD_OP", precision="bf16"),
                Plan(ulysses=2, sharding="zero3", sharding_factor=1, precision="bf16"),
                Plan(ring=2, ulysses=2, sharding="FULL_SHARD", precision="bf16"),
                Plan(dp_replicate=2, ring=2, sharding="HYBRID_SHARD", precision="bf16"),
            )
        ),
    ],
    ids=str,
)
def test_bf16_is_that_of_a_model_loaded_in_bf16(ranks, what, plan):
    for numbers in ranks(plan.world_size, bf16_beside_one_device, what, plan):
        used = {name: each["beside one device"] / each["bound"] for name, each in numbers.items()}
        worst = max(used, key=used.get)
        print(f"{used[worst]:.2f} of the bound is used, by {worst}: {numbers[worst]}")
        # Gathers, casts and reductions add no rounding: it is the fp32 average of what every rank has in bf16. But what
        # the text gets from all blocks is added up in another order.
        rounded = {name for name, each in numbers.items() if each["beside the ranks' mean"] > 1e-6}
        assert all("text_embedder" in name for name in rounded)
        assert used[worst] <= 1


def step_of_adapters(plan, narrow):
    """Of one step in the trainer's way: gradients of adapters, and each parameter's dtype, frozen ones first."""
    from shardformer.engine import apply

    init_parallel(plan)
    inputs, target = batch(0, 0, slice(0, 2), torch.float32)
    with mock.patch.object(apply, "_narrow_frozen", apply._narrow_frozen if narrow else lambda *_: None):
        model, forward = shardformer.parallelize(adapted(), plan, torch.device("cpu"))
    (out,) = forward(**inputs, return_dict=False)
    (out.float() - target).square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    dtypes = [
        {p.dtype for p in model.parameters() if p.requires_grad == trained} for trained in (False, True)
    ]
    in_fp32 = {
        name for name, p in model.named_parameters() if p.dtype == torch.float32 and not p.requires_grad
    }
    return whole(model, found), dtypes, in_fp32


@pytest.mark.parametrize(
    "plan",
    some([
        Plan(ulysses=3, sharding="zero3", precision="bf16", checkpoint="full"),
        Plan(precision="bf16"),
        Plan(ring=2, dp_replicate=2, sharding="HYBRID_SHARD", precision="bf16"),
    ]),
    ids=str,
)  # fmt: skip
def test_frozen_weights_take_two_bytes_and_give_the_same_bits(ranks, plan):
    narrow = ranks(plan.world_size, step_of_adapters, plan, True)
    wide = ranks(plan.world_size, step_of_adapters, plan, False)
    for (found, dtypes, in_fp32), (expected, wide_dtypes, _) in zip(narrow, wide, strict=True):
        assert wide_dtypes == [{torch.float32}, {torch.float32}]
        assert dtypes == [{torch.bfloat16, torch.float32}, {torch.float32}]
        assert in_fp32 and all(
            "time_embedder" in name or "norm" in name or "scale_shift" in name for name in in_fp32
        )
        assert found.keys() == expected.keys() and found
        assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("per_token_time", [False, True])
def test_times_are_not_rounded(per_token_time):
    """Hidden states have as many dims as times of single tokens, and are."""
    times = []
    with fake_world(0, 1):
        plan = Plan(sharding="FULL_SHARD", precision="bf16")
        init_parallel(plan, "cpu")
        model = shardformer.shard(wan(torch.float32), plan)
        model.condition_embedder.register_forward_pre_hook(lambda module, args: times.append(args[0]))
        inputs = wan_inputs(torch.float32, per_token_time=per_token_time)
        inputs["timestep"] += 0.5
        (out,) = model(**inputs, return_dict=False)
    assert out.dtype == torch.bfloat16 and torch.equal(times[0], inputs["timestep"].flatten())


@pytest.mark.parametrize(("name", "argument"), [("CogVideoX", "image_rotary_emb"), ("FLUX.1", "img_ids")])
def test_positions_are_not_rounded(name, argument):
    """As a pipeline passes them to a model in bf16: a table of rotary positions, or ids, in fp32."""
    inputs, seen = CASES[name].inputs(), []
    with fake_world(0, 1):
        plan = Plan(sharding="FULL_SHARD", precision="bf16")
        init_parallel(plan, "cpu")
        model = shardformer.shard(CASES[name].make(), plan)
        hook = lambda _model, _args, kwargs: seen.append(kwargs)  # noqa: E731 — behind the one that casts
        model.register_forward_pre_hook(hook, with_kwargs=True)
        model(**inputs)
    for found, given in zip(tree_leaves(seen[0][argument]), tree_leaves(inputs[argument]), strict=True):
        assert torch.equal(found, given) and found.dtype == torch.float32
    assert seen[0]["hidden_states"].dtype == torch.bfloat16


def test_bf16_needs_master_weights(ranks):
    ranks(1, refuse_bf16_weights)


def refuse_bf16_weights():
    plan = Plan(sharding="zero3", precision="bf16")
    init_parallel(plan)
    with pytest.raises(ValueError, match=r"call model.float\(\) before shardformer.shard"):
        shardformer.shard(wan(torch.bfloat16), plan)


# They multiply fp32 by bf16, which autocast hides, on one device that loaded them in bf16 too.
MADE_FOR_AUTOCAST = {"DiffusionTransformer3D", "MMDiTModel", "Wan2_2Transformer3DModel", "WanModel"}


def in_bf16(modality):
    fields = {field.name: getattr(modality, field.name) for field in dataclasses.fields(modality)}
    changes = {
        name: value.bfloat16()
        for name, value in fields.items()
        if torch.is_tensor(value) and value.is_floating_point()
    }
    return dataclasses.replace(modality, **changes)


def operators_under_autocast(kind):
    """Of a forward and a backward: operators that autocast may cast for, and how many there are."""
    case = CASES[models()[kind]]
    inputs = case.inputs()
    if kind == "HunyuanVideo15Transformer3DModel":  # it takes its dtype from the timestep
        inputs["timestep"] = inputs["timestep"].bfloat16()
    if kind == "LTXModel":  # what comes in a dataclass is left as it is
        inputs = {name: in_bf16(modality) for name, modality in inputs.items()}
    plan = Plan(sharding="FULL_SHARD", precision="bf16", checkpoint="full")
    with fake_world(0, 1):
        init_parallel(plan, "cpu")
        model = shardformer.shard(case.make(), plan)
        with CastByAutocast() as mode:
            outputs = [leaf for leaf in tree_leaves(model(**inputs)) if isinstance(leaf, torch.Tensor)]
            sum(out.float().square().mean() for out in outputs).backward()
    assert all(torch.isfinite(p.grad.to_local()).all() for p in model.parameters() if p.grad is not None)
    return mode.found, mode.num_operators


def pytest_generate_tests(metafunc):
    if metafunc.function is test_no_dtype_depends_on_a_list_of_autocast:
        metafunc.parametrize("kind", some(models(), "WanTransformer3DModel", "MochiTransformer3DModel"))


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
