"""`train` holds its step times against the forecast that lies beside its plan; `profile --against` tells by part."""

import json

import pytest

from opensora_accel.observe import Forecast
from opensora_accel.plan import Plan
from opensora_accel.planner.hardware import Hardware
from opensora_accel.training.metrics import StepTimes
from tests.tiers import PROVE


@pytest.fixture
def planned(config_file, run, tmp_path):
    """The plan of the tiny run on this kind of machine."""
    path = tmp_path / "plan.json"
    fixed = ("--set", "checkpoint=full", "--set", "mlp_chunks=1")
    asked = ("--gpus", 1, "--hardware", "cpux1", *fixed, "--output", path)
    assert run("plan", "--config", config_file, *asked)[0] == 0
    return path


def lines(told, word):
    return [line for line in told.splitlines() if word in line]


@PROVE
def test_one_line_after_twenty_steps(planned, config_file, run, tmp_path):
    status, told = run("train", "--config", config_file, "--plan", planned, "--steps", 21)
    assert status == 0
    (line,) = lines(told, "forecast")
    expected = Forecast.of_plan(planned).step_s.expected
    assert line.startswith("a step takes ") and f"forecast {expected:.3g} s" in line and "cpux1" in line
    # Of another plan, of none, and damaged.
    of_run = ("--config", config_file, "--steps", 20, "--output", tmp_path / "other")
    status, told = run("train", *of_run, "--plan", planned, "--plan.mlp_chunks", 2)
    assert status == 0 and "which is of another run: mlp_chunks: 1 → 2" in told and "a step takes" not in told
    Forecast.beside(planned).write_text("{")
    status, told = run("train", *of_run, "--plan", planned)
    assert status == 0 and "not held against a forecast: no forecast of a plan" in told
    Forecast.beside(planned).unlink()
    for plan in (("--plan", planned), ()):
        status, told = run("train", *of_run, *plan)
        assert status == 0 and "forecast" not in told


@pytest.mark.prove
def test_a_profile_is_held_against_it_and_corrects_hardware(planned, config_file, run, tmp_path):
    asked = ("--num-steps", 4, "--against", planned, "--correct", tmp_path / "mine.json")
    status, told = run("profile", "--config", config_file, "--plan", planned, *asked)
    assert status == 0
    for what in (
        "step",
        "attention, backward",
        "blocks, recompute",
        "optimizer",
        "outside of the blocks",
        "data",
    ):
        assert lines(told, f"  {what} "), what
    (found,) = (tmp_path / "run_profile").rglob("report.json")
    rows = {row["what"]: row for row in json.loads(found.read_text())["against"]["rows"]}
    # The same kernels by the same modules: what one side has, the other has too.
    for name, row in rows.items():
        if name.startswith(("attention", "blocks", "optimizer")):
            assert row["forecast"] and row["measured"] and row["ratio"] > 0, name
    corrected = Hardware.load(tmp_path / "mine.json")
    assert corrected.slowness != Hardware.named("cpux1").slowness and "slowness.gemm" in corrected.sources
    status, told = run(
        "profile",
        "--config",
        config_file,
        "--plan.checkpoint",
        "none",
        "--num-steps",
        3,
        "--against",
        planned,
    )
    assert status == 2 and "had another plan" in told


def test_the_line_by_hand(capsys):
    step = type(
        "Foreseen",
        (),
        {"step_s": (1.8, 2.0, 2.3), "hardware": "h100x8", "plan": Plan().to_dict(), "num_blocks": 4},
    )()
    times = StepTimes.of(step, Plan(), 4)
    for seconds in [60.0, *[2.1] * 9, *[2.5] * 10]:
        assert capsys.readouterr().out == ""
        times.add(seconds)
    line = capsys.readouterr().out
    assert line.startswith(
        "a step takes 2.5 s (median of steps 2 to 20); forecast 2 s (1.8 to 2.3) on h100x8: 1.25 times"
    )
    assert "profile --against PLAN" in line
    times.add(2.1)
    assert capsys.readouterr().out == "" and StepTimes.of(None, Plan(), 4) is None
    assert StepTimes.of(step, Plan(), 40) is None and "blocks: 4 → 40" in capsys.readouterr().out
