"""A traced step has the bytes of a real one: live ones on every rank, and those that are sent, by kind and axis."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common

from opensora_accel import Plan
from opensora_accel.observe.kinds import KINDS
from opensora_accel.planner import run
from opensora_accel.planner.estimate import Reference
from opensora_accel.planner.run import trace_step
from tests.planner.steps import really, small, wan
from tests.tiers import PROVE

# ---- against real ranks

ACTIVATIONS = (("none", 0.0), ("full", 0.0), ("full", 1.0), ("selective", 0.0), ("selective", 1.0))
WORLDS = [
    (1, {"sharding": "none"}),
    (1, {"sharding": "zero3"}),
    (2, {"sharding": "none", "ulysses": 2}),
    (2, {"sharding": "none", "dp_replicate": 2}),
    (2, {"sharding": "zero2", "ulysses": 2}),
    (2, {"sharding": "zero3", "dp_shard": 2}),
    (2, {"sharding": "zero3", "ring": 2, "prefetch": 0}),
]
OTHERS = [
    (4, {"dp_replicate": 2, "dp_shard": 2, "sharding": "zero3"}, {}),
    (4, {"dp_shard": 2, "ulysses": 2, "sharding": "zero3", "precision": "bf16", "checkpoint": "full"}, {}),
    (4, {"ring": 2, "ulysses": 2}, {}),
    (4, {"ulysses": 4, "two_level": "on", "ranks_per_node": 2}, {}),
    (2, {"ulysses": 2, "precision": "bf16", "checkpoint": "full"}, {}),
    (2, {"ulysses": 2, "overlap_ulysses": True}, {}),
    (2, {"dp_shard": 2, "sharding": "zero3", "reduce_dtype": "bf16", "gather_dtype": "int8"}, {}),
    (2, {"dp_shard": 2, "sharding": "zero3"}, {"accumulation": 2}),
    (2, {"dp_replicate": 2}, {"accumulation": 2}),
    (2, {"dp_replicate": 2, "precision": "fp64"}, {}),
    (
        2,
        {"dp_shard": 2, "sharding": "zero3", "mlp_chunks": 2, "checkpoint": "full"},
        {"fused_optimizer": True},
    ),
]
IN_MAKE_TEST = [("Wan", ("full", 1.0), 6)]


def matrix():
    for name, activations, world in itertools.product(
        ("Wan", "HunyuanVideo"), ACTIVATIONS, range(len(WORLDS))
    ):
        checkpoint, offload = activations
        num_ranks, degrees = WORLDS[world]
        is_in_both = (name, activations, world) in IN_MAKE_TEST
        plan = Plan(checkpoint=checkpoint, offload=offload, **degrees)
        yield pytest.param(
            *(num_ranks, plan, {"name": name}),
            (num_ranks - 1,) if is_in_both else {0, num_ranks - 1},
            marks=() if is_in_both else PROVE,
            id=f"{name}-{checkpoint}-{offload}-{world}",
        )
    for number, (num_ranks, degrees, options) in enumerate(OTHERS):
        traced = {0, num_ranks - 1}
        yield pytest.param(num_ranks, Plan(**degrees), options, traced, marks=PROVE, id=f"other-{number}")


@pytest.mark.parametrize(("num_ranks", "plan", "options", "traced"), [*matrix()])
def test_bytes_are_those_of_real_ranks(ranks, num_ranks, plan, options, traced):
    workload = small(**options)
    found = ranks(num_ranks, really, workload, plan)
    for rank in traced:
        trace = trace_step(workload, plan, rank=rank)
        # What an import makes in the first trace are some hundred bytes.
        assert trace.peak_bytes == pytest.approx(found[rank]["peak"], rel=0.01)
        if num_ranks == 1:
            assert abs(trace.peak_bytes - found[rank]["peak"]) <= 256
        # The arena begins entries at multiples of 64.
        assert 0 <= found[rank]["host"] - trace.host_bytes <= 64 * trace.num_blocks
        assert trace.communication() == found[rank]["communication"]


@pytest.mark.prove
def test_shards_on_the_host_are_no_device_memory(ranks):
    plan = Plan(dp_shard=2, sharding="zero3", cpu_offload=True)
    trace = trace_step(small(), plan)
    # On a CPU all of it is one memory, and the host has most when gradients of all blocks are there.
    (found, _) = ranks(2, really, small(), plan)
    most = trace.peak_bytes + trace.host_bytes
    assert most - trace.parameter_bytes <= found["peak"] <= most
    # Shards of the parameters, their gradients and two moments, and the optimizer's counts.
    assert trace.host_bytes == pytest.approx(4 * trace.parameter_bytes, rel=0.01)
    memory = Reference.of(small(), "fp32").memory(2.0, 1)
    assert memory.host_bytes(plan) == pytest.approx(trace.host_bytes, rel=0.01)
    assert memory.needs(plan) == pytest.approx(trace.peak_bytes, rel=0.1)
    copies = Counter(operation.kind for operation in trace.operations)
    # One for each gather, and one for each reduction.
    gathers = Counter(operation.collective for operation in trace.operations)
    assert (copies["copy_in"], copies["copy_out"]) == (gathers["all-gather"], gathers["reduce-scatter"])


# ---- what stands in it


@pytest.fixture(scope="module")
def trace():
    plan = Plan(ulysses=2, dp_shard=2, sharding="zero3", checkpoint="full", offload=1.0)
    return trace_step(small(layers=3, fused_optimizer=True), plan)


def test_operations_have_their_place_kind_and_sizes(trace):
    phases = [operation.phase for operation in trace.operations]
    assert phases[0] == "forward" and phases[-1] == "optimizer"
    blocks = [operation.block for operation in trace.operations if operation.phase == "recompute"]
    assert [block for block, _ in itertools.groupby(blocks)] == [2, 1, 0]
    # A rank has 38 of 75 tokens, 2 samples: 76 rows of 48 channels, to the MLP's 64.
    gemms = Counter(
        each.shape for each in trace.operations if each.kind == "gemm" and each.phase == "forward"
    )
    assert gemms[1, 76, 64, 48] == gemms[1, 76, 48, 64] == 3
    attention = [each for each in trace.operations if each.kind == "attention" and each.phase == "forward"]
    # Half of the heads over all tokens, and this rank's tokens over 7 of text.
    assert {each.shape for each in attention} == {(2, 2, 75, 75, 12), (2, 4, 38, 7, 12)}
    assert attention[0].flops == 2 * 2 * (2 * 2 * 75 * 75 * 12)
    mlp = next(each for each in trace.operations if each.shape == (1, 76, 64, 48))
    assert mlp.flops == 2 * 76 * 64 * 48 and mlp.num_bytes == 4 * (76 * 48 + 48 * 64 + 64 + 76 * 64)


def test_streams_wait_for_each_other(trace):
    operations = trace.operations
    last_of_stream = {}
    for number, operation in enumerate(operations):
        for before in operation.after:
            assert before < number and operations[before].stream != operation.stream
        if operation.collective == "all-to-all":
            # Nothing computes until the exchange is done.
            following = next(each for each in operations[number + 1 :] if each.stream == "compute")
            assert number in following.after
        if operation.kind == "collective" and "compute" in last_of_stream:
            assert last_of_stream["compute"] in operation.after or any(
                operation.stream == each.stream and last_of_stream["compute"] in each.after
                for each in operations[:number]
            )
        last_of_stream[operation.stream] = number
    gathered = [number for number, each in enumerate(operations) if each.stream == "gather"]
    # A block's weights are used while the next block's are on their way.
    reader = {before: number for number, each in enumerate(operations) for before in each.after}
    assert all(number in reader for number in gathered)
    assert any(reader[number] - number > 20 for number in gathered)
    copies_in = [number for number, each in enumerate(operations) if each.kind == "copy_in"]
    assert len(copies_in) == 2 and all(
        operations[reader[number]].phase in ("recompute", "backward") for number in copies_in
    )


@pytest.mark.parametrize(
    "plan, hooks", [(Plan(), 0), (Plan(dp_shard=2, sharding="zero3"), 3), (Plan(precision="bf16"), 3)]
)
def test_the_hooks_of_fsdp_go_through_each_parameter(plan, hooks):
    """Before a block's forward, and on both sides of its backward."""
    workload = small(layers=2)
    parameters = len(list(workload.model_fn().parameters()))
    assert sum(operation.hooked for operation in trace_step(workload, plan).operations) == hooks * parameters


