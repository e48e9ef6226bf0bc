"""Ranks that do not come: the others end within the timeout, and name them and the operation."""

import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states, watchdog
from opensora_accel import communications as comm
from opensora_accel.communications import waiting
from opensora_accel.communications.missing_ranks import MissingRankError
from opensora_accel.verify.pool import RankPool
from tests.models import wan, wan_inputs
from tests.tiers import PROVE

pytestmark = pytest.mark.slow

TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def impatient():
    """Ranks whose collectives wait for three seconds."""
    with RankPool(4, collective_timeout_s=TIMEOUT_S, grace_s=60) as pool:
        yield pool


def alone(operation):
    """Rank 1 goes another way: it waits for the others elsewhere, as one that does not validate would."""
    init_parallel(Plan(ring=dist.get_world_size()))
    start = time.monotonic()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["told by 0", "told by 2"])
        return ""
    with pytest.raises(MissingRankError) as caught:
        operation(torch.ones(4, 6, requires_grad=True))
    store.set(f"told by {dist.get_rank()}", "")
    assert time.monotonic() - start < TIMEOUT_S + 5
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
        pytest.param(exchanged, "all_gather", marks=PROVE),
        pytest.param(gathered, "all_gather", marks=PROVE),
        pytest.param(summed, "all_reduce", marks=PROVE),
        (passed_on, "ring_exchange"),
    ],
)
@pytest.mark.faults
def test_a_rank_that_does_not_come_is_named(impatient, operation, name, fault):
    first, _, last = impatient(3, alone, operation)
    for rank, told in ((0, first), (2, last)):
        assert (
            f"{name} over the ranks 0, 1, 2 failed on rank {rank}: rank 1 did not come: it is at {__file__}:"
            in told
        )
        assert " in alone. Every rank" in told, "rank 1 is the only one that goes another way"
        assert "Every rank of a group must call a sharded model, in validation and sampling too" in told
    fault(f"a rank that does not come to {name}")


def meanwhile():
    """What this rank answers while its own operation has failed and it asks the others: it may be asked itself."""
    init_parallel(Plan(ring=1))
    answers = []

    def explanation(*_):
        answers.append(watchdog._whereabouts())
        return "failed"

    with (
        mock.patch.object(watchdog, "explanation", explanation),
        pytest.raises(MissingRankError),
        waiting("ring_exchange", dist.group.WORLD),
    ):
        raise RuntimeError("gloo/transport: timed out")
    assert not watchdog.entered
    return answers


def test_a_rank_that_has_just_failed_waits_in_what_failed(impatient):
    assert impatient(1, meanwhile) == [["waits in ring_exchange over the ranks 0"]]


def uneven():
    """A path by hand: rank 1 was told splits that are not those of its tensor."""
    rank = dist.get_rank()
    splits = [4, 4] if rank == 0 else [4, 3]
    error = MissingRankError if rank == 0 else ValueError
    with pytest.raises(error) as caught:
        comm.all_to_all(torch.ones(4, 6), None, 1, 0, splits=splits)
    return str(caught.value)


@pytest.mark.faults
def test_an_error_that_one_rank_sees_reaches_the_others(impatient, fault):
    first, second = impatient(2, uneven)
    assert "splits=(4, 3) give rank 1 a size of 3 in dim 0, but its tensor has 4" in second
    assert f"rank 1 failed: {second}" in first
    fault("shapes that differ between ranks")


def validates_alone():
    """As scripts do that validate on the main process: rank 1 goes on, and does something else."""
    plan = Plan(ulysses=2)
    init_parallel(plan, timeout_s=2)
    model = shardformer.shard(wan(torch.float32), plan)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["told"])
        return ""
    with (
        pytest.raises(MissingRankError) as caught,
        torch.no_grad(),
        waiting("a step", dist.group.WORLD),
    ):
        model(**wan_inputs(torch.float32))
    store.set("told", "")
    return str(caught.value)


@pytest.mark.faults
def test_validation_on_one_rank_ends_with_the_others_named(impatient, fault):
    told = impatient(2, validates_alone)[0]
    assert f"over the ranks 0, 1 failed on rank 0: rank 1 did not come: it is at {__file__}:" in told
    assert told.count("failed on") == 1, "what was explained is not explained again further out"
    fault("validation on one rank alone")


