"""Blocks whose parameters FSDP2 shards: offload changes no bit of their gradients."""

import gc

import pytest
import torch

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER
from opensora_accel.offload import OffloadEngine
from tests.models import wan, wan_inputs
from tests.offload.devices import LateQueues
from tests.tiers import some


@pytest.fixture(autouse=True)
def device():
    """The ranks of the pool have managers of their own."""


def gradients(plan):
    model = shardformer.shard(wan(torch.float32, layers=4), plan)
    rank = parallel_states.get_data_parallel_group().rank()
    inputs = wan_inputs(torch.float32)
    inputs = {name: tensor[rank : rank + 1] for name, tensor in inputs.items()}
    model(**inputs, return_dict=False)[0].square().mean().backward()
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def sharded_step(mode, sharding):
    plan = Plan(dp_shard=2, sharding=sharding, checkpoint=mode)
    init_parallel(plan)
    try:
        expected = gradients(plan)
        with MANAGER.show(OffloadEngine(LateQueues)) as engine:
            engine.setup_arena(1 << 22)
            found = gradients(plan.replace(offload=1.0))
        gc.collect()
        counters = engine.counters
        assert counters.in_use_bytes == 0
        return all(map(torch.equal, found, expected)), counters.moved, counters.prefetched, counters.overflows
    finally:
        parallel_states.reset()


@pytest.mark.parametrize("sharding", some(["zero3", "zero2"]))
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_offload_under_fsdp2_changes_no_bit(ranks, mode, sharding):
    moved = 3 * (3 if mode == "selective" else 1)
    assert ranks(2, sharded_step, mode, sharding) == [(True, moved, 3, 0)] * 2
