"""A step recorded at the true world size is what real ranks call, costs nothing, and leaves nothing behind."""

import dataclasses
import json
import os
import re
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.nn.parallel import DistributedDataParallel

from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.communications import all_to_all
from opensora_accel.observe import CollectiveRecorder
from opensora_accel.observe.fakes import FakeFloats, LazyChunks
from opensora_accel.observe.meshes import MeshShape, Run
from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER, OffloadEngine
from opensora_accel.verify.communication.promise import broken_promises
from opensora_accel.verify.communication.record_step import record_step
from tests.tiers import some
from tests.verify import loops
from tests.verify.communication.recorded_steps import Attending, attending_step, tiny_wan, wan_step

PLANS = [
    Plan(ulysses=3),
    Plan(ring=3),
    Plan(dp_replicate=2, ulysses=2, checkpoint="full"),
    Plan(ring=2, ulysses=2, checkpoint="selective", offload=1.0),
    Plan(dp_shard=2, ulysses=2, sharding="zero3", checkpoint="full", offload=1.0),
    Plan(dp_replicate=2, dp_shard=2, sharding="zero2", checkpoint="selective"),
]


def short(plan):
    return " ".join(
        f"{field}={value}" for field, value in plan.to_dict().items() if value != getattr(Plan, field)
    )


def really_called(plan):
    model = tiny_wan()
    shape = MeshShape.of(plan)
    run = Run(shape, dist.get_rank(), shape.data_rank(dist.get_rank()), shape.data_size)
    with CollectiveRecorder(dict(model.named_parameters())) as recorder:
        wan_step(model, run)
    return recorder.calls


def without_lines(calls):
    """The line that called the step differs."""
    return [dataclasses.replace(call, where=call.where.via) for call in calls]


@pytest.mark.parametrize("plan", some(PLANS, *PLANS[::3]), ids=short)
def test_the_record_is_what_real_ranks_call(ranks, plan):
    last = plan.world_size - 1
    (rank,) = record_step(wan_step, tiny_wan, plan, ranks=last).ranks
    assert without_lines(rank.calls) == without_lines(ranks(plan.world_size, really_called, plan)[last])


@pytest.mark.parametrize(
    "plan",
    some(
        [
            Plan(dp_shard=256, ring=2, ulysses=2, sharding="zero3"),
            Plan(dp_replicate=512, ulysses=2),
            Plan(dp_replicate=256, ring=4),
            Plan(dp_replicate=128, ring=4, ulysses=2, checkpoint="full"),
            Plan(dp_replicate=4, dp_shard=64, ulysses=4, sharding="zero2"),
        ]
    ),
    ids=short,
)
def test_1024_ranks_in_one_process(plan):
    assert plan.world_size == 1024
    start = time.perf_counter()
    record = record_step(wan_step, tiny_wan, plan, ranks=1023)
    assert time.perf_counter() - start < 30  # takes 1 to 3
    (rank,) = record.ranks
    assert rank.num_backwards == 1
    assert max(len(call.group) for call in rank.calls) == (256 if plan.dp_replicate == 4 else 1024)
    kinds = {call.kind for call in rank.calls}
    assert ("send" in kinds) == (plan.ring > 1) and ("reduce-scatter" in kinds) == (plan.sharding != "none")


