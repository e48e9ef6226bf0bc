"""What devices waited for, who made whom wait, the path that bounds a step, its messages: steps worked by hand."""

import pytest

from opensora_accel.profiler.analyse import analyse
from opensora_accel.profiler.rank_summary import summarise_step
from opensora_accel.profiler.records import CommunicationCall, RecordWriter, RunRecord, Span, StepRecord
from tests.profiler.synthetic import BAD_RANK, write_run

MIB = 1 << 20


def write(folder, rank, step, **facts):
    """A warm-up step, and the one that counts."""
    writer = RecordWriter(folder, RunRecord(rank, 2, groups={"mixed": [0, 1]}, **facts))
    writer.step(StepRecord(0, 0.0, 1.0))
    writer.step(step)
    writer.close()


def reduce_of(rank, start, end, wait=None, size=MIB):
    exposed = end - (start if wait is None else wait)
    return CommunicationCall("all-reduce", "mixed", "mixed", start, end, exposed, size, {1 - rank: size})


@pytest.fixture
def two_ranks(tmp_path):
    """The picture in waiting.py: rank 1's forward takes 7 s, and rank 0 waits for it from 2 s on.

    rank 0   data 1|forward 1|waits 5   |net 1|optimizer 2|
    rank 1         |forward 7           |net 1|optimizer 1|
    """
    spans = (
        [
            Span("data", "", "", 10.0, 11.0),
            Span("block", "b", "forward", 11.0, 12.0),
            Span("optimizer", "", "", 18.0, 20.0),
        ],
        [Span("block", "b", "forward", 10.0, 17.0), Span("optimizer", "", "", 18.0, 19.0)],
    )
    for rank, (begin, end) in enumerate(((12.0, 20.0), (17.0, 20.0))):
        write(tmp_path, rank, StepRecord(1, 10.0, end, {}, spans[rank], [reduce_of(rank, begin, 18.0)]))
    return analyse(tmp_path)


def test_idle_time_has_one_cause_each(two_ranks):
    idle = {each.cause: each for each in two_ranks.idle}
    means = {"data": 0.5, "network": 1.0, "late ranks": 2.5, "copies": 0.0, "save": 0.0, "other": 0.5}
    assert {cause: each.mean_s for cause, each in idle.items()} == means | {"host": None}
    assert idle["late ranks"].share == 0.25 and (idle["late ranks"].most_s, idle["late ranks"].rank) == (
        5.0,
        0,
    )
    assert (idle["other"].most_s, idle["other"].rank) == (1.0, 1)


def test_the_path_leads_over_the_rank_that_was_waited_for(two_ranks):
    path = [(part.what, part.seconds, part.rank, part.rank_s) for part in two_ranks.critical_path]
    assert path == [("forward", 7.0, 1, 7.0), ("optimizer", 2.0, 0, 2.0), ("network over mixed", 1.0, 1, 1.0)]
    assert sum(part.share for part in two_ranks.critical_path) == pytest.approx(1)
    (late,) = two_ranks.late_ranks
    assert (late.rank, late.axis, late.waiting_ranks) == (1, "mixed", 1)
    assert (late.mean_s, late.most_rank, late.most_s) == (5.0, 0, 5.0)


def test_a_call_that_was_over_when_somebody_waited_bounds_nobody(tmp_path):
    for rank in (0, 1):
        block = [Span("block", "b", "forward", 10.0, 20.0)]
        # Waiting for what is there takes 10 µs.
        call = reduce_of(rank, 11.0 + rank, 19.0, wait=18.99999)
        write(tmp_path, rank, StepRecord(1, 10.0, 20.0, {}, block, [call]))
    run = analyse(tmp_path)
    assert [(part.what, part.rank_s) for part in run.critical_path] == [("forward", 10.0)]
    assert run.late_ranks == []


