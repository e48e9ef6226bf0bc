"""Sharded parameters beside what else their users do: compile blocks, train adapters, average weights, cut layers."""

import contextlib
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardformer
from opensora_accel import Plan, deferred_init, init_parallel, materialize, parallel_states
from opensora_accel.fsdp import set_last_microbatch
from opensora_accel.precision import lift_casts
from opensora_accel.training.optim import EMA, ShardwiseAdamW
from shardformer.tensor_parallel import full_tensor
from tests.fsdp.steps import clipped
from tests.tiers import PROVE, some
from tests.tolerances import RELATIVE, relative_errors
from tests.video_models import CASES

STEPS, MAX_NORM = 3, 0.1


def train(model, case, dtype, rows=slice(None)):
    """Norms of three steps of two microbatches each, clipped; what is trained, and its average."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = ShardwiseAdamW(trained.values(), lr=1e-3, weight_decay=0.1)
    ema, found = EMA(model, 0.9), {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro)
            inputs = {
                name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
                for name, value in case.inputs().items()
            }
            noisy = inputs[case.differentiated[0]]
            noisy.copy_(torch.randn(noisy.shape, dtype=torch.float64, generator=generator))
            set_last_microbatch(model, micro == 1)
            out = model(**{name: value[rows] for name, value in inputs.items()})
            out = out if isinstance(out, Tensor) else out[0]
            target = torch.randn((2, *out.shape[1:]), dtype=torch.float64, generator=generator)[rows]
            ((out.double() - target).square().mean() / 2).backward()
        found[f"norm {step}"] = torch.tensor(clipped(model, MAX_NORM), dtype=torch.float64)
        optimizer.step()
        ema.update()
    found |= {name: full_tensor(model, name, p.detach()) for name, p in trained.items()}
    return found | {f"average {name}": full_tensor(model, name, p) for name, p in ema.weights.items()}


def errors(name, make, plan, dtype, after_shard=lambda model: None):
    """Relative errors of norms, weights and averages, after a few steps, of one device's."""
    expected = train(materialize(make()), CASES[name], dtype)
    assert min(expected[f"norm {step}"] for step in range(STEPS)) > MAX_NORM  # each of them clips
    init_parallel(plan)
    group = parallel_states.get_data_parallel_group()
    model = shardformer.shard(make(), plan)
    after_shard(model)
    found = train(model, CASES[name], dtype, slice(group.rank(), None, group.size()))
    return relative_errors(found, expected)


def exact(name):
    model = CASES[name].make().double()
    lift_casts(model)
    return model


def trained_in_fp64(name, plan):
    return errors(name, partial(exact, name), plan, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("MMDiT", Plan(dp_shard=2, tp=2, sharding="FULL_SHARD", checkpoint="full", offload=1.0)),
        pytest.param(
            "MMDiT", Plan(ulysses=2, tp=2, sharding="SHARD_GRAD_OP", checkpoint="selective"), marks=PROVE
        ),
        pytest.param(
            "Wan",
            Plan(dp_shard=2, ulysses=2, sharding="FULL_SHARD", checkpoint="full", offload=1.0),
            marks=PROVE,
        ),
    ],
    ids=str,
)
def test_checkpoints_offload_averages_clipping_and_cut_layers(ranks, name, plan):
    for found in ranks(4, trained_in_fp64, name, plan):
        assert max(found.values()) < RELATIVE[torch.float64]


def compile_blocks(model):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in shardformer.blocks_of(model):
        block.compile(backend="aot_eager")


def compiled(dtype, plan):
    """Errors, the number of graphs, and why the compiler left them."""
    make = partial(exact, "Wan") if dtype == torch.float64 else CASES["Wan"].make
    found = errors("Wan", make, plan, dtype, compile_blocks)
    counters = torch._dynamo.utils.counters
    return found, counters["stats"]["unique_graphs"], list(counters["graph_break"])


@pytest.mark.prove
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_shard=2, sharding="FULL_SHARD", checkpoint="full"),
        Plan(ulysses=2, sharding="FULL_SHARD", checkpoint="full", offload=1.0),
    ],
    ids=str,
)
def test_compiled_blocks(ranks, dtype, plan):
    for found, num_graphs, breaks in ranks(2, compiled, dtype, plan):
        assert max(found.values()) < RELATIVE[dtype]
        # Gathers and checkpoints break no graph. What lifts casts to fp32 does, in fp64.
        assert num_graphs == 1 and breaks == [] if dtype == torch.float32 else num_graphs > 1


