"""The pool of ranks: one start, many jobs, and no job that fails harms the next."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from opensora_accel import Plan, init_parallel
from opensora_accel.parallel_states import get_parallel_group
from opensora_accel.verify.pool import RankError, RankPool


def total():
    found = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(found)
    return dist.get_rank(), dist.get_world_size(), found.item(), os.getpid()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise RuntimeError(f"rank {rank} gives up")
    return dist.get_rank()


def hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(100)


def die():
    os._exit(3)


def variable():
    return os.environ.get("OPENSORA_ACCEL_POOL_TEST")


@pytest.fixture(scope="module")
def pool():
    with RankPool(3, timeout_s=30, grace_s=3) as pool:
        yield pool


def test_every_job_gets_a_world_of_its_own_on_the_same_processes(pool):
    first, second = pool(3, total), pool(2, total)
    assert [found[:3] for found in first] == [(0, 3, 6), (1, 3, 6), (2, 3, 6)]
    assert [found[:3] for found in second] == [(0, 2, 3), (1, 2, 3)]
    assert [found[3] for found in first[:2]] == [found[3] for found in second]


def test_each_ranks_error_is_told_and_the_next_job_runs(pool):
    with pytest.raises(RankError, match="rank 1 gives up") as caught:
        pool(2, fail_on, 1)
    assert set(caught.value.errors) == {1}
    assert pool(2, fail_on, 7) == [0, 1]


def test_a_rank_that_hangs_or_dies_is_replaced(pool):
    with pool.patience(2, 1), pytest.raises(RankError, match="no answer: hangs"):
        pool(2, hang_on, 0)
    with pytest.raises(RankError, match="ended without an answer"):
        pool(1, die)
    assert pool(2, fail_on, 7) == [0, 1]
    assert pool.timeout_s == 30


def test_renewed_processes_are_others(pool):
    before = [found[3] for found in pool(2, total)]
    pool.renew()
    assert not {found[3] for found in pool(2, total)} & set(before)


def speak_and_abort():
    os.write(2, b"the backend's last words")
    os.abort()


def test_what_the_backend_said_before_it_aborted_is_told(pool, capfd):
    with pytest.raises(RankError, match=r"ended without an answer(.|\n)*the backend's last words"):
        pool(1, speak_and_abort)
    assert "last words" not in capfd.readouterr().err


def test_a_jobs_environment_ends_with_it(pool):
    assert pool(1, variable, env={"OPENSORA_ACCEL_POOL_TEST": "1"}) == ["1"]
    assert pool(1, variable) == [None]


def trains_with_ddp():
    """The number of threads that this process has."""
    init_parallel(Plan(ulysses=2))
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=get_parallel_group("mixed"))
    model.itself = model  # as hooks on a model lead back to it
    model(torch.ones(1, 2)).sum().backward()
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_the_threads_of_ended_groups_end():
    """A model under DDP lies in a reference cycle that holds its process group, and that holds threads."""
    with RankPool(2) as pool:
        counts = [pool(2, trains_with_ddp)[0] for _ in range(8)]
    assert max(counts[2:]) == counts[2], counts


def private_mib():
    """Of this rank, which it shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="only Linux says it")
def test_ranks_share_what_was_loaded_before_them(ranks):
    """A fresh one has little of its own; with the collector at work in all that torch has loaded it was 64 MiB."""
    del ranks  # its server is the one that this pool forks from
    with RankPool(2) as fresh:
        assert all(mib < 32 for mib in fresh(2, private_mib))
