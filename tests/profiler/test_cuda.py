"""The profiler on a real GPU, one rank over NCCL: times that are known, also of collectives that have no work."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from opensora_accel import Plan, init_parallel
from opensora_accel.profiler import profile
from opensora_accel.profiler.clock import CudaClock
from opensora_accel.profiler.records import read_rank
from tests.tiers import NEEDS_GPU

pytestmark = NEEDS_GPU

CYCLES = 100_000_000  # about 0.05 s


def slept_s():
    """Seconds that the GPU sleeps, by events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def test_marks_are_points_of_the_stream():
    slept_s()
    clock = CudaClock(torch.device("cuda", 0))
    started = time.perf_counter()
    begin = clock.mark()
    torch.cuda._sleep(CYCLES)
    end = clock.mark()
    assert time.perf_counter() - started < 0.02 and not clock.is_done(end), "nobody waited"
    seconds = clock.seconds(end) - clock.seconds(begin)
    assert seconds == pytest.approx(slept_s(), rel=0.1)
    assert clock.seconds(begin) + clock.zero_s == pytest.approx(started, abs=0.01), "the host's time"


def test_collectives_are_measured_where_they_ran(parallel_registry, tmp_path):
    init_parallel(Plan())
    assert dist.get_backend() != "gloo"
    x, other = torch.ones(1 << 22, device="cuda"), torch.ones(1 << 22, device="cuda")

    def step():
        torch.cuda._sleep(CYCLES)
        dist.all_reduce(x)
        work = dist.all_gather_into_tensor(other, x, async_op=True)
        torch.cuda._sleep(CYCLES)
        work.wait()
        torch.cuda._sleep(CYCLES)

    step()
    with profile(nn.Linear(1, 1, device="cuda"), None, tmp_path, count_flops=False) as run:
        for _ in range(3):
            started = time.perf_counter()
            step()
            torch.cuda.synchronize()
            step_s = time.perf_counter() - started
            run.step()
    records = list(read_rank(tmp_path / "rank_00000.jsonl")[1])
    each_s = slept_s()
    assert len(records) == 3 and records[-1].seconds == pytest.approx(step_s, rel=0.1)
    for record in records:
        reduced, gathered = record.calls
        assert (reduced.kind, gathered.kind) == ("all-reduce", "all-gather")
        for call in record.calls:
            # One rank has little to do for either; neither lasts as long as what computes beside it.
            assert 0 <= call.exposed_s <= call.end_s - call.start_s < each_s / 2
        assert gathered.exposed_s < 0.2 * each_s
        assert reduced.start_s - record.start_s == pytest.approx(each_s, rel=0.2)
