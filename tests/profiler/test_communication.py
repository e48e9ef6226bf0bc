"""Every collective of a step: as many and as large as the verifier's recorder sees, with times that hold together."""

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.observe import CollectiveRecorder
from opensora_accel.profiler import profile
from opensora_accel.profiler.records import read_rank
from tests.tiers import PROVE
from tests.video_models import CASES

PLANS = [
    Plan(ulysses=2),
    Plan(ring=2, checkpoint="full"),
    pytest.param(Plan(dp_shard=2, sharding="zero3", checkpoint="full"), marks=PROVE),
    pytest.param(Plan(ulysses=2, sharding="zero2"), marks=PROVE),
    pytest.param(Plan(ulysses=2, overlap_ulysses=True), marks=PROVE),
    pytest.param(Plan(dp_replicate=2, ulysses=2, checkpoint="selective", offload=1.0), marks=PROVE),
    pytest.param(Plan(ring=2, ulysses=2, sharding="zero3"), marks=PROVE),
]


def sent(plan, folder):
    """By kind: calls and bytes of a step, as the profiler and as the verifier's recorder sees them."""
    init_parallel(plan)
    case = CASES["Wan"]
    model = shardformer.shard(case.make(), plan)
    wrapped = DistributedDataParallel(model) if plan.sharding == "none" else model

    def step():
        wrapped(**case.inputs(), return_dict=False)[0].square().mean().backward()

    for _ in range(3):  # the first ones send more: DDP arranges its buckets, and ranks compare their inputs
        step()
    with CollectiveRecorder() as recorded:
        step()
    with profile(model, plan, folder) as run:
        step()
        run.step()
    rank = dist.get_rank()
    (record,) = read_rank(folder / f"rank_{rank:05d}.jsonl")[1]
    counts = [Counter(), Counter()]
    for counter, calls in zip(counts, (recorded.calls, record.calls), strict=True):
        for call in calls:
            counter[call.kind, "calls"] += 1
            counter[call.kind, "bytes"] += call.sent_bytes
    for call in record.calls:
        assert sum(call.sent_to.values()) == call.sent_bytes and rank not in call.sent_to
        assert record.start_s <= call.start_s <= call.end_s <= record.end_s + 1
        assert 0 <= call.exposed_s <= record.seconds
    return dict(counts[0]), dict(counts[1]), {call.axis for call in record.calls}


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_calls_and_bytes_are_those_of_the_verifiers_recorder(ranks, tmp_path, plan):
    for expected, found, axes in ranks(plan.world_size, sent, plan, tmp_path):
        assert found == expected and expected
        assert axes & {"ulysses", "ring", "dp_shard", "sequence", "mixed"}


@PROVE
def test_the_levels_of_a_group_have_its_name(ranks, tmp_path):
    plan = Plan(ulysses=4, two_level="on", ranks_per_node=2)
    for expected, found, axes in ranks(4, sent, plan, tmp_path):
        assert found == expected
        assert axes >= {"ulysses within a node", "ulysses between nodes"}
        assert not [axis for axis in axes if axis.startswith("ranks ")]


def compiled(plan, folder):
    init_parallel(plan)
    case = CASES["Wan"]
    model = shardformer.shard(case.make(), plan)
    for block in shardformer.blocks_of(model):
        block.compile(backend="aot_eager")
    found = []
    for _ in range(2):  # the first forward is not compiled
        model(**case.inputs(), return_dict=False)[0].square().mean().backward()
    with profile(model, plan, folder) as run:
        for _ in range(2):
            model(**case.inputs(), return_dict=False)[0].square().mean().backward()
            run.step()
    # The first compiles anew, for the hooks; what the compiler runs meanwhile is not seen.
    for step in list(read_rank(folder / f"rank_{dist.get_rank():05d}.jsonl")[1])[1:]:
        calls = [call for call in step.calls if call.kind == "all-to-all"]
        found.append(
            (len(calls), sum(call.sent_bytes for call in calls), min(call.exposed_s for call in calls))
        )
    return found


@PROVE
def test_collectives_of_a_compiled_graph(ranks, tmp_path):
    (uncompiled, _, _) = zip(*ranks(2, sent, Plan(ulysses=2), tmp_path / "plain"), strict=True)
    for rank, found in enumerate(ranks(2, compiled, Plan(ulysses=2), tmp_path)):
        for num_calls, num_bytes, exposed_s in found:
            assert num_calls == uncompiled[rank]["all-to-all", "calls"] and exposed_s > 0
            assert num_bytes == uncompiled[rank]["all-to-all", "bytes"]


def late(folder):
    """Rank 1 comes 0.3 s late to a collective that rank 0 waits for at once, and to one that it has time for."""
    init_parallel(Plan(dp_replicate=2))
    model, rank, tensor = torch.nn.Linear(1, 1), dist.get_rank(), torch.ones(1000)
    with profile(model, folder=folder) as run:
        dist.barrier()
        time.sleep(0.3 * rank)
        dist.all_reduce(tensor)
        run.step()
        dist.barrier()
        time.sleep(0.2 * rank)
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(0.4 * (1 - rank))
        work.wait()
        run.step()
    waited, hidden = (
        next(call for call in step.calls if call.kind == "all-reduce")
        for step in read_rank(folder / f"rank_{rank:05d}.jsonl")[1]
    )
    return waited, hidden


def test_what_is_waited_for_is_exposed_and_what_lies_beside_other_work_is_not(ranks, tmp_path):
    (waited, hidden), _ = ranks(2, late, tmp_path)
    assert 0.2 < waited.exposed_s < 0.4 and 0.2 < waited.end_s - waited.start_s < 0.4
    assert hidden.exposed_s < 0.1 < 0.15 < hidden.end_s - hidden.start_s < 0.35
