"""No step has a race on a GPU's streams, by their stand-in, which sees it when any one order is taken away.

The orders of the offload engine are taken away in `tests/offload/test_races.py`, each in its turn.
"""

import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.communications import ring_exchange
from opensora_accel.experiments import overlap
from opensora_accel.fsdp import set_last_microbatch
from opensora_accel.offload import OffloadEngine
from opensora_accel.offload.device import CudaQueues
from opensora_accel.precision import lift_casts
from opensora_accel.training.loop import Trainer
from opensora_accel.watching import watch
from tests.fsdp.steps import batch
from tests.models import wan
from tests.offload.scenarios import engine
from tests.stand_in_streams import Schedule, Stream, stream
from tests.tiers import PROVE, some
from tests.training.runs import tiny_config

FSDP = Plan(dp_shard=2, sharding="zero3")
HSDP = Plan(dp_replicate=2, dp_shard=2, sharding="zero3", sharding_factor=2)
ROUNDED = HSDP.replace(reduce_dtype="bf16")
PACKED = FSDP.replace(gather_dtype="int8")
RING = Plan(ring=3, checkpoint="full")
OVERLAP = Plan(ulysses=2, overlap_ulysses=True)
OFFLOADED = FSDP.replace(checkpoint="full", offload=1.0)


