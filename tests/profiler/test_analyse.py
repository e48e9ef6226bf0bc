"""What records mean: every instant has one part, each made fault is named, and a healthy run has none."""

import dataclasses
import json
import random
import re
import resource

import pytest

from opensora_accel.profiler.analyse import analyse
from opensora_accel.profiler.findings import findings_of
from opensora_accel.profiler.intervals import exposed_seconds, union
from opensora_accel.profiler.rank_summary import OTHER, Part, exclusive_ns, pieces_of
from opensora_accel.profiler.records import (
    CommunicationCall,
    MemorySample,
    RecordWriter,
    RunRecord,
    Span,
    StepRecord,
)
from tests.profiler.synthetic import BAD_PEER, BAD_RANK, CASES, FOLLOWED, write_run

KIND_OF_CASE = {
    "slow data": "slow data",
    "exposed ring": "exposed communication",
    "optimizer peak": "memory peak",
    "imbalance": "imbalance",
    "uneven mask": "uneven mask",
    "congested link": "congested link",
    "slow link": "slow link",
    "all loaders slow": "slow data",
    "host-bound": "host-bound",
    "tiny messages": "small messages",
    "fragmentation": "fragmentation",
}


def drawn_intervals(seed, count, longest=40):
    draw = random.Random(seed)
    starts = [draw.randrange(-10, 100) for _ in range(draw.randrange(count))]
    return [(start, start + draw.randrange(longest)) for start in starts]


def innermost_by_instant(start, end, spans, waits):
    """The definition, one nanosecond at a time."""
    parts = {}
    for now in range(start, end):
        waiting = [wait for wait in sorted(waits) if wait[0] <= now < wait[1]]
        around = [span for span in spans if span[0] <= now < span[1]]
        if waiting:
            part = None
            busy_until = start
            # The first of overlapping waits keeps what both claim.
            for first, last, name in sorted(waits):
                if max(first, busy_until) <= now < last:
                    part = name
                    break
                busy_until = max(busy_until, last)
        elif around:
            part = max(around, key=lambda span: (span[0], -span[1]))[2]
        else:
            part = OTHER
        parts[part] = parts.get(part, 0) + 1
    return parts


@pytest.mark.parametrize("seed", range(200))
def test_every_instant_belongs_to_one_part(seed):
    spans = [(*each, Part(f"span {i}", "", "")) for i, each in enumerate(drawn_intervals(seed, 8))]
    waits = [
        (*each, Part("exposed", f"axis {i}", "")) for i, each in enumerate(drawn_intervals(-seed - 1, 4))
    ]
    # Two that are equal have no order of their own.
    spans = list({span[:2]: span for span in spans}.values())
    parts = exclusive_ns(0, list(pieces_of(0, 90, spans)), waits)
    assert sum(parts.values()) == 90
    assert parts == innermost_by_instant(0, 90, spans, waits)


@pytest.mark.parametrize("seed", range(50))
def test_exposed_seconds_is_communication_without_compute(seed):
    compute, communication = drawn_intervals(seed, 10), drawn_intervals(seed + 1000, 10)
    covered = {now for start, end in communication for now in range(start, end)}
    covered -= {now for start, end in compute for now in range(start, end)}
    assert exposed_seconds(compute, communication) == len(covered)
    assert exposed_seconds([], communication) == sum(end - start for start, end in union(communication))


def write(folder, rank, steps, **facts):
    writer = RecordWriter(folder, RunRecord(rank, facts.pop("world_size", 1), **facts))
    for step in steps:
        writer.step(step)
    writer.close()


def test_a_step_worked_by_hand(tmp_path):
    # The picture in rank_summary.py, after a warm-up step.
    step = StepRecord(
        1,
        10.0,
        20.0,
        {"loss": 2.0, "tokens": 30.0},
        [Span("block", "b", "forward", 12.0, 19.0), Span("attention", "a", "forward", 13.0, 16.0)],
        [CommunicationCall("send", "ring", "ring", 14.0, 16.0, 1.0, 8, {1: 8})],
        [
            MemorySample(11.0, {"parameters": 5}),
            MemorySample(15.5, {"parameters": 9, "block inputs on the host": 4}),
        ],
    )
    write(
        tmp_path, 0, [dataclasses.replace(step, step=0, start_s=0.0), step], model_flops=50.0, peak_flops=10.0
    )
    run = analyse(tmp_path)
    rank = run.ranks[0]
    assert [(part.region, part.axis, part.phase, part.mean_s) for part in rank.parts] == [
        ("block", "", "forward", 4.0),
        ("attention", "", "forward", 2.0),
        ("exposed", "ring", "", 1.0),
        ("other", "", "", 1.0),
        ("other", "", "forward", 2.0),
    ]
    assert rank.peak.device_bytes == 9 and rank.peak.host_bytes == 4 and rank.peak.region == "attention"
    assert rank.peak.elsewhere_bytes == 5
    assert run.steps[1].tokens_per_s == 3.0 and run.steps[1].loss == 2.0
    assert run.sent == [(0, 1, 8.0)] and run.axes[0].bytes_per_s == 4.0 and run.axes[0].exposed_share == 0.5
    (kind,) = run.kinds
    assert (kind.axis, kind.calls, kind.sent_bytes, kind.steps) == ("ring", 1.0, 8.0, 1)
    assert run.utilization.mfu == 0.5 and run.utilization.hfu is None
    assert "hardware_flops" in run.utilization.why_not
    assert run.warm_up_steps == 1 and "Step 0 is a warm-up" in run.notes[0]


