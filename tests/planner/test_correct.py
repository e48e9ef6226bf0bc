"""A run beside its forecast, and hardware that is corrected by it: the next forecast is what was measured."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from opensora_accel import cli
from opensora_accel.observe import Forecast
from opensora_accel.plan import Plan
from opensora_accel.planner.candidates import Passes, Request
from opensora_accel.planner.correct import factors_of
from opensora_accel.planner.foresee import forecast_of
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.search import exact
from opensora_accel.profiler.records import CommunicationCall, RecordWriter, RunRecord, Span, StepRecord
from tests.planner.stand_in import StandInWorkload, use_stand_ins

PLAN = Plan(dp_shard=2, ulysses=4, sharding="zero3", checkpoint="full", precision="bf16")
WORLD = 8
USUAL = Hardware.named("h100x8").slowness
SLOWER = {
    "slowness": USUAL | {"attention": 1.4 * USUAL["attention"]},
    "collective_slowness": {"all-to-all 4/8": 2.0},
}


def planned(hardware, accumulation=1):
    """The candidate, and the forecast of it, on named hardware or a file's."""
    request = Request(((StandInWorkload(num_tokens=16384, channels=1536), 1.0),), hardware, WORLD)
    candidate = exact(request, PLAN, Passes(accumulation))
    return candidate, forecast_of(request, candidate)