def stopped():
    """Rank 1 is stopped, as a debugger or a scheduler would; the last one wakes it up again."""
    init_parallel(Plan(ring=3))
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    pid, start = int(store.get("pid")), time.monotonic()
    try:
        with pytest.raises(MissingRankError) as caught:
            exchanged(torch.ones(4, 6))
        assert time.monotonic() - start < TIMEOUT_S + 5
        store.set(f"told by {rank}", "")
        store.wait([f"told by {other}" for other in (0, 2)])
    finally:
        os.kill(pid, signal.SIGCONT)
    return str(caught.value)


@pytest.mark.prove
@pytest.mark.faults
def test_a_stopped_rank_is_named(impatient, fault):
    first, _, last = impatient(3, stopped)
    silent = "rank 1 did not come and does not answer: it has ended, or is stopped"
    assert silent in first and silent in last
    fault("a rank that hangs: stopped")


def stands_elsewhere():
    """Each rank waits for something else: 0 and 2 in gathers of FSDP's kind, 1 to receive, 3 in a sum of 2 ranks."""
    init_parallel(Plan(ring=2, dp_replicate=2))
    rank, pairs = dist.get_rank(), parallel_states.get_parallel_group("ring")
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["0 failed", "2 failed", "3 failed"])
        return ""
    time.sleep(rank / 2)  # so that rank 0 fails first, while the others wait
    with pytest.raises(RuntimeError) as caught, waiting("a step", dist.group.WORLD):
        if rank == 3:
            comm.ring_exchange(torch.ones(3), pairs)
        else:
            dist.all_gather_into_tensor(torch.empty(4), torch.ones(1))
    store.set(f"{rank} failed", "")
    return str(caught.value)


@PROVE
@pytest.mark.faults
def test_each_rank_tells_what_it_waits_in(impatient, fault):
    told = impatient(4, stands_elsewhere)[0]
    assert "a step over the ranks 0-3 failed on rank 0: rank 1 did not come: it is at" in told
    assert "rank 2 waits in all_gather over the ranks 0-3" in told
    assert "rank 3 waits in ring_exchange over the ranks 2, 3" in told
    fault("ranks that wait in different collectives")


def recorded():
    """What torch's recorder tells of two collectives, of which this rank waits in the second."""
    init_parallel(Plan(ring=2), timeout_s=2)
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        time.sleep(3)
        return None
    with pytest.raises(RuntimeError):
        dist.broadcast(torch.ones(1), 1)
    return watchdog._trace(only_active=False)


@PROVE
def test_a_collective_whose_timeout_is_all_but_over_is_found(impatient):
    """As the thread does on NCCL, which ends the process when it is over."""
    trace, _ = impatient(2, recorded)
    by_name = {entry["profiling_name"]: entry for entry in trace["entries"]}
    first, second = by_name["gloo:all_reduce"], by_name["gloo:broadcast"]
    second |= {"retired": False, "timeout_ms": 600_000}
    begun_ns = second["time_created_ns"]
    assert watchdog.overdue({"entries": [first]}, begun_ns + 10**12) is None, "it has ended"
    assert watchdog.overdue({"entries": [first, second]}, begun_ns + 500 * 10**9) is None
    found = watchdog.overdue({"entries": [first, second]}, begun_ns + 597 * 10**9)
    assert found == ("broadcast", "0", 597.0)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([2, 5], "ranks 2, 5"), ([0, 1, 2, 3, 6], "ranks 0-3, 6")],
)
def test_ranks_are_written_short(ranks, text):
    assert watchdog.named(ranks, "rank") == text


def timeouts(timeout_s):
    init_parallel(Plan(ring=2), timeout_s=timeout_s)
    names = ("sequence", "mixed", "ring", "ulysses")
    groups = [parallel_states.get_parallel_group(name) for name in names]
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]


def test_a_timeout_reaches_every_group(impatient):
    assert impatient(2, timeouts, 7) == [[7.0] * 4] * 2
    assert impatient(2, timeouts, None) == [[TIMEOUT_S] * 4] * 2, (
        "the one that torch.distributed was started with"
    )


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_that_is_none_is_refused(monkeypatch, parallel_registry, value):
    monkeypatch.setenv("OPENSORA_ACCEL_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"OPENSORA_ACCEL_TIMEOUT is how many seconds .* got {value}"):
        init_parallel(Plan())
