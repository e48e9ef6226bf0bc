"""A real Wan, sequence-parallel: output and every gradient equal those of one device."""

import pytest
import torch
import torch.distributed as dist

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER
from opensora_accel.precision import lift_casts
from tests.attention.counting import counted
from tests.models import wan, wan_inputs
from tests.tiers import PROVE, some
from tests.tolerances import RELATIVE, relative_error, relative_errors


def step(model, inputs):
    """One training step's loss, output and gradients, of the parameters and the latent."""
    inputs = {**inputs, "hidden_states": inputs["hidden_states"].clone().requires_grad_()}
    model.zero_grad()
    prediction = model(**inputs, return_dict=False)[0]
    target = torch.randn(prediction.shape, dtype=prediction.dtype, generator=torch.Generator().manual_seed(2))
    (prediction - target).square().mean().backward()
    return prediction.detach(), inputs["hidden_states"].grad, {n: p.grad for n, p in model.named_parameters()}


def average(tensors, group):
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor /= group.size()


def under_autocast(plan):
    """Mean error against fp64 of one device's output and of ours, both under autocast."""
    init_parallel(plan)
    inputs = wan_inputs(torch.float32)
    exact = wan()
    lift_casts(exact)
    expected = exact(**wan_inputs(), return_dict=False)[0]
    outs = []
    for sharded in (False, True):
        model = wan(torch.float32)
        if sharded:
            shardformer.shard(model, plan)
        with torch.autocast("cpu", torch.bfloat16):
            outs.append(model(**inputs, return_dict=False)[0])
        outs[-1].float().square().mean().backward()
    assert outs[0].dtype == outs[1].dtype
    return [(out.double() - expected).abs().mean().item() for out in outs]


@pytest.mark.parametrize("plan", [Plan(ulysses=2), Plan(ring=2)], ids=str)
def test_wan_under_autocast_is_as_exact_as_one_device(ranks, plan):
    """Norms of queries and keys give fp32 and values are bf16 there: the kernel's call casts them, and so do we."""
    for single, parallel in ranks(2, under_autocast, plan):
        assert 0 < parallel < 1.2 * single


RINGS = [Plan(ring=2), Plan(ring=3), Plan(ring=4), Plan(ring=2, ulysses=2)]


def compared(plan, options, use_diffusers_checkpointing=False):
    """Largest relative error of output, input gradient and every parameter gradient."""
    init_parallel(plan)
    image, per_token = options.get("image", False), options.get("per_token_time", False)
    inputs = wan_inputs(image=image, per_token_time=per_token)
    reference = wan(image=image)
    lift_casts(reference)
    expected = step(reference, inputs)

    model = wan(image=image)
    lift_casts(model)
    shardformer.shard(model, plan)
    if use_diffusers_checkpointing:
        model.enable_gradient_checkpointing()
    prediction, input_grad, grads = step(model, inputs)
    average(grads.values(), parallel_states.get_data_parallel_group(get_mixed_dp_pg=True))

    errors = {
        "output": relative_error(prediction, expected[0]),
        "input": relative_error(input_grad, expected[1]),
    }
    errors |= relative_errors(grads, expected[2])
    return max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("num_ranks", some([3, 1, 2, 4]))
@pytest.mark.parametrize(
    "options", [{}, {"per_token_time": True}, {"image": True}], ids=["text", "time per token", "image"]
)
def test_wan_matches_one_device(ranks, num_ranks, options):
    for name, error in ranks(num_ranks, compared, Plan(ulysses=num_ranks), options):
        assert error < RELATIVE[torch.float64], name


@pytest.mark.parametrize("plan", some(RINGS), ids=lambda plan: f"{plan.ring}x{plan.ulysses}")
@pytest.mark.parametrize("options", [{}, {"per_token_time": True}], ids=["text", "time per token"])
def test_wan_on_a_ring_matches_one_device(ranks, plan, options):
    for name, error in ranks(plan.world_size, compared, plan, options):
        assert error < RELATIVE[torch.float64], name


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    "plan", some([Plan(ulysses=2), *RINGS[::3]]), ids=lambda plan: f"{plan.ring}x{plan.ulysses}"
)
def test_wan_matches_one_device_with_checkpointing_and_offload(ranks, mode, plan):
    plan = plan.replace(checkpoint=mode, offload=1.0)
    for name, error in ranks(plan.world_size, compared, plan, {}):
        assert error < RELATIVE[torch.float64], name


