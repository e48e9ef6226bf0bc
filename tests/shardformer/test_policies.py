"""Every policy against its real model: output, input gradients and all parameter gradients of one device, in fp64."""

import inspect
import time

import pytest
import torch

import shardformer
from opensora_accel import Plan, init_parallel
from shardformer.policy import UNSUPPORTED, find_policy, model_names
from tests.shardformer.conformance import errors, step
from tests.shardformer.test_engine import traces
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


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("MMDiT")])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(ulysses=2, tp=2),
        Plan(ring=2, tp=2, checkpoint="full"),
        Plan(dp_shard=2, tp=2, sharding="zero3"),
        Plan(dp_replicate=2, tp=2, sharding="zero2"),
    ],
    ids=str,
)
def test_tensor_and_sequence_parallelism_together(ranks, name, plan):
    for found in ranks(plan.world_size, errors, name, plan):
        assert max(found.values()) < RELATIVE[torch.float64]


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


def test_no_video_model_of_diffusers_is_left_out_silently():
    import diffusers

    video = {name for name in dir(diffusers) if name.endswith(("Transformer3DModel", "TemporalModel"))}
    assert video and video <= set(model_names()) | set(UNSUPPORTED)
    assert not set(model_names()) & set(UNSUPPORTED)
    for name in UNSUPPORTED:
        assert hasattr(diffusers, name) or name == "TransformerSpatioTemporalModel", name


@pytest.mark.parametrize("name", CASES)
def test_unshard_gives_back_the_model(ranks, name):
    assert all(ranks(2, undone, name))


def undone(name):
    """Output and gradients bit for bit, and nothing left on any module."""
    plan = Plan(ring=2)
    init_parallel(plan)
    case = CASES[name]
    model, inputs = case.make(), case.inputs()
    clean, expected = traces(model), step(model, case, inputs)
    names = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    model.zero_grad()
    shardformer.shard(model, plan)
    assert [(name, id(parameter)) for name, parameter in model.named_parameters()] == names
    step(model, case, inputs)
    model.zero_grad()
    shardformer.unshard(model)
    assert traces(model) == clean
    found = step(model, case, inputs)
    return all(torch.equal(found[key], value) for key, value in expected.items())


def num_local(name, plan):
    """Elements of what enters the last block, here and on one device."""
    init_parallel(plan)
    case, sizes = CASES[name], []
    for sharded in (False, True):
        model = case.make()
        if sharded:
            shardformer.shard(model, plan)
        policy = find_policy(model)
        block, argument = shardformer.blocks_of(model)[-1], policy.blocks[-1].boundary[0]

        def record(module, args, kwargs, argument=argument):
            sizes.append(inspect.signature(module.forward).bind(*args, **kwargs).arguments[argument].numel())

        block.register_forward_pre_hook(record, with_kwargs=True)
        step(model, case, case.inputs())
    return sizes


@pytest.mark.parametrize("name", CASES)
def test_a_block_computes_its_share_of_the_tokens(ranks, name):
    """Equal gradients alone would be found of ranks that all compute everything."""
    found = ranks(2, num_local, name, Plan(ulysses=2))
    whole = found[0][0]
    shares = [own for _whole, own in found]
    if name.startswith("MMDiT"):  # its last blocks hold the text as well, on every rank
        assert max(shares) < 0.6 * whole
    else:
        assert sum(shares) == whole and max(shares) < 0.75 * whole


def on_meta():
    """Wan 2.1's 14B, as its config says."""
    from diffusers import WanTransformer3DModel

    plan = Plan(ring=2, ulysses=2, checkpoint="full")
    init_parallel(plan)
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=40, attention_head_dim=128, ffn_dim=13824, num_layers=40, text_dim=4096
        )
    start = time.monotonic()
    shardformer.shard(model, plan)
    return time.monotonic() - start, sum(parameter.numel() for parameter in model.parameters())


def test_a_model_of_14b_parameters_is_sharded_on_meta_in_seconds(ranks):
    for seconds, parameters in ranks(4, on_meta):
        assert parameters > 14e9 and seconds < 5