def test_chunks_that_nobody_asks_for_change_nothing(monkeypatch):
    """FSDP2's own list of all ranks' chunks gives the same trace: also of rows that ranks do not share evenly."""
    workload, plan = small(layers=2), Plan(dp_shard=3, sharding="zero3", checkpoint="full")
    found = [trace_step(workload, plan, rank=rank) for rank in (0, 2)]
    monkeypatch.setattr(run, "_Chunks", _fsdp_common._chunk_with_empty)
    assert found == [trace_step(workload, plan, rank=rank) for rank in (0, 2)]


def test_a_message_of_the_ring_travels_under_the_attention_of_the_hop_before():
    operations = trace_step(small(layers=1), Plan(ring=3, sharding="zero3")).operations
    forward = [number for number, each in enumerate(operations) if each.phase == "forward"]
    first, second, third = [n for n in forward if operations[n].shape == (2, 4, 25, 25, 12)]
    one, other = [n for n in forward if operations[n].stream == "ring"]
    assert one < first < other < second < third
    # It begins with what was computed before, and only the next hop needs it.
    assert one not in operations[first].after and one in operations[second].after
    assert other not in operations[second].after and other in operations[third].after
    # K and V of 25 tokens, 2 samples, 48 channels, to the next rank.
    assert operations[one].num_bytes == 2 * 2 * 25 * 48 * 4 and operations[one].peer == 1


