"""Gradients averaged in bf16 and weights gathered in int8 or fp8: within the bounds, beside one device."""

import collections
import copy
import math

import pytest
import torch

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.experiments.compressed import BLOCK, WIRE_DTYPES, dequantize, quantize
from opensora_accel.fsdp import forget_rounding, set_last_microbatch, shard_parameters
from opensora_accel.observe import CollectiveRecorder
from tests.fsdp.steps import batch, make_model, whole
from tests.tiers import some
from tests.tolerances import RELATIVE, relative_errors

U = 2.0**-8


def loss_of(model, rows, dtype=torch.float64):
    inputs, target = batch(0, 0, rows, dtype)
    (out,) = model(**inputs, return_dict=False)
    return (out.to(dtype) - target).square().mean()


def reduced(plan, steps):
    """Shares of the bounds that the first step's gradients, and the sum of several steps', take, by parameter."""
    # On one device: the gradient of every data rank alone.
    reference = make_model()
    own = []
    for rank in range(plan.data):
        reference.zero_grad()
        loss_of(reference, slice(rank, None, plan.data)).backward()
        own.append({name: p.grad.clone() for name, p in reference.named_parameters()})
    mean = {name: sum(each[name] for each in own) / plan.data for name in own[0]}
    sizes = {name: sum(each[name].abs() for each in own) / plan.data for name in own[0]}
    init_parallel(plan)
    group = parallel_states.get_data_parallel_group()
    model = shardformer.shard(make_model(), plan)
    total = dict.fromkeys(mean, 0)
    # Between copies what is sent and what comes back are rounded, each with a feedback of its own.
    num_roundings = 1 if plan.mixed == plan.num_shards else 2
    first = {}
    for step in range(steps):
        model.zero_grad()
        loss_of(model, slice(group.rank(), None, group.size())).backward()
        grads = whole(model, {name: p.grad for name, p in model.named_parameters()})
        for name, grad in grads.items():
            total[name] = total[name] + grad
            if step == 0:
                first[name] = share(grad - mean[name], U * num_roundings * (1 + U) * sizes[name])
    bound = U / (1 - U) * num_roundings * (1 + U) / (1 - U)
    every = {name: share(total[name] - steps * mean[name], bound * sizes[name]) for name in total}
    return max(first.values()), max(every.values())


def share(error, bound):
    # The step itself is exact to 1e-12 of its largest gradient.
    return (error.abs() / (bound + 1e-12 * bound.max() + 1e-15)).max().item()


