"""Ranks that do not come: the others end within the timeout, and name them and the operation."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel import communications as comm
from opensora_accel.communications import waiting
from opensora_accel.communications.waiting import MissingRankError
from opensora_accel.verify.pool import RankPool
from tests.models import wan, wan_inputs


@pytest.fixture(scope="module")
def impatient():
    """Ranks whose collectives wait for three seconds."""
    with RankPool(4, collective_timeout_s=3, grace_s=60) as pool:
        yield pool


def alone(operation):
    """Rank 1 goes another way: it waits for the others elsewhere, as one that does not validate would."""
    waiting.PATIENCE_S = 1
    start = time.monotonic()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["told by 0", "told by 2"])
        return ""
    with pytest.raises(MissingRankError) as caught:
        operation(torch.ones(4, 6, requires_grad=True))
    store.set(f"told by {dist.get_rank()}", "")
    assert time.monotonic() - start < 40
    return str(caught.value)


def exchanged(x):
    return comm.all_to_all(x, None, 1, 0)


def gathered(x):
    return comm.gather_forward_split_backward(x, None, 0, splits=[4, 4, 4])


def summed(x):
    return comm.reduce_forward_copy_backward(x, None)


def passed_on(x):
    return comm.ring_exchange(x, None)


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (exchanged, "all_gather"),
        (gathered, "all_gather"),
        (summed, "all_reduce"),
        (passed_on, "ring_exchange"),
    ],
)
def test_a_rank_that_does_not_come_is_named(impatient, operation, name):
    first, _, last = impatient(3, alone, operation)
    for rank, told in ((0, first), (2, last)):
        assert f"{name} over the ranks 0, 1, 2 failed on rank {rank}: rank 1 did not come" in told
        assert "Every rank of a group must call a sharded model, in validation and sampling too" in told


def uneven():
    """A path by hand: rank 1 was told splits that are not those of its tensor."""
    rank = dist.get_rank()
    splits = [4, 4] if rank == 0 else [4, 3]
    error = MissingRankError if rank == 0 else ValueError
    with pytest.raises(error) as caught:
        comm.all_to_all(torch.ones(4, 6), None, 1, 0, splits=splits)
    return str(caught.value)


def test_an_error_that_one_rank_sees_reaches_the_others(impatient):
    first, second = impatient(2, uneven)
    assert "splits=(4, 3) give rank 1 a size of 3 in dim 0, but its tensor has 4" in second
    assert f"rank 1 failed: {second}" in first


def validates_alone():
    """As scripts do that validate on the main process: rank 1 goes on to the next barrier."""
    waiting.PATIENCE_S = 1
    plan = Plan(ulysses=2)
    init_parallel(plan, timeout_s=2)
    model = shardformer.shard(wan(torch.float32), plan)
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError):
            dist.barrier()
        return ""
    with (
        pytest.raises(MissingRankError) as caught,
        torch.no_grad(),
        waiting.waiting("a step", dist.group.WORLD),
    ):
        model(**wan_inputs(torch.float32))
    return str(caught.value)


def test_validation_on_one_rank_ends_with_the_others_named(impatient):
    told = impatient(2, validates_alone)[0]
    assert "over the ranks 0, 1 failed on rank 0: rank 1 did not come" in told
    assert told.count("did not come") == 1, "what was explained is not explained again further out"


def stopped():
    """Rank 1 is stopped, as a debugger or a scheduler would; the last one wakes it up again."""
    waiting.PATIENCE_S = 1
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    pid = int(store.get("pid"))
    try:
        with pytest.raises(MissingRankError) as caught:
            exchanged(torch.ones(4, 6))
    finally:
        os.kill(pid, signal.SIGCONT)
    return str(caught.value)


def test_a_stopped_rank_is_named(impatient):
    first, _, last = impatient(3, stopped)
    assert all("rank 1 did not come (ended, stopped, or gone another way)" in told for told in (first, last))


def timeouts():
    init_parallel(Plan(ring=2), timeout_s=7)
    names = ("sequence", "mixed", "ring", "ulysses")
    groups = [parallel_states.get_parallel_group(name) for name in names]
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]


def test_a_timeout_reaches_every_group(impatient):
    assert impatient(2, timeouts) == [[7.0] * 4] * 2


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_that_is_none_is_refused(monkeypatch, parallel_registry, value):
    monkeypatch.setenv("OPENSORA_ACCEL_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"OPENSORA_ACCEL_TIMEOUT is how many seconds .* got {value}"):
        init_parallel(Plan())