def test_copies_beside_compute_take_no_time_of_the_step(tmp_path):
    spans = [Span("block", "b", "forward", 0.0, 4.0), Span("copy out", "b", "", 1.0, 5.0)]
    for name, beside in (("cpu", ()), ("gpu", ("copy out", "copy in"))):
        write(tmp_path / name, 0, [StepRecord(0, 0.0, 6.0, {}, spans)], beside_compute=beside)
    cpu, gpu = (analyse(tmp_path / name) for name in ("cpu", "gpu"))
    assert {part.region: part.mean_s for part in cpu.parts} == {"block": 1.0, "copy out": 4.0, "other": 1.0}
    assert {part.region: part.mean_s for part in gpu.parts} == {"block": 4.0, "other": 2.0}
    assert [lane.exposed_s for lane in cpu.offload.lanes] == [0.0, 4.0, 0.0]
    assert [lane.exposed_s for lane in gpu.offload.lanes] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("case", CASES)
def test_each_made_fault_is_named_and_nothing_else(tmp_path, case):
    run = analyse(write_run(tmp_path, case))
    found = findings_of(run)
    assert {finding.kind for finding in found} - {"low ratio"} == (
        {KIND_OF_CASE[case]} if case in KIND_OF_CASE else set()
    )
    assert not found or found[0].kind == KIND_OF_CASE[case]
    if case == "exposed ring":
        assert found[0].axis == "ring" and "ring hides" in found[0].text
        assert [finding.kind for finding in found] == ["exposed communication", "low ratio"]
    elif case in ("congested link", "slow link"):
        assert found[0].ranks == (BAD_RANK, BAD_PEER) and found[0].axis == "ring"
        assert {(call.rank, call.peer) for call in run.congested} == {(BAD_RANK, BAD_PEER)}
    elif case in ("slow data", "imbalance", "uneven mask"):
        assert found[0].ranks == (BAD_RANK,)
        assert {step.slowest_rank for step in run.steps if not step.warm_up} == {BAD_RANK}
    elif case == "optimizer peak":
        assert "is in the optimizer" in found[0].text
    elif case == "all loaders slow":
        assert found[0].text.startswith("every rank waits for data: 0.3") and found[0].ranks == ()
    elif case == "host-bound":
        parts = {part.region: part.mean_s for part in run.parts if part.region in ("mlp", "optimizer")}
        assert len(parts) == 2 and found[0].seconds == pytest.approx(
            _seconds_of(run, "mlp", "optimizer"), rel=0.02
        )
    elif case == "tiny messages":
        assert found[0].axis == "mixed" and "1,200 of its 1,201 calls" in found[0].text
        assert found[0].seconds == pytest.approx(1200 * 5e-5)
    elif case == "fragmentation":
        assert "3 GiB (25%) lie free between tensors" in found[0].text
    for finding in found:
        assert 0 <= finding.share <= 1 and finding.share == pytest.approx(finding.seconds / run.mean_step_s)
    for rank in run.ranks:
        assert sum(part.mean_s for part in rank.parts) == pytest.approx(rank.mean_step_s, rel=1e-9)
        own = rank.data_s + rank.work_s + rank.network_s + rank.waited_s
        assert own == pytest.approx(rank.mean_step_s, rel=1e-9)


def _seconds_of(run, *regions):
    return sum(part.mean_s for part in run.parts if part.region in regions)


def test_steps_of_memory_and_those_after_them_are_in_no_mean(tmp_path):
    healthy = analyse(write_run(tmp_path / "healthy", num_steps=8))
    run = analyse(write_run(tmp_path / "followed", "after memory", num_steps=8))
    assert run.num_steps == 5 and healthy.num_steps == 7
    assert run.mean_step_s == pytest.approx(healthy.mean_step_s, rel=0.01)
    assert [step.step for step in run.steps if step.slowed_by] == [FOLLOWED, FOLLOWED + 1]
    assert any("2 more step(s) are left out" in note for note in run.notes)