REDUCED = {
    "reduce-scatter": Plan(dp_shard=2, sharding="FULL_SHARD", reduce_dtype="bf16"),
    "between whole copies": Plan(dp_replicate=2, sharding="zero3", sharding_factor=1, reduce_dtype="bf16"),
    "reduce-scatter, 4 ranks": Plan(dp_shard=4, sharding="SHARD_GRAD_OP", reduce_dtype="bf16"),
    "between copies of shards": Plan(
        dp_replicate=2, dp_shard=2, sharding="HYBRID_SHARD", reduce_dtype="bf16", prefetch=0
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(REDUCED, "between copies of shards"))
def test_gradients_are_within_the_bound_in_one_step_and_over_many(ranks, name):
    steps = 5
    for first, every in ranks(REDUCED[name].world_size, reduced, REDUCED[name], steps):
        assert 0.1 < first <= 1  # it is the rounding that is seen
        assert every <= 1


def accumulated(plan, is_skipped):
    """Gradients of two microbatches beside those of one device, and the kinds of collectives in each."""
    reference = make_model()
    for micro in range(2):
        inputs, target = batch(0, micro)
        (out,) = reference(**inputs, return_dict=False)
        (out - target).square().mean().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    init_parallel(plan)
    group = parallel_states.get_data_parallel_group()
    model = shardformer.shard(make_model(), plan)
    kinds = []

    def backward(micro, is_last):
        inputs, target = batch(0, micro, slice(group.rank(), None, group.size()))
        set_last_microbatch(model, is_last)
        with CollectiveRecorder() as recorder:
            (out,) = model(**inputs, return_dict=False)
            (out - target).square().mean().backward()
        kinds.append({call.kind for call in recorder.calls if call.dtype == "bfloat16"})

    if is_skipped:
        # A step that ends before its last microbatch, and is forgotten.
        backward(1, False)
        model.zero_grad()
        forget_rounding(model)
        kinds.clear()
    backward(0, False)
    backward(1, True)
    found = whole(model, {name: p.grad for name, p in model.named_parameters()})
    return max(relative_errors(found, expected).values()), kinds


@pytest.mark.parametrize("is_skipped", [False, True])
def test_copies_are_averaged_once_a_step(ranks, is_skipped):
    plan = Plan(dp_replicate=2, sharding="zero3", sharding_factor=1, reduce_dtype="bf16")
    for error, kinds in ranks(2, accumulated, plan, is_skipped):
        assert error < 4 * 2 * U  # of the largest element, where parts of both ranks cancel to a quarter
        assert kinds == [set(), {"all-to-all", "all-gather"}]


def gathered(plan, dtype):
    """Errors of gradients beside one device's that has the weights as they were gathered; of weights; and bytes."""
    init_parallel(plan)
    group = parallel_states.get_data_parallel_group()
    model = shardformer.shard(make_model(dtype), plan)
    wire = WIRE_DTYPES[plan.gather_dtype]
    travelled = {}
    # Of each block, and of what the model holds itself: bytes as they are, and the number of blocks.
    parts = collections.defaultdict(lambda: [0, 0])
    for name, parameter in model.named_parameters():
        copied = parameter.detach().clone()
        local = copied._local_tensor
        padded_rows = math.ceil(parameter.size(0) / plan.num_shards)
        numel = (
            local.numel() if local.shape[1:] != parameter.shape[1:] else padded_rows * parameter[0].numel()
        )
        if parameter.dim() > 1:
            blocks = torch.nn.functional.pad(local.flatten(), (0, -local.numel() % BLOCK)).view(-1, BLOCK)
            back = dequantize(*quantize(blocks, wire), dtype).flatten()[: local.numel()]
            local.copy_(back.view(local.shape))
            parts[unit_of(name)][1] += math.ceil(numel / BLOCK)
        else:
            parts[unit_of(name)][0] += numel * dtype.itemsize
        travelled[name] = copied
    travelled = whole(model, travelled)
    reference = make_model(dtype)
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(travelled[name])
    loss_of(reference, slice(None), dtype).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    with CollectiveRecorder() as recorder:
        loss_of(model, slice(group.rank(), None, group.size()), dtype).backward()
    found = whole(model, {name: p.grad for name, p in model.named_parameters()})
    masters = whole(model, dict(model.named_parameters()))
    assert all(
        torch.equal(masters[name], before[name]) for name in before
    )  # the optimizer's stay as they are
    moved = {name: (travelled[name] - before[name]).norm() / before[name].norm() for name in before}
    messages = [
        call.input_bytes for call in recorder.calls if call.kind == "all-gather" and call.dtype == "uint8"
    ]
    # Each part of a message is filled up to a multiple of 16 bytes.
    expected_bytes = sum(
        16 * math.ceil(exact / 16) + BLOCK * num_blocks + 16 * math.ceil(4 * num_blocks / 16)
        for exact, num_blocks in parts.values()
    )
    expected_bytes *= 2 if plan.sharding == "zero3" else 1
    assert sum(messages) == expected_bytes
    return max(relative_errors(found, expected).values()), max(moved.values()).item()


def unit_of(name):
    return ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""


@pytest.mark.parametrize(
    "plan",
    some(
        [
            Plan(dp_shard=2, sharding="FULL_SHARD", gather_dtype="int8"),
            Plan(ulysses=2, sharding="SHARD_GRAD_OP", gather_dtype="fp8"),
            Plan(ring=2, ulysses=2, sharding="FULL_SHARD", gather_dtype="int8"),
            Plan(ulysses=2, dp_replicate=2, sharding="HYBRID_SHARD", gather_dtype="fp8", prefetch=0),
            Plan(dp_shard=4, sharding="FULL_SHARD", gather_dtype="int8", checkpoint="full", offload=1.0),
            Plan(dp_shard=2, sharding="zero3", gather_dtype="int8", cpu_offload=True),
        ]
    ),
    ids=str,
)
def test_gathered_weights_are_those_of_blocks_and_so_are_gradients(ranks, plan):
    for error, moved in ranks(plan.world_size, gathered, plan, torch.float64):
        assert error < RELATIVE[torch.float64]
        assert 1e-3 < moved < (0.02 if plan.gather_dtype == "int8" else 0.05)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reduce_dtype": "bf16", "dp_replicate": 2}, 'set sharding="zero3", with sharding_factor=1'),
        ({"reduce_dtype": "bf16", "sharding": "zero3"}, "over several ranks"),
        ({"reduce_dtype": "fp8"}, "reduce_dtype must be one of same, bf16; got 'fp8'"),
        ({"gather_dtype": "int8", "ulysses": 2}, "set sharding to zero3 (or zero2)"),
        ({"gather_dtype": "int8", "dp_replicate": 2, "sharding": "zero3"}, "has them whole"),
        ({"gather_dtype": "int4"}, "gather_dtype must be one of same, int8, fp8; got 'int4'"),
    ],
)
def test_what_cannot_be_compressed_is_refused(fields, message):
    with pytest.raises(ValueError) as caught:
        Plan(**fields)
    assert message in str(caught.value)