def test_kinds_add_up_and_a_step_ends_as_it_began(trace):
    assert set(trace.peak.bytes_by_kind) <= set(KINDS)
    assert trace.peak_bytes == max(state.device_bytes for state in trace.memory)
    assert trace.memory[0].device_bytes == trace.memory[-1].device_bytes
    kinds = trace.memory[0].bytes_by_kind
    assert kinds["parameters"] == trace.parameter_bytes
    # AdamW has two numbers for each parameter, and counts steps.
    assert 0 <= kinds["optimizer state"] - 2 * trace.parameter_bytes < 64 * 200
    assert trace.bytes_by_kind_at_peak["block inputs"] > 0 and trace.host_bytes > 0
    for state in trace.memory:
        assert sum(state.other_by_class.values()) == state.bytes_by_kind.get("other", 0)


def test_what_is_kept_without_checkpoints_is_told_by_the_operators_that_made_it():
    fewer, more = (trace_step(small(layers=layers), Plan()).peak.other_by_class for layers in (5, 7))
    gained = {name: (more[name] - fewer[name]) / 2 for name in more}
    # Of 75 tokens, 2 samples, 48 channels: what two attentions return, and their log-sum-exp of 4 heads.
    assert gained["attention"] == 2 * (2 * 75 * 48 * 4 + 2 * 75 * 4 * 4)
    # The MLP's hidden layer is a product's, and what the norms return is theirs.
    assert gained["matrix products"] > 2 * 75 * 48 * 4 and gained["norms"] >= 3 * 2 * 75 * 48 * 4
    assert gained["made before"] == 0