class Huge(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2**17, 2**17, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def huge_step(model, run):
    model = (
        DistributedDataParallel(model) if run.mesh["fsdp"].size() == 1 else fully_shard(model, mesh=run.mesh)
    )
    model(torch.randn(1024, 2**17)).sum().backward()


@pytest.mark.parametrize("degree", [1, 8])
def test_a_model_of_256_gib_takes_no_memory(degree):
    record = record_step(huge_step, Huge, {"dp": 8 // degree, "fsdp": degree} if degree == 1 else {"fsdp": 8})
    reduced = [call for call in record.ranks[0].calls if call.kind in ("all-reduce", "reduce-scatter")]
    assert sum(call.input_bytes for call in reduced) == 2**38


def test_real_tensors_call_the_same():
    plan = Plan(ring=2, ulysses=2, checkpoint="selective")
    records = [record_step(wan_step, tiny_wan, plan, ranks=3, fake_tensors=fake) for fake in (True, False)]
    assert [without_lines(rank.calls) for rank in records[0].ranks] == [
        without_lines(rank.calls) for rank in records[1].ranks
    ]


@pytest.mark.parametrize("mask", [None, (1, 1, 1, 9), (2, 3, 7, 9)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_takes_the_kernel_that_it_takes_on_real_tensors(mask, dropout):
    def choice():
        q, k, v = torch.zeros(2, 3, 7, 8), torch.zeros(2, 3, 9, 8), torch.zeros(2, 3, 9, 8)
        bias = None if mask is None else torch.zeros(mask)
        return torch._fused_sdp_choice(q, k, v, bias, dropout)

    with FakeFloats():
        fake = choice()
    assert fake == choice() and (fake > 0) == (dropout == 0)


def test_whole_numbers_stay_numbers():
    with FakeFloats():
        made = torch.full((2,), 8), torch.arange(3), torch.tensor([4]), torch.full((1,), 1) * 2
        assert [numbers.tolist() for numbers in made] == [[8, 8], [0, 1, 2], [4], [2]]
        assert isinstance(torch.full((2,), 8.0), FakeTensor)


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16])
def test_chunks_are_those_of_fsdp2(rows):
    tensor = torch.arange(2.0 * rows).view(rows, 2)
    ours = LazyChunks(tensor, 8, 0)
    for index, chunk in enumerate(_chunk_with_empty(tensor, 8, 0)):
        assert torch.equal(ours[index], chunk)


# ---- what it leaves behind


def failing_step(model, run):
    wan_step(model, run)
    raise KeyError("mine")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(parallel_registry, fails):
    state = torch.get_rng_state()
    plan = Plan(dp_shard=2, ulysses=2, sharding="zero3", checkpoint="full", offload=1.0)
    with GLOBAL_ACTIVATION_MANAGER.show(OffloadEngine()) as mine:
        mine.setup_arena(1 << 16)
        with pytest.raises(KeyError, match="mine") if fails else nullcontext():
            record_step(failing_step if fails else wan_step, tiny_wan, plan)
        assert GLOBAL_ACTIVATION_MANAGER.engine is mine
        assert mine.enable and mine.counters.moved == 0 and mine.slot_bytes == 0
    assert not dist.is_initialized()
    assert parallel_states.get_sequence_parallel_group() is None
    with pytest.raises(ValueError, match="no mesh"):
        parallel_states.get_mesh()
    assert torch.equal(torch.get_rng_state(), state)
    assert type(torch.ones(2) + 1) is torch.Tensor


def test_every_rank_draws_the_same():
    drawn = []

    def step(model, run):
        drawn.append(torch.randint(1 << 30, ()).item())

    record_step(step, lambda: nn.Linear(2, 2), {"dp": 4}, ranks=[0, 3])
    assert len(set(drawn)) == 1


# ---- what it refuses


def test_an_initialised_process_group_is_refused(parallel_registry):
    init_parallel(Plan(), "cpu")
    with pytest.raises(
        ValueError, match=r"process group of 1 ranks \(gloo\) is initialised.*in a process of its own"
    ):
        record_step(wan_step, tiny_wan, Plan(ulysses=2))
    assert dist.get_world_size() == 1


@pytest.mark.parametrize("wanted", [4, -1, [0, 0], []])
def test_ranks_outside_of_the_mesh_are_refused(wanted):
    with pytest.raises(ValueError, match=r"from 0 to 3 \(ring=2 × ulysses=2\)"):
        record_step(wan_step, tiny_wan, Plan(ring=2, ulysses=2), ranks=wanted)


@pytest.mark.parametrize("read", [lambda t: t.item(), lambda t: t.numpy(), lambda t: bool(t > 0)])
def test_a_step_that_reads_values_needs_real_tensors(read):
    def step(model, run):
        read(model(torch.ones(1, 2)).sum().detach())
        dist.barrier()

    with pytest.raises(
        ValueError,
        match=r"keep \.item\(\) and \.numpy\(\) out of it \(return the tensor itself\), or, in Python, call "
        r"record_step\(\.\.\., fake_tensors=False\)",
    ):
        record_step(step, lambda: nn.Linear(2, 2), {"dp": 4})
    record = record_step(step, lambda: nn.Linear(2, 2), {"dp": 4}, fake_tensors=False)
    assert [call.kind for call in record.ranks[0].calls] == ["barrier"]


def test_errors_of_the_step_pass_through():
    def step(model, run):
        model(torch.ones(1, 3))

    with pytest.raises(RuntimeError, match="reduction dim"):
        record_step(step, lambda: nn.Linear(2, 2), {"dp": 4})


# ---- where the step finds itself


def test_the_step_finds_the_environment_of_a_launcher():
    found = []

    def step(model, run):
        found.append([os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")])

    before = dict(os.environ)
    record_step(step, lambda: nn.Linear(2, 2), {"dp": 4}, ranks=[0, 3])
    assert found == [["0", "0", "4", "4"], ["3", "3", "4", "4"]]
    assert dict(os.environ) == before


@pytest.fixture
def doubles():
    """What these models and their inputs are made of."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_ulysses_of_diffusers_is_recorded(doubles):
    mesh = {"data": 2, "ring": 1, "ulysses": 2}
    record = record_step(loops.diffusers_ulysses_under_fsdp2, loops.wan_of_4_heads, mesh, ranks=[0, 3])
    assert broken_promises(record) == []
    for rank in record.ranks:
        exchanges = [call for call in rank.calls if call.kind == "all-to-all"]
        assert {call.group for call in exchanges} == {(0, 1) if rank.rank == 0 else (2, 3)}
        assert {call.phase for call in exchanges} == {"forward", "backward"}


def test_the_ring_of_diffusers_is_recorded(doubles):
    record = record_step(loops.diffusers_ring, loops.wan_of_4_heads, {"ring": 3}, ranks=[0, 2])
    assert broken_promises(record) == []
    assert {call.phase for call in record.ranks[0].calls} == {"forward", "backward", "after backward"}


def hsdp_step(model, run):
    """Clipping and the optimizer work on DTensors, whose groups torch remembers by name."""
    fully_shard(model, mesh=run.mesh["dp_replicate", "dp_shard"])
    model(torch.ones(2, 6)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters()).step()


def test_groups_of_the_rank_before_are_forgotten():
    plan = Plan(dp_replicate=2, dp_shard=4, sharding="zero3")
    record = record_step(hsdp_step, lambda: nn.Linear(6, 8), plan, ranks=[0, 1, 7])
    places = [{call.group for call in rank.calls if call.is_by_fsdp} for rank in record.ranks]
    assert places == [{(0, 1, 2, 3), (0, 4)}, {(0, 1, 2, 3), (1, 5)}, {(4, 5, 6, 7), (3, 7)}]


# ---- what it says


def test_the_table_names_groups_by_their_axes():
    plan = Plan(dp_replicate=2, ring=2, ulysses=2)
    record = record_step(attending_step, Attending, plan, ranks=[0, 7])
    lines = record.table().splitlines()
    assert (
        lines[0]
        == "dp_replicate=2 × ring=2 × ulysses=2, 8 ranks; calls and bytes of the busiest of ranks 0, 7"
    )
    cells = [re.split(r"  +", line, maxsplit=5) for line in lines[1:]]
    assert cells[0] == ["phase", "collective", "over", "calls", "sent bytes", "source"]
    over = {(phase, kind): (group, calls) for phase, kind, group, calls, *_ in cells[1:]}
    # A row for each line of source: q, k and v leave by one and the output by another.
    there_and_back = [cell[2:4] for cell in cells if cell[:2] == ["forward", "all-to-all"]]
    assert there_and_back == [["ulysses", "1"], ["ulysses", "1"]]
    assert over["forward", "send"] == ("ring", "1")
    assert over["backward", "send"] == ("ring", "2")
    assert over["forward", "all-gather"] == ("sequence (ring × ulysses)", "1")
    assert over["after backward", "all-reduce"] == ("mixed (dp_replicate × ring × ulysses)", "4")
    row = next(cell for cell in cells if cell[1] == "all-reduce")
    assert row[4] == "7,616"  # 2 · 7/8 of 1,088 · 4 bytes
    assert row[5].endswith("recorded_steps.py:" + row[5].split(":")[1]) and " in average" in row[5]


def test_the_record_as_json():
    record = record_step(attending_step, Attending, Plan(ulysses=2), ranks=[1])
    values = json.loads(json.dumps(record.to_dict()))
    assert values["world_size"] == 2 and values["plan"]["ulysses"] == 2
    (rank,) = values["ranks"]
    assert rank["sent_bytes"] == sum(call["sent_bytes"] for call in rank["calls"]) > 0
    first = next(call for call in rank["calls"] if call["kind"] == "all-to-all")
    assert first["over"] == "ulysses" and first["source"].startswith(
        "opensora_accel/communications/alltoall.py"
    )
    assert first["group"] == [0, 1] and first["phase"] == "forward"


def exchanging_step(model, run):
    rows = 3 + run.rank % 2
    all_to_all(all_to_all(torch.ones(rows, 4), None, 1, 0), None, 0, 1)


def really_exchanged():
    with CollectiveRecorder() as recorder:
        exchanging_step(None, Run(MeshShape.of({"sequence": 3}), dist.get_rank(), 0, 1))
    return recorder.calls


def test_sizes_that_recorded_ranks_tell_each_other_are_known(ranks):
    record = record_step(exchanging_step, lambda: nn.Linear(2, 2), {"sequence": 3}, ranks=[0, 1, 2])
    assert not record.notes and not broken_promises(record)
    for rank, calls in zip(record.ranks, ranks(3, really_exchanged), strict=True):
        assert without_lines(rank.calls) == without_lines(calls)


def test_sizes_that_others_would_tell_are_said_to_be_unknown():
    (note,) = record_step(exchanging_step, lambda: nn.Linear(2, 2), {"sequence": 3}, ranks=[0, 1]).notes
    assert "those that were not recorded are taken to say what the one that asks does" in note