def refuse_mixed_dtypes():
    plan = Plan(sharding="zero3", dp_shard=2, gather_dtype="int8")
    init_parallel(plan)
    model = make_model(torch.float32)
    model.blocks[0].ffn.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"are bfloat16, float32; call model.float\(\)"):
        shardformer.shard(model, plan)


def test_weights_of_several_dtypes_are_not_compressed(ranks):
    ranks(2, refuse_mixed_dtypes)


class Branches(torch.nn.Module):
    """Two layers of one size, of which a step uses both or one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(6, 6, bias=False) for _ in range(2))

    def forward(self, x, uses):
        return sum(getattr(self, name)(x) for name in uses)


def unused_now_and_then():
    """Largest shares of the bounds of single steps, in which layers take turns to have no gradient."""
    plan = Plan(dp_shard=2, sharding="zero3", reduce_dtype="bf16")
    init_parallel(plan)
    group = parallel_states.get_data_parallel_group()
    torch.manual_seed(0)
    reference = Branches().double()
    model = shard_parameters(copy.deepcopy(reference), plan, [])
    found = []
    for step, uses in enumerate(
        (["first", "second"], ["first"], ["second"], ["second"], ["first", "second"])
    ):
        sizes, mean = {}, {}
        for rank in range(2):
            x = torch.randn(
                3, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64
            )
            reference.zero_grad()
            # Steps with one layer have gradients a thousand times as large: left over, their rounding would show.
            scale = 1000 if len(uses) == 1 else 1
            (scale * reference(x, uses).square().sum()).backward()
            for name in uses:
                gradient = getattr(reference, name).weight.grad
                mean[name] = mean.get(name, 0) + gradient / 2
                sizes[name] = sizes.get(name, 0) + gradient.abs() / 2
            if rank == group.rank():
                model.zero_grad()
                (scale * model(x, uses).square().sum()).backward()
        for name in uses:
            actual = getattr(model, name).weight.grad.full_tensor()
            # The step before one with both layers had one: what it left out is of no use.
            found.append(share(actual - mean[name], U * (1 + U) * sizes[name]))
    return max(found)


def test_layers_without_a_gradient_leave_nothing_for_others(ranks):
    assert max(ranks(2, unused_now_and_then)) <= 1