def test_a_step_with_copies_of_shards_ends_as_it_began():
    """What a simulated all-reduce has summed is let go of at the end, as by a real one."""
    plan = Plan(dp_replicate=2, dp_shard=2, sharding="zero3", checkpoint="full")
    memory = trace_step(small(), plan).memory
    assert memory[0].device_bytes == memory[-1].device_bytes


# ---- few blocks for many

FULL = [
    ({"dp_shard": 2, "sharding": "zero3", "prefetch": 0, "checkpoint": "full"}, {"layers": 5}),
    ({}, {"layers": 9}),
    ({"ulysses": 2}, {"layers": 12, "fused_optimizer": True}),
    ({"dp_replicate": 3}, {"layers": 12, "heads": 32, "head_dim": 32}),
    (
        {"dp_shard": 2, "ulysses": 2, "sharding": "zero3", "precision": "bf16", "checkpoint": "full"},
        {"layers": 12},
    ),
    ({"dp_shard": 2, "sharding": "zero3", "checkpoint": "full", "offload": 0.5}, {"layers": 16}),
    (
        {"ring": 2, "sharding": "zero3", "checkpoint": "selective", "offload": 1.0, "prefetch": 2},
        {"layers": 14},
    ),
    ({"ring": 2, "ulysses": 2, "checkpoint": "full", "offload": 1.0}, {"layers": 9}),
    ({"dp_shard": 4, "sharding": "zero2", "cpu_offload": True, "mlp_chunks": 2}, {"layers": 10}),
    (
        {"dp_replicate": 2, "dp_shard": 2, "sharding": "zero3", "prefetch": 0},
        {"layers": 9, "accumulation": 2},
    ),
    ({"ulysses": 2, "checkpoint": "full"}, {"name": "HunyuanVideo", "double": 7, "single": 9}),
    (
        {"dp_shard": 2, "sharding": "zero3", "checkpoint": "full", "offload": 0.7},
        {"name": "HunyuanVideo", "double": 11, "single": 16},
    ),
]


@pytest.mark.parametrize(
    ("degrees", "sizes"),
    [pytest.param(*case, marks=PROVE) for case in FULL],
)
def test_few_blocks_tell_what_all_do(monkeypatch, degrees, sizes):
    workload, plan = small(**sizes), Plan(**degrees)
    few = trace_step(workload, plan)
    monkeypatch.setattr(run, "_FEW", 1000)
    all_blocks = trace_step(workload, plan)
    assert few.operations == all_blocks.operations and few.peak_bytes == all_blocks.peak_bytes
    for field in ("num_blocks", "parameter_bytes", "trained_bytes", "largest_bytes", "host_bytes", "groups"):
        assert getattr(few, field) == getattr(all_blocks, field), field
    # Small temporaries of the optimizer may be freed one operation sooner or later.
    states = zip(few.memory, all_blocks.memory, strict=True)
    assert all(one.device_bytes == pytest.approx(other.device_bytes, rel=5e-3) for one, other in states)


@pytest.mark.prove
def test_blocks_of_which_every_second_one_is_larger_are_all_run():
    def model():
        made = wan(layers=8)
        for block in made.blocks[1::2]:
            block.ffn.net[0].proj = nn.Linear(48, 80)
            block.ffn.net[2] = nn.Linear(80, 48)
        return made

    trace = trace_step(replace(small(), model_fn=model), Plan(checkpoint="full"))
    assert trace.num_blocks == 8
    gemms = Counter(each.shape for each in trace.operations if each.phase == "forward")
    assert gemms[1, 150, 80, 48] == gemms[1, 150, 64, 48] == 4


# ---- what cannot be traced


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_of_the_world_is_refused(rank):
    with pytest.raises(ValueError, match=f"one of the plan's 4 ranks, from 0; got {rank}"):
        trace_step(small(), Plan(ulysses=4), rank=rank)


def test_a_plan_that_the_model_cannot_run_is_refused_as_in_training():
    with pytest.raises(ValueError, match="tp=2 needs a policy"):
        trace_step(small(), Plan(tp=2))