def with_adapters(dtype):
    """LoRA on some layers of a model that waits for its values, and all else frozen."""
    from peft import LoraConfig

    with deferred_init(5):
        model = CASES["Wan"].make().to(dtype).requires_grad_(False)
        # Not zero, as LoRA starts: half of the gradients would be.
        targets = ["to_q", "to_v", "proj_out", "net.2"]
        model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        model.to(dtype)
    assert all(parameter.is_meta for parameter in model.parameters())
    if dtype == torch.float64:
        lift_casts(model)
    return model


def adapted(dtype, plan):
    return errors("Wan", partial(with_adapters, dtype), plan, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", some([torch.float64, torch.float32]))
@pytest.mark.parametrize(
    "plan",
    some(
        [
            Plan(dp_shard=2, sharding="FULL_SHARD", checkpoint="full"),
            Plan(dp_replicate=2, ulysses=2, sharding="HYBRID_SHARD", cpu_offload=True),
        ]
    ),
    ids=str,
)
def test_adapters_on_a_frozen_model(ranks, dtype, plan):
    for found in ranks(plan.world_size, adapted, dtype, plan):
        # Norms, and two matrices of each of 11 layers, live and averaged.
        assert len(found) == STEPS + 2 * 22 and max(found.values()) < RELATIVE[dtype]


def stepped_by_an_old_optimizer(is_deferred, plan):
    """What an optimizer says that was made before `shard`, when it steps and when it clears gradients."""
    init_parallel(plan)
    case = CASES["Wan"]
    with deferred_init(0) if is_deferred else contextlib.nullcontext():
        model = case.make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = shardformer.shard(model, plan)
    loss = model(**case.inputs())[0].square().mean()
    loss.backward()
    told = []
    for use in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(
            ValueError, match=r"Make the optimizer after shard, from model\.parameters\(\)"
        ) as caught:
            use()
        told.append(str(caught.value))
    new = torch.optim.SGD(model.parameters(), 0.1)
    before = [full_tensor(model, name, p.detach()).clone() for name, p in model.named_parameters()]
    new.step()
    after = [full_tensor(model, name, p.detach()) for name, p in model.named_parameters()]
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return told


@pytest.mark.parametrize(
    ("is_deferred", "plan"),
    [(False, Plan(dp_shard=2, sharding="zero3")), (True, Plan(dp_shard=2, sharding="zero2")), (True, Plan())],
    ids=["zero3", "zero2 of a deferred model", "a deferred model"],
)
def test_an_optimizer_made_before_shard_is_refused(ranks, is_deferred, plan):
    for told in ranks(plan.world_size, stepped_by_an_old_optimizer, is_deferred, plan):
        assert all("it would train nothing" in each for each in told)


class SeenDTensors(TorchDispatchMode):
    """The operators that were given one, which the host takes apart."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def seen_in_a_step(make_optimizer):
    init_parallel(plan := Plan(dp_shard=2, sharding="zero3"))
    model = shardformer.shard(CASES["Wan"].make(), plan)
    optimizer, ema, told = make_optimizer(model.parameters(), lr=1e-3), EMA(model, 0.9), []
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with SeenDTensors() as step:
            optimizer.step()
        with SeenDTensors() as average:
            ema.update()
        told.append((step.seen, average.seen))
    parameter = next(model.parameters())
    return told, isinstance(optimizer.state[parameter]["exp_avg"], DTensor)


def test_a_step_of_the_optimizer_and_of_the_average_sees_shards(ranks):
    """Of what is made in the first one, moments of zeros, the second knows nothing. torch's own sees DTensors."""
    told, is_dtensor = ranks(2, seen_in_a_step, ShardwiseAdamW)[0]
    assert is_dtensor and set(told[0][0]) == {"aten.zeros_like.default"}
    assert told[1] == ([], []) and told[0][1] == []
    assert "aten.addcdiv_.default" in ranks(2, seen_in_a_step, torch.optim.AdamW)[0][0][1][0]
