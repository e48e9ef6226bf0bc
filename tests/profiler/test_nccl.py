"""The profiler on streams and under NCCL, by their stand-in: nothing ends it, and every time is the schedule's own."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.communications import transport
from opensora_accel.profiler import clock as clocks
from opensora_accel.profiler import profile
from opensora_accel.profiler import time as profiler_time
from opensora_accel.profiler.clock import CudaClock
from opensora_accel.profiler.records import read_rank
from tests.stand_in_streams import Event, Schedule, Stream
from tests.tiers import some
from tests.video_models import CASES

OPERATOR_S, TRANSFER_S = 1e-3, 10e-3


def profiled(step, folder, **schedule):
    """The records of two steps."""
    profiler_time.clock_for = CudaClock
    try:
        with Schedule(**schedule), profile(nn.Linear(1, 1), None, folder, count_flops=False) as run:
            for _ in range(2):
                step()
                run.step()
    finally:
        profiler_time.clock_for = clocks.clock_for
    return list(read_rank(folder / f"rank_{dist.get_rank():05d}.jsonl")[1])


def transfers(folder):
    """Milliseconds that each transfer takes, and those of them in which nothing is computed."""
    init_parallel(Plan(ulysses=2))
    group, x, other = dist.group.WORLD, torch.ones(4), torch.ones(8)

    def compute(num_operators):
        for _ in range(num_operators):
            x.mul_(1)

    def step():
        compute(3)
        dist.all_reduce(x)
        (work,) = transport.start_all_gather(other, x, group)
        compute(4)
        work.wait()
        sent, received, peer = torch.ones(3), torch.ones(3), 1 - dist.get_rank()
        messages = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
        ]
        (work,) = dist.batch_isend_irecv(messages)
        compute(30)
        work.wait()
        dist.all_reduce(x, async_op=True)  # for which nobody waits

    record = profiled(step, folder, operator_s=OPERATOR_S, transfer_s=TRANSFER_S)[1]
    return [
        (c.kind, round(1000 * (c.end_s - c.start_s), 3), round(1000 * c.exposed_s, 3)) for c in record.calls
    ]


def test_times_are_the_schedules(ranks, tmp_path):
    for found in ranks(2, transfers, tmp_path):
        assert found == [
            # One that is waited for at once runs on the compute stream, all of it exposed.
            ("all-reduce", 10, 10),
            ("all-gather", 10, 6),
            # The two of a batch, one behind the other here, are one transfer.
            ("send", 20, 0),
            ("recv", 20, 0),
            ("all-reduce", 10, 10),
        ]


def train(plan, folder):
    init_parallel(plan)
    case = CASES["Wan"]
    model = shardformer.shard(case.make(), plan)

    def step():
        model(**case.inputs(), return_dict=False)[0].square().mean().backward()

    records = profiled(step, folder, operator_s=OPERATOR_S, transfer_s=TRANSFER_S)
    return [
        (call.kind, call.end_s - call.start_s, call.exposed_s, record.seconds)
        for record in records
        for call in record.calls
    ]


@pytest.mark.parametrize(
    "plan",
    some([Plan(ring=2), Plan(ulysses=2, overlap_ulysses=True), Plan(dp_shard=2, sharding="zero3")]),
    ids=str,
)
def test_a_step_is_profiled(ranks, tmp_path, plan):
    for calls in ranks(2, train, plan, tmp_path):
        assert calls
        for kind, seconds, exposed_s, step_s in calls:
            # Ranks compare their inputs by all-gathers that no stand-in sees.
            assert (kind == "all-gather" or seconds >= TRANSFER_S * 0.999) and seconds <= step_s, kind
            assert 0 <= exposed_s <= seconds * 1.001
        assert {"send", "all-to-all", "reduce-scatter"} & {kind for kind, *_ in calls}
    lines = (tmp_path / "rank_00000.jsonl").read_text().splitlines()
    assert len([line for line in lines if "calls" in json.loads(line)]) == 2


class Hours:
    """A clock of the host, and streams that go with it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.stream = Stream()
        for name, value in {"Event": Event, "Stream": Stream, "current_stream": self.current}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(clocks.time, "perf_counter", lambda: self.now)

    def current(self, _device=None):
        self.stream.seconds = self.now
        return self.stream


@pytest.mark.parametrize(("anchor_s", "is_exact"), [(clocks._ANCHOR_S, True), (float("inf"), False)])
def test_a_millisecond_after_an_hour_is_one(monkeypatch, anchor_s, is_exact):
    """CUDA's float32 milliseconds are 0.25 ms apart by then."""
    monkeypatch.setattr(clocks, "_ANCHOR_S", anchor_s)
    hours = Hours(monkeypatch)
    clock = CudaClock(torch.device("cpu"))
    worst = 0.0
    for step in range(1, 3601, 7):
        hours.now = step + 0.1234
        begin = clock.mark()
        hours.now += 1.1e-3
        end = clock.mark()
        worst = max(worst, abs(clock.seconds(end) - clock.seconds(begin) - 1.1e-3))
    assert (worst < 3e-6) == is_exact, worst
    assert abs(clock.seconds(end) - hours.now) < (1e-4 if is_exact else 1e-3)


def test_no_mark_is_on_a_stream_of_copies(monkeypatch):
    """torch has two pools of 32 streams; those of copies are of ordinary priority."""
    Hours(monkeypatch)
    assert CudaClock(torch.device("cpu"))._waiting.priority == -1