def test_one_of_two_ranks_that_waits_is_not_all(tmp_path):
    """The median of two is their mean."""
    for rank, late_s in ((0, 0.0), (1, 0.6)):
        steps = []
        for n in range(3):
            come = n + 0.39 + late_s
            call = CommunicationCall(
                "all-reduce", "mixed", "mixed", come, n + 1.0, n + 1 - come, 1 << 20, {1 - rank: 1 << 20}
            )
            steps.append(StepRecord(n, n, n + 1.0, {}, [Span("data", "", "", n, n + late_s)], [call]))
        write(tmp_path, rank, steps, world_size=2, groups={"mixed": [0, 1]})
    (found,) = findings_of(analyse(tmp_path))
    assert found.kind == "slow data" and found.ranks == (1,)


def test_waiting_that_nobody_can_split_is_not_the_networks(tmp_path):
    """Without one rank's file its group's calls cannot be laid side by side, and the others waited for it."""
    write_run(tmp_path, "slow data", num_ranks=4)
    whole = analyse(tmp_path)
    (tmp_path / f"rank_{BAD_RANK:05d}.jsonl").unlink()
    run = analyse(tmp_path)
    assert whole.ranks[0].waited_s > 0.25
    assert all(rank.network_s == 0 and rank.waited_s > 0.25 for rank in run.ranks)
    assert [finding.kind for finding in findings_of(run)] == []
    assert any("cannot be laid side by side" in note for note in run.notes)


def test_small_messages_are_not_congested(tmp_path):
    """Calls of 64 bytes whose time varies by a factor of ten, on two machines."""
    for rank in (0, 1):
        steps = []
        for number in range(3):
            starts = [number + 0.1 * i for i in range(4)]
            calls = [
                CommunicationCall(
                    "all-reduce", "mixed", "mixed", start, start + took, took, 64, {1 - rank: 64}
                )
                for start, took in zip(starts, (1e-3, 1e-3, 1e-3, 6e-2), strict=True)
            ]
            steps.append(StepRecord(number, float(number), number + 1.0, {}, [], calls))
        write(
            tmp_path, rank, steps, world_size=2, groups={"mixed": [0, 1]}, environment={"host": f"node{rank}"}
        )
    run = analyse(tmp_path)
    assert run.congested == [] and [finding.kind for finding in findings_of(run)] == ["small messages"]


def test_ranks_that_stopped_or_are_missing_are_told(tmp_path):
    write_run(tmp_path, num_ranks=4, num_steps=4)
    path = tmp_path / "rank_00001.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    run = analyse(tmp_path)
    assert [step.step for step in run.steps] == [0, 1]
    assert any("stopped after step 1" in note for note in run.notes)
    path.unlink()
    assert any("1 of 4 ranks have no file here (rank 1)" in note for note in analyse(tmp_path).notes)
    for other in tmp_path.glob("rank_*.jsonl"):
        other.write_text(other.read_text().splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match="no step that all 3 ranks have finished; profile a run for longer"):
        analyse(tmp_path)


def processor_s():
    """Of this process, and of those that it waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return [usage.ru_utime + usage.ru_stime for usage in usages]


@pytest.mark.prove
def test_large_files_are_read_in_time_and_by_several_processes(tmp_path):
    """By two processes, in less than four times what one takes to parse the JSON: a gigabyte in under a minute.

    Processor time, beside that of the same machine at the same time: other work on it slows both.
    """
    write_run(tmp_path, num_ranks=8, num_steps=4, num_blocks=8)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.jsonl"))
    whole_steps = -(-(200 << 20) // size) * 4
    for path in tmp_path.glob("*.jsonl"):
        run, *steps = path.read_text().splitlines()
        rows = (re.sub(r'"step":\d+', f'"step":{n}', steps[n % 4], count=1) for n in range(whole_steps))
        path.write_text("\n".join([run, *rows, ""]))
    size = sum(path.stat().st_size for path in tmp_path.glob("*.jsonl"))
    assert size > 190 << 20
    before = processor_s()
    run = analyse(tmp_path, max_processes=2)
    own_s, readers_s = (after - begin for begin, after in zip(before, processor_s(), strict=True))
    assert run.num_steps == whole_steps - 1
    before = processor_s()
    for path in tmp_path.glob("*.jsonl"):
        for line in path.open():
            json.loads(line)
    json_s = processor_s()[0] - before[0]
    print(
        f"{size / 2**20:.0f} MB: {readers_s:.1f} s in two readers, {own_s:.1f} s after; JSON {json_s:.1f} s"
    )
    assert readers_s / 2 + own_s < 4 * json_s
    assert readers_s > own_s