@pytest.mark.parametrize(
    "plan", [Plan(ulysses=3), Plan(ring=3)], ids=lambda plan: f"{plan.ring}x{plan.ulysses}"
)
def test_wan_under_the_models_own_checkpointing(ranks, plan):
    for name, error in ranks(3, compared, plan, {}, True):
        assert error < RELATIVE[torch.float64], name


def identical(plan, other):
    """Gradients under two plans of the same mesh, compared bit for bit."""
    init_parallel(plan)
    found = []
    for this in (plan, other):
        GLOBAL_ACTIVATION_MANAGER.reset_counters()
        model = shardformer.shard(wan(torch.float32), this)
        prediction, input_grad, grads = step(model, wan_inputs(torch.float32))
        found.append([prediction, input_grad, *grads.values()])
        assert (GLOBAL_ACTIVATION_MANAGER.counters.moved > 0) == (this.offload != 0)
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    "plain", [Plan(), Plan(ulysses=2), Plan(ring=2)], ids=lambda plan: f"{plan.ring}x{plan.ulysses}"
)
def test_checkpointing_and_offload_are_bit_identical(ranks, mode, plain):
    assert all(ranks(plain.world_size, identical, plain, plain.replace(checkpoint=mode, offload=1.0)))


def hops_in_backward(mode):
    plan = Plan(ring=2, checkpoint=mode)
    init_parallel(plan)
    model = shardformer.shard(wan(torch.float32), plan)
    loss = model(**wan_inputs(torch.float32), return_dict=False)[0].square().mean()
    with counted() as sent:
        loss.backward()
    return sent.num_collectives


def test_selective_checkpointing_sends_no_keys_round_again(ranks):
    """Two blocks on two ranks: backward takes a hop of keys and one of their gradients; "full" a forward besides."""
    assert ranks(2, hops_in_backward, "selective") == [2 * 2] * 2
    assert ranks(2, hops_in_backward, "full") == [2 * 3] * 2


def two_sizes_in_flight(own_checkpointing):
    """Two microbatches of 75 and 74 tokens, both forward before either backward: rank 0 of 2 has 38 and 37."""
    plan = Plan(ulysses=2) if own_checkpointing else Plan(ulysses=2, checkpoint="full", offload=1.0)
    init_parallel(plan)
    sizes = [{"height": 6, "width": 10}, {"frames": 2, "height": 74, "width": 2}, {"frames": 1, "height": 2}]
    grads = []
    for sharded in (False, True):
        model = wan()
        lift_casts(model)
        if sharded:
            shardformer.shard(model, plan)
            if own_checkpointing:
                model.enable_gradient_checkpointing()
        model.rope.max_seq_len = 128
        outs = [
            model(**wan_inputs(**size), return_dict=False)[0].square().mean() for size in (sizes[0], sizes[2])
        ]
        sum(outs).backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    average(grads[1].values(), dist.group.WORLD)
    return max(relative_errors(grads[1], grads[0]).values())


@pytest.mark.parametrize("own_checkpointing", [False, True])
def test_microbatches_of_two_sizes_in_flight(ranks, own_checkpointing):
    assert max(ranks(2, two_sizes_in_flight, own_checkpointing)) < RELATIVE[torch.float64]


def sharded_parameters(plan):
    init_parallel(plan)
    data_rank = parallel_states.get_data_parallel_group().rank()
    inputs = wan_inputs(batch=2 * plan.data)
    reference = wan()
    lift_casts(reference)
    _, _, expected = step(reference, inputs)

    model = wan()
    lift_casts(model)
    shardformer.shard(model, plan)
    mine = {name: tensor[2 * data_rank : 2 * data_rank + 2] for name, tensor in inputs.items()}
    target = torch.randn(
        inputs["hidden_states"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    prediction = model(**mine, return_dict=False)[0]
    (prediction - target[2 * data_rank : 2 * data_rank + 2]).square().mean().backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return max(relative_errors(grads, expected).values())


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(ulysses=2, sharding="zero3"), marks=PROVE),
        Plan(dp_shard=2, ulysses=2, sharding="zero3", checkpoint="full", offload=1.0),
        Plan(dp_replicate=2, ulysses=2, sharding="zero2"),
        Plan(dp_replicate=2, dp_shard=2, sharding="zero3", checkpoint="selective"),
    ],
    ids=str,
)
def test_sharded_parameters_have_the_gradients_of_one_device(ranks, plan):
    assert max(ranks(plan.world_size, sharded_parameters, plan)) < RELATIVE[torch.float64]
