"""What a profiled run writes is what is read back, whole lines only."""

import dataclasses

import pytest

from opensora_accel.profiler.records import (
    CommunicationCall,
    MaskedAttention,
    MemorySample,
    RecordWriter,
    RunRecord,
    Span,
    StepRecord,
    rank_files,
    read_rank,
)

RUN = RunRecord(3, 8, {"ulysses": 1}, {"ulysses": [2, 3]}, plan={"ulysses": 2}, model_flops=1e12)
STEP = StepRecord(
    step=1,
    start_s=0.5,
    end_s=1.5,
    metrics={"loss": 1.0},
    spans=[Span("attention", "blocks.0.attn1", "forward", 0.6, 0.7)],
    calls=[CommunicationCall("all-to-all", "ulysses", "ulysses", 0.6, 0.7, 0.05, 10, {2: 10})],
    memory=[MemorySample(0.5, {"parameters": 3, "block inputs on the host": 7})],
    masks=[MaskedAttention("a causal mask", 2, 10, 8.0)],
)


def written(folder):
    writer = RecordWriter(folder, RUN)
    for number in (1, 2):
        writer.step(dataclasses.replace(STEP, step=number))
    writer.close()
    return rank_files(folder)[0]


def test_what_is_written_is_read(tmp_path):
    run, steps = read_rank(written(tmp_path))
    assert run == RUN and list(steps) == [dataclasses.replace(STEP, step=number) for number in (1, 2)]
    assert STEP.seconds == 1 and STEP.memory[0].device_bytes == 3


def test_a_killed_rank_leaves_whole_steps(tmp_path):
    path = written(tmp_path)
    path.write_text(path.read_text()[:-10])
    assert [step.step for step in read_rank(path)[1]] == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no record of a profiled run"),
        ('{"type":"step"}\n', "no record of a profiled run: rank is missing"),
        ('{"type":"run","rank":0,"world_size":1,"shoe":2}\n', "shoe"),
    ],
)
def test_another_file_is_refused(tmp_path, text, message):
    (tmp_path / "rank_00000.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rank(rank_files(tmp_path)[0])


def test_a_damaged_line_is_told_by_its_number(tmp_path):
    path = written(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "{}\n", lines[2]]))
    with pytest.raises(ValueError, match=":2 is no step"):
        list(read_rank(path)[1])
    with pytest.raises(ValueError, match=r"no rank_\*.jsonl; give the folder that a profiled run wrote"):
        rank_files(tmp_path / "elsewhere")