def train(plan):
    """Two steps of two microbatches each."""
    init_parallel(plan)
    group = parallel_states.get_data_parallel_group()
    model = wan(heads=4)
    lift_casts(model)
    model = shardformer.shard(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def steps():
        for step in range(2):
            for micro in range(2):
                set_last_microbatch(model, micro == 1)
                inputs, target = batch(step, micro, slice(group.rank(), None, group.size()))
                (out,) = model(**inputs, return_dict=False)
                (out - target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return steps


def watched(plan):
    """Steps whose first ones are checked, with every weight compared between ranks."""
    init_parallel(plan)
    group = parallel_states.get_data_parallel_group()
    model = shardformer.shard(wan(heads=4), plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    # Drawn here, because the watch sees that all ranks draw the same.
    batches = [batch(step, 0, slice(group.rank(), None, group.size())) for step in range(3)]

    def steps():
        with watch(model, plan, every=1) as run:
            for inputs, target in batches:
                (out,) = model(**inputs, return_dict=False)
                loss = (out - target).square().mean()
                run.loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return steps


def exchange(plan):
    """Tensors passed round a ring, forward and backward."""
    init_parallel(plan)
    group = parallel_states.get_parallel_group("ring")

    def steps():
        own = torch.ones(3, requires_grad=True)
        (2 * ring_exchange(own * 2, group)).sum().backward()

    return steps


def save(plan, config):
    """A save beside the step that follows it, twice."""
    trainer = Trainer(config)

    def steps():
        trainer.saver._stream = Stream(name="save")  # as one that was made where there is a GPU
        for _ in range(2):
            trainer.step()
            trainer.save()
        trainer.step()
        trainer.saver.wait()

    return steps


def races(make_steps, plan, fault=None, *args):
    with engine(OffloadEngine(CudaQueues)):
        steps = make_steps(plan, *args)
        with Schedule() as schedule, FAULTS[fault][2]() if fault else contextlib.nullcontext():
            steps()
    return schedule.num_accesses, schedule.races


# ---- orders taken away


def without(order, within):
    """Streams that leave out an order which a function states, itself or by what it calls."""
    method = getattr(Stream, order)

    def ordered(stream, *args):
        frame = sys._getframe(1)
        for _ in range(9):
            if frame is None or frame.f_code.co_qualname.endswith(within):
                break
            frame = frame.f_back
        else:
            frame = None
        if frame is None:
            method(stream, *args)

    return lambda: mock.patch.object(Stream, order, ordered)


def sends_what_is_written():
    """Ulysses under compute whose buffers are written to while they are sent."""
    start = overlap._Pending.__init__

    def starts(pending, sent, *args):
        start(pending, sent, *args)
        sent.zero_()

    return mock.patch.object(overlap._Pending, "__init__", starts)


def holds_no_buffer():
    """FSDP2 that keeps the event of a reduce-scatter and not its buffer."""
    return mock.patch.object(
        _fsdp_param_group, "ReduceScatterState", lambda _buffer, event: SimpleNamespace(event=event)
    )


FAULTS = {
    "weights are read before they have come": (
        train,
        FSDP,
        without("wait_event", "foreach_all_gather_copy_out"),
    ),
    "gradients are sent before they are there": (train, FSDP, without("wait_stream", "foreach_reduce")),
    "an optimizer steps before gradients have come": (
        train,
        FSDP,
        without("wait_event", "finalize_backward"),
    ),
    "gradients are freed while they are sent": (train, FSDP, holds_no_buffer),
    "an average over copies is freed while it is sent": (
        train,
        ROUNDED,
        lambda: mock.patch.object(torch.Tensor, "record_stream", lambda *_: None),
    ),
    "packed weights are read before they have come": (
        train,
        PACKED,
        without("wait_event", "_Unpacking.wait"),
    ),
    "keys are read before they have come": (train, RING, without("wait_event", "RingPipeline.next_block")),
    "sums are added to before they have come": (
        train,
        RING,
        without("wait_event", "RingPipeline.send_grads"),
    ),
    "the ring's last sum is read before it has come": (
        train,
        RING,
        without("wait_event", "RingPipeline.receive_grads"),
    ),
    "a neighbour's tensor is read before it has come": (
        exchange,
        Plan(ring=2),
        without("wait_event", "forward"),
    ),
    "a neighbour's gradient is read before it has come": (
        exchange,
        Plan(ring=2),
        without("wait_event", "backward"),
    ),
    "heads are read before they have come": (train, OVERLAP, without("wait_event", "_Pending.finish")),
    "heads are written to while they are sent": (train, OVERLAP, sends_what_is_written),
    "weights are saved before they are there": (save, Plan(), without("wait_stream", "Saver.save")),
    "weights change while they are saved": (save, Plan(), without("wait_stream", "Saver.wait_for_copy")),
    "a thread stays on the first GPU": (save, Plan(), lambda: mock.patch.object(torch.cuda, "set_device")),
    "a copy is written before it is there": (save, FSDP, without("synchronize", "Saver._stage")),
}


# Of memory, and of an order.
_BY_DEFAULT = ("an average over copies is freed while it is sent", "weights change while they are saved")


@pytest.mark.parametrize("fault", some(FAULTS, *_BY_DEFAULT))
def test_a_fault_is_seen(ranks, tmp_path, request, fault):
    make_steps, plan, _ = FAULTS[fault]
    args = [tiny_config(request.getfixturevalue("clips"), tmp_path, plan)] if make_steps is save else []
    found = ranks(plan.world_size or 1, races, make_steps, plan, fault, *args)
    assert any(lines for _, lines in found)


TRAINED = some(
    [
        FSDP,
        FSDP.replace(prefetch=2),
        FSDP.replace(sharding="zero2"),
        PACKED,
        HSDP,
        ROUNDED,
        RING,
        OVERLAP,
        Plan(ulysses=2),
        Plan(ulysses=4, two_level="on", ranks_per_node=2),
        Plan(ring=2, ulysses=2, sharding="zero3", checkpoint="selective"),
        OFFLOADED,
    ],
    OFFLOADED,
)


@pytest.mark.parametrize("plan", TRAINED, ids=str)
def test_a_right_step_has_no_race(ranks, plan):
    for num_accesses, lines in ranks(plan.world_size, races, train, plan):
        assert num_accesses > 1000 and lines == []


@PROVE
@pytest.mark.parametrize("plan", [RING.replace(sharding="zero3"), FSDP], ids=["ring", "data"])
def test_a_watched_step_has_none(ranks, plan):
    for num_accesses, lines in ranks(plan.world_size, races, watched, plan):
        assert num_accesses > 1000 and lines == []


def test_a_tensor_that_is_gone_races_with_none():
    """A tensor lies where another was, which torch.tensor had made: no operator shows where that one came from."""
    with Schedule() as schedule:
        for _ in range(20):
            torch.tensor(1.0).add_(1)
            with stream(Stream()):
                torch.ones(()).add_(1)
    assert schedule.num_accesses and schedule.races == []


def test_a_tensor_passed_on_has_none(ranks):
    assert [lines for _, lines in ranks(2, races, exchange, Plan(ring=2))] == [[], []]


@PROVE
@pytest.mark.parametrize("plan", [FSDP, Plan()], ids=["sharded", "whole"])
def test_a_save_has_none(ranks, clips, tmp_path, plan):
    found = ranks(plan.world_size or 1, races, save, plan, None, tiny_config(clips, tmp_path, plan))
    assert [lines for _, lines in found] == [[]] * len(found)