@pytest.mark.parametrize(
    "case", ["healthy", "slow data", "imbalance", "exposed ring", "host-bound", "tiny messages"]
)
def test_the_path_and_the_idle_time_of_made_runs(tmp_path, case):
    run = analyse(write_run(tmp_path, case))
    path = {part.what: part for part in run.critical_path}
    # A path cannot be longer than the step, from the first rank's start to the last one's end, and leaves nothing out.
    assert sum(part.seconds for part in path.values()) == pytest.approx(run.mean_step_s, rel=0.01)
    idle = {each.cause: each for each in run.idle}
    busy = sum(part.mean_s for part in run.parts if part.region in ("block", "attention", "mlp", "optimizer"))
    known = sum(each.mean_s for each in run.idle)
    starved = idle["host"].mean_s if case == "host-bound" else 0.0
    assert known - starved + busy == pytest.approx(sum(part.mean_s for part in run.parts), rel=1e-6)
    # Three exchanges in each of four blocks' forward, recomputation and backward, of which a rank sends one end.
    assert [each.calls for each in run.sizes if each.axis == "ring"] == [36]
    if case == "slow data":
        assert path["data"].rank == BAD_RANK and path["data"].seconds == pytest.approx(0.31, rel=0.02)
    if case in ("slow data", "imbalance"):
        assert path["forward"].rank == BAD_RANK and path["forward"].rank_s == pytest.approx(
            path["forward"].seconds
        )
        assert (
            run.late_ranks[0].rank == BAD_RANK
            and idle["late ranks"].mean_s > 0.2 > 0.02 > idle["network"].mean_s
        )
    elif case == "exposed ring":
        # Only in backward does attention take longer than what is sent.
        assert {"network over ring", "backward"} == set(
            sorted(path, key=lambda what: -path[what].seconds)[:2]
        )
        assert idle["network"].share > 0.1 > idle["late ranks"].share
    elif case == "host-bound":
        assert max(run.idle, key=lambda each: each.mean_s).cause == "host"
    elif case == "tiny messages":
        (small, large) = (each for each in run.sizes if each.axis == "mixed")
        assert (small.from_bytes, small.below_bytes, small.calls, large.calls) == (1 << 12, 1 << 17, 1200, 1)
        assert small.seconds == pytest.approx(1200 * 5e-5)


def test_messages_by_size(tmp_path):
    """Three of 1 MiB in 0.5 s each, of which compute waits for one, and a barrier's 8 bytes."""
    for rank in (0, 1):
        calls = [reduce_of(rank, 10.0 + at, 10.5 + at, wait=10.5 + at if at else None) for at in range(3)]
        calls.append(reduce_of(rank, 14.0, 14.25, size=8))
        write(tmp_path, rank, StepRecord(1, 10.0, 15.0, {}, [], calls))
    large, small = analyse(tmp_path).sizes
    assert (large.kind, large.from_bytes, large.below_bytes) == ("all-reduce", 1 << 17, 1 << 22)
    assert (large.calls, large.sent_bytes, large.seconds) == (3, 3 * MIB, 1.5)
    assert (large.bytes_per_s, large.share) == (2 * MIB, 0.3)
    assert (small.from_bytes, small.below_bytes, small.calls, small.share) == (0, 1 << 12, 1, 0.05)


def test_copies_on_their_own_queue_are_waited_for_in_the_gaps_alone():
    spans = [Span("block", "b", "forward", 0.0, 4.0), Span("copy out", "b", "", 1.0, 5.0)]
    step = StepRecord(0, 0.0, 8.0, {}, spans, starved=[(3.0, 4.0), (6.0, 7.0)])
    on_gpu = summarise_step(step, beside_compute=("copy out", "copy in")).idle_s
    # Of the gap from 4 to 8 one second is a copy's and one the host's; the host's other one lies within the block.
    assert on_gpu == {"data": 0, "save": 0, "copies": 1.0, "host": 2.0, "other": 2.0}
    assert summarise_step(StepRecord(0, 0.0, 8.0, {}, spans)).idle_s["copies"] == 4.0


def test_what_no_span_covers_is_told_by_phase():
    spans = [
        Span("data", "", "", 0.0, 1.0),
        Span("block", "b", "forward", 2.0, 4.0),
        Span("block", "b", "recompute", 7.0, 8.0),
        Span("block", "b", "backward", 8.0, 9.0),
        Span("optimizer", "", "", 14.0, 15.0),
    ]
    parts = summarise_step(StepRecord(0, 0.0, 16.0, {}, spans)).parts_ns
    other = {part.phase: time / 1e9 for part, time in parts.items() if part.region == "other"}
    assert other == {"forward": 1.0, "loss": 3.0, "after backward": 6.0}
