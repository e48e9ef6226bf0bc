"""Ranks with a GPU each, over NCCL: `make gpus` runs this on a machine with 2 to 8, `make prove` the same over gloo."""

import dataclasses
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.fsdp import set_last_microbatch
from opensora_accel.profiler import profile
from opensora_accel.profiler.records import read_rank
from opensora_accel.training.loop import Trainer
from opensora_accel.verify.pool import RankError, RankPool
from tests.conftest import PRELOAD
from tests.fsdp.steps import batch, make_model
from tests.fsdp.test_exact import errors_of_training
from tests.shardformer.conformance import errors
from tests.tiers import CPUS_AND_GPUS
from tests.tolerances import RELATIVE
from tests.training.runs import tiny_config
from tests.training.test_faults import config_of, die_after, go_on
from tests.training.test_layouts import everything

NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.parametrize("node", CPUS_AND_GPUS, indirect=True)


class Node:
    """Ranks of one kind of device."""

    def __init__(self, device, pool):
        self.device, self.pool = device, pool

    def __call__(self, num_ranks, function, *args):
        if self.device == "cuda" and num_ranks > NUM_GPUS:
            pytest.skip(f"not {num_ranks} GPUs")
        return self.pool(num_ranks, function, *args)


@pytest.fixture(scope="module")
def node(request):
    device = request.param
    # A rank that was left alone is to end by itself, within the trainer's 20 s.
    options = {"device_type": device, "preload": PRELOAD, "grace_s": 60}
    with RankPool(4 if device == "cpu" else min(NUM_GPUS, 8), **options) as pool:
        yield Node(device, pool)


SPREAD = [
    Plan(ring=2),
    Plan(ulysses=2, checkpoint="full", offload=1.0),
    Plan(ring=2, ulysses=2),
    Plan(ulysses=4, two_level="on", ranks_per_node=2),
]
# What some models have.
OF_ONE = [("Wan", Plan(ulysses=2, overlap_ulysses=True)), ("MMDiT", Plan(tp=2))]
SHARDED = [
    Plan(dp_shard=2, sharding="zero3"),
    Plan(ulysses=2, sharding="zero2", prefetch=2),
    Plan(dp_shard=2, sharding="zero3", cpu_offload=True),
    Plan(dp_replicate=2, dp_shard=2, sharding="zero3", sharding_factor=2),
]


@pytest.mark.parametrize(
    ("name", "plan"),
    [*itertools.product(["Wan", "HunyuanVideo", "LTX-2", "CogVideoX", "MMDiT"], SPREAD), *OF_ONE],
    ids=str,
)
def test_a_spread_model_has_the_gradients_of_one_device(node, name, plan):
    for found in node(plan.world_size, errors, name, plan, False, node.device):
        assert max(found.values()) < RELATIVE[torch.float64], found


@pytest.mark.parametrize("plan", SHARDED, ids=str)
def test_sharded_training_is_that_of_one_device(node, plan):
    for error, norm_error in node(plan.world_size, errors_of_training, plan, 3, 0.1, node.device):
        assert max(error, norm_error) < RELATIVE[torch.float64]


def averaged(plan, device, num_steps):
    """The largest error of rounded averages over copies, in each of some steps, of those that are not rounded."""
    init_parallel(plan, device)
    group, found = parallel_states.get_data_parallel_group(), []
    models = [
        shardformer.shard(make_model(torch.float32).to(device), each)
        for each in (plan, plan.replace(reduce_dtype="same"))
    ]
    for step in range(num_steps):
        for micro in range(2):
            inputs, target = batch(step, micro, slice(group.rank(), None, group.size()), torch.float32)
            inputs = {name: value.to(device) for name, value in inputs.items()}
            for model in models:
                set_last_microbatch(model, micro == 1)
                (out,) = model(**inputs, return_dict=False)
                (out - target.to(device)).square().mean().backward()
                # Memory that was freed too early is written to.
                [torch.full((1 << size,), float("nan"), device=device) for size in range(6, 20)]
        rounded, exact = ([p.grad.to_local() for p in model.parameters()] for model in models)
        largest = max(grad.abs().max().item() for grad in exact if grad.numel())
        found.append(
            max((a - b).abs().max().item() for a, b in zip(rounded, exact, strict=True) if a.numel())
            / largest
        )
        for model in models:
            model.zero_grad()
    return found


def test_an_average_over_copies_is_whole_while_it_is_sent(node):
    plan = Plan(dp_replicate=2, dp_shard=2, sharding="zero3", sharding_factor=2, reduce_dtype="bf16")
    for found in node(4, averaged, plan, node.device, 10):
        assert len(found) == 10 and all(error < 0.02 for error in found), found


LATE_S = 0.3


def waited(device, folder):
    """What a rank waits, in each of two steps, where rank 1 comes later, and for an exchange beside other work."""
    init_parallel(Plan(dp_replicate=2), device)
    x, other = torch.ones(1 << 16, device=device), torch.ones(1 << 17, device=device)

    def step():
        time.sleep(LATE_S * dist.get_rank())
        dist.all_reduce(x)
        work = dist.all_gather_into_tensor(other, x, async_op=True)
        time.sleep(LATE_S)
        work.wait()

    step()
    with profile(nn.Linear(1, 1, device=device), None, folder, count_flops=False) as run:
        for _ in range(2):
            step()
            run.step()
    found = []
    for record in list(read_rank(folder / f"rank_{dist.get_rank():05d}.jsonl")[1]):
        assert [call.kind for call in record.calls] == ["all-reduce", "all-gather"]
        found.append([call.exposed_s for call in record.calls])
    return found


def test_the_profiler_says_who_waited(node, tmp_path):
    early, late = node(2, waited, node.device, tmp_path)
    for (first, _), (second, _) in zip(early, late, strict=True):
        assert first > 0.8 * LATE_S and second < 0.2 * LATE_S, (early, late)
    # The host came back to the second exchange when it was long done; on a GPU nobody waited for the host.
    assert all(gathered < 0.2 * LATE_S for _, gathered in early + late), (early, late)


def losses(config):
    trainer = Trainer(config)
    trainer.train()
    return everything(trainer)[0]


@pytest.mark.parametrize(
    "plan",
    [Plan(ring=2), Plan(ulysses=2, checkpoint="full", offload=1.0), Plan(dp_shard=2, sharding="zero3")],
    ids=str,
)
def test_the_trainer_learns_what_one_rank_learns(node, clips, tmp_path, plan):
    expected, found = (
        node(each.world_size or 1, losses, tiny_config(clips, tmp_path / str(number), each, steps=3))[0]
        for number, each in enumerate((Plan(), plan))
    )
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert (found[key].cpu() - tensor.cpu()).abs().max() < 1e-4, key


@pytest.mark.parametrize(("rank", "num_batches"), [(0, 6), (1, 7)])
def test_when_a_rank_is_killed_the_other_ends_and_the_run_goes_on(node, clips, tmp_path, rank, num_batches):
    config = config_of(clips, tmp_path / "run")
    with pytest.raises(RankError) as caught:
        node(2, die_after, config, rank, num_batches, 0.02)
    assert "hangs" not in str(caught.value), "the other rank waited for ever"
    assert f"rank {rank}" in str(caught.value)
    whole = dataclasses.replace(config, output=str(tmp_path / "whole"))
    for (start, found), (_, expected) in zip(node(2, go_on, config), node(2, go_on, whole), strict=True):
        assert start > 0
        assert all((found[key] - tensor).abs().max() < 1e-5 for key, tensor in expected.items())