def record_run(folder, candidate, seconds=2e-3, data_s=0.0, plan=PLAN, num_blocks=4):
    """Files of a run whose ranks took what a simulated step takes, and so long outside of it."""
    timeline, trace = candidate.timeline, candidate.trace
    for rank in range(WORLD):
        first = rank // 4 * 4
        writer = RecordWriter(
            folder,
            RunRecord(
                rank, WORLD, groups={"ulysses": list(range(first, first + 4))}, plan=plan.to_dict(),
                model={"num_blocks": num_blocks}, started_at=1.79e9,
            ),
        )  # fmt: skip
        length = timeline.step_s + seconds
        for number in range(4):
            zero = number * length + data_s * number
            spans = [Span("data", "", "", zero, zero + data_s)] if data_s else []
            zero += data_s
            calls = []
            for span in timeline.spans:
                operation = trace.operations[span.operation]
                times = zero + span.start_s, zero + span.end_s
                if operation.kind == "collective":
                    others = [each for each in range(first, first + 4) if each != rank]
                    sent = {each: operation.num_bytes // 3 for each in others}
                    exposed = timeline.exposed.get(span.operation, 0.0)
                    calls.append(
                        CommunicationCall(
                            operation.collective,
                            "ulysses",
                            "ulysses",
                            *times,
                            exposed,
                            sum(sent.values()),
                            sent,
                        )
                    )
                elif operation.phase == "optimizer":
                    spans.append(Span("optimizer", "", "", *times))
                else:
                    region = "attention" if operation.kind == "attention" else "block"
                    spans.append(Span(region, f"blocks.{operation.block}", operation.phase, *times))
            writer.step(StepRecord(number, zero - data_s, zero + timeline.step_s + seconds, {}, spans, calls))
        writer.close()
    return folder


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A plan with its forecast, and a run of it that was slower in attention and in one collective."""
    use_stand_ins(monkeypatch)
    monkeypatch.chdir(tmp_path)
    usual = Hardware.named("h100x8")
    _, forecast = planned(usual)
    PLAN.save("plan.json")
    forecast.save(tmp_path / "plan.json")
    slower, _ = planned(dataclasses.replace(usual, **SLOWER))
    record_run(tmp_path / "profile", slower, seconds=0.0)
    return slower, forecast


def report(*more):
    return cli.main(["report", "profile", "--against", "plan.json", *more])


def table(path="profile/report.json"):
    with open(path) as file:
        found = json.load(file)["against"]
    return {row["what"]: row for row in found["rows"]}


def test_the_table_has_what_was_foreseen_and_measured(measured, capsys):
    slower, forecast = measured
    assert report() == 0
    told, rows = capsys.readouterr().out, table()
    assert rows["step"]["forecast"]["expected"] == forecast.step_s.expected
    assert rows["step"]["measured"]["median"] == pytest.approx(slower.timeline.step_s)
    for phase in ("forward", "recompute", "backward"):
        assert rows[f"attention, {phase}"]["ratio"] == pytest.approx(1.4, rel=1e-3)
        assert rows[f"attention, {phase}"]["is_outside"] == (
            1 + Hardware.named("h100").uncertainties["attention"] < 1.4
        )
        assert rows[f"blocks, {phase}"]["ratio"] == pytest.approx(1.0, rel=1e-3)
    over = "all-to-all over ulysses"
    assert (
        rows[f"{over}: time"]["ratio"] == pytest.approx(2.0, rel=1e-3) and rows[f"{over}: time"]["is_outside"]
    )
    assert rows[f"{over}: calls"]["ratio"] == 1 and not rows[f"{over}: calls"]["is_outside"]
    assert rows[f"{over}: exposed"]["measured"]["median"] == pytest.approx(
        slower.timeline.exposed_by_axis["ulysses"]
    )
    late = rows["waiting for late ranks"]
    assert late["forecast"] is None and late["ratio"] is None and "no rank is late in a forecast" in told
    idle = rows["idle, while the host starts kernels"]
    assert idle["measured"] is None and "a CPU does not tell it" in told
    assert "against the forecast of plan.json (stand-in on h100x8" in told and " outside" in told
    page = Path("profile/report.html").read_text()
    assert "Forecast and measurement</h2>" in page and "outside of the forecast" in page


def test_a_second_forecast_foresees_what_was_measured(measured, capsys):
    slower, forecast = measured
    assert abs(forecast.step_s.expected / slower.timeline.step_s - 1) > 0.1
    assert report("--correct", "mine.json") == 0
    told = capsys.readouterr().out
    found = re.search(r"attention takes ([\d.]+) times what the figures say", told)
    assert found and float(found[1]) == pytest.approx(SLOWER["slowness"]["attention"], rel=0.01)
    hardware = Hardware.load("mine.json")
    assert hardware.sources["slowness.attention"].startswith("2026-09-21: run")
    assert hardware.sources["collective_slowness.all-to-all 4/8"].startswith("2026-09-21: run")
    again, _ = planned(hardware)
    assert again.expected_s == pytest.approx(slower.timeline.step_s, rel=0.02)
    assert hardware.slowness["gemm"] == pytest.approx(USUAL["gemm"], abs=0.02)


def test_a_correction_is_replaced_and_never_counted_twice(measured, monkeypatch, tmp_path):
    for _ in range(2):  # the same run twice, into a file that has its corrections
        assert report("--correct", "mine.json") == 0
    first = Hardware.load("mine.json")
    assert first.collective_slowness["all-to-all 4/8"] == pytest.approx(2.0, rel=1e-3)
    assert first.slowness["attention"] == pytest.approx(SLOWER["slowness"]["attention"], rel=0.01)
    # A forecast that has them, of a run that has become faster: counted from the figures again.
    _, forecast = planned(first)
    forecast.save(tmp_path / "plan.json")
    faster, _ = planned(
        dataclasses.replace(
            Hardware.named("h100x8"), slowness={**SLOWER["slowness"], "attention": 1.1 * USUAL["attention"]}
        )
    )
    record_run(tmp_path / "profile", faster, seconds=0.0)
    assert report("--correct", "mine.json") == 0
    second = Hardware.load("mine.json")
    assert second.slowness["attention"] == pytest.approx(1.1 * USUAL["attention"], rel=0.01)
    assert second.collective_slowness["all-to-all 4/8"] == pytest.approx(1.0, rel=1e-2)
    again, _ = planned(second)
    assert again.expected_s == pytest.approx(faster.timeline.step_s, rel=0.02)


def test_factors_worked_by_hand():
    found = factors_of([({"gemm": 3.0, "memory": 1.0}, 5.5), ({"memory": 1.0}, 1.0)])
    assert found == {"gemm": pytest.approx(1.5, rel=1e-2), "memory": pytest.approx(1.0, rel=1e-2)}
    # A class of little time is lost in the noise of the others, whose parts do not fit together.
    found = factors_of([({"gemm": 1.0, "memory": 1e-3}, 2.0), ({"gemm": 1.0, "memory": 2e-3}, 1.5)])
    assert found == {"gemm": pytest.approx(1.75, rel=1e-2), "memory": pytest.approx(1.75, rel=0.05)}
    # What would be less than nothing is bounded, and the rest is found with that.
    found = factors_of([({"gemm": 2.0, "memory": 1.0}, 4.0), ({"gemm": 1.0, "memory": 1.0}, 1.0)])
    assert found["memory"] == pytest.approx(0.2) and 1 < found["gemm"] < 2
    # Parts that do not tell two classes apart give both the factor of the whole.
    found = factors_of([({"gemm": 3.0, "attention": 1.0}, 8.0)])
    assert found == {"gemm": pytest.approx(2.0, rel=1e-3), "attention": pytest.approx(2.0, rel=1e-3)}
    assert factors_of([]) == {}


def test_another_run_or_another_hardware_is_refused(measured, capsys, tmp_path):
    slower, _ = measured

    def refused(*arguments):
        assert report(*arguments) == 2
        return capsys.readouterr().err

    Hardware.named("a100x8").save("other.json")
    assert "other.json is of a100x8, and the forecast is for h100x8" in refused("--correct", "other.json")
    assert "there is no folder" in refused("--correct", "nowhere/mine.json")
    record_run(tmp_path / "profile", slower, plan=PLAN.replace(checkpoint="selective"))
    assert "had another plan than plan.json (checkpoint: full → selective)" in refused()
    record_run(tmp_path / "profile", slower, num_blocks=40)
    assert "trained a model of 40 blocks, and the forecast beside plan.json is of one of 4" in refused()
    assert cli.main(["report", "profile", "--correct", "mine.json"]) == 2
    assert "--correct follows from --against PLAN" in capsys.readouterr().err
    Forecast.beside(tmp_path / "plan.json").unlink()
    assert "there is no forecast beside plan.json" in refused()


def test_waiting_for_data_is_told_and_not_foreseen(measured, capsys, tmp_path):
    slower, _ = measured
    record_run(tmp_path / "profile", slower, data_s=0.2)
    assert report() == 0
    data = table()["data"]
    assert data["forecast"] is None and data["measured"]["median"] == pytest.approx(0.2)
