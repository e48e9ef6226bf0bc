"""Where a device waits for its host, and which steps are slower because something is followed: what ranks record."""

import pytest
import torch
from torch import nn

from opensora_accel.profiler import profile
from opensora_accel.profiler.clock import HostClock
from opensora_accel.profiler.rank_summary import summarise_step
from opensora_accel.profiler.records import CommunicationCall, Span, StepRecord, read_rank
from opensora_accel.profiler.time import _Open


class DeviceClock(HostClock):
    """Marks are when the device came there, and when the host had."""

    def seconds(self, mark):
        return mark[0]

    def behind_s(self, mark):
        return mark[0] - mark[1]


def span(region, begin, end):
    return _Open(region, "", "forward", begin, None, end)


def starved(clock, spans):
    run = profile(nn.Linear(1, 1))
    run._clock = clock
    return run._starved(spans)


def test_a_device_is_starved_between_marks_that_it_reaches_with_the_host():
    spans = [
        span("block", (0.0, 0.0), (1.0, 0.99999)),  # it keeps up
        span("mlp", (1.0, 1.0), (2.0, 1.2)),  # the host is ahead at its end
        span("block", (2.0, 1.2), (3.0, 1.5)),
        span("optimizer", (4.0, 4.0), (5.0, 4.99999)),  # after a wait of the host's it keeps up again
        span("copy out", (2.5, 2.5), (2.6, 2.6)),  # on a stream of its own
    ]
    assert starved(DeviceClock(), spans) == [(0.0, 1.0), (4.0, 5.0)]
    assert starved(HostClock(), [span("block", 0.0, 1.0)]) is None


def test_what_it_waits_for_otherwise_is_not_the_hosts():
    record = StepRecord(
        0, 0.0, 10.0, {}, [Span("data", "", "", 0.0, 2.0)],
        [CommunicationCall("all-reduce", "ring", "ring", 2.0, 4.0, 1.0, 8, {1: 8})], starved=[(0.0, 6.0), (8.0, 9.0)],
    )  # fmt: skip
    assert summarise_step(record).host_bound_s == 7.0 - 2.0 - 1.0
    assert summarise_step(StepRecord(0, 0.0, 10.0)).host_bound_s is None


@pytest.mark.parametrize("looks", [{"memory_steps": [2]}, {"trace_steps": [2]}], ids=str)
def test_a_step_that_is_followed_and_the_next_one_say_so(tmp_path, looks):
    model = nn.Linear(2, 2)
    with profile(model, folder=tmp_path, count_flops=False, **looks) as run:
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            run.step()
    _, steps = read_rank(tmp_path / "rank_00000.jsonl")
    what = "memory" if "memory_steps" in looks else "a trace"
    assert [step.slowed_by for step in steps] == ["", what, "memory or a trace in the step before", ""]
