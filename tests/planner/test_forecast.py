"""What is foreseen of a plan: parts that add up to the simulated step, in a file that is read strictly."""

import json

import pytest

from opensora_accel import cli
from opensora_accel.observe import Forecast, axes_named
from opensora_accel.plan import Plan
from opensora_accel.planner.candidates import Passes, Request
from opensora_accel.planner.cost import Placement
from opensora_accel.planner.foresee import forecast_of
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.search import exact, simulated
from tests.planner.stand_in import StandInWorkload, use_stand_ins

CLIP = ("--model", "wan2.1-14b", "--frames", "81", "--height", "720", "--width", "1280")
PLAN = Plan(dp_shard=2, ulysses=4, sharding="zero3", checkpoint="full", precision="bf16")


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """The file of a plan of `opensora-accel plan`, with its forecast beside it."""
    use_stand_ins(monkeypatch)
    monkeypatch.chdir(tmp_path)
    arguments = ("--gpus", "8", "--hardware", "h100x8", "--set", "ulysses=4", "--output", "plan.json")
    assert cli.main(["plan", *CLIP, *arguments]) == 0
    return tmp_path / "plan.json"


ONE_SIZE = ((StandInWorkload(), 1.0),)


def request(mix=ONE_SIZE, **given):
    return Request(mix, Hardware.named("h100x8"), 8, **given)


@pytest.mark.parametrize("passes", [Passes(), Passes(accumulation=5)], ids=str)
def test_parts_add_up_to_the_step(monkeypatch, passes):
    use_stand_ins(monkeypatch)
    mix = (StandInWorkload(), 3.0), (StandInWorkload("long", num_tokens=16384), 1.0)
    candidate = exact(request(mix), PLAN, passes)
    forecast = forecast_of(request(mix), candidate)
    for end in range(3):
        sums = [forecast.parts[i].seconds[end] for i in range(len(forecast.parts))]
        assert sum(sums) == pytest.approx(forecast.step_s[end], rel=1e-9)
    assert {(part.region, part.phase) for part in forecast.parts} >= {
        ("attention", "forward"), ("attention", "recompute"), ("attention", "backward"), ("block", "forward"),
        ("block", "backward"), ("optimizer", ""), ("exposed", ""),
    }  # fmt: skip
    for part in forecast.parts:
        assert sum(part.by_kernel.values()) == pytest.approx(
            part.seconds.expected if part.region not in ("exposed", "idle") else 0.0
        )


def test_calls_are_those_of_the_trace(monkeypatch):
    use_stand_ins(monkeypatch)
    candidate = exact(request(), PLAN, Passes())
    (calls,) = forecast_of(request(), candidate).calls
    ((kind, axis), (count, sent)) = next(iter(candidate.trace.communication().items()))
    assert (calls.kind, calls.axis, calls.group) == (kind, axis, "all-to-all 4/8")
    assert (calls.calls, calls.sent_bytes) == (count, sent)
    timeline = simulated(candidate.trace, Hardware.named("h100x8"), Placement(8, 8))
    assert calls.seconds.expected == pytest.approx(timeline.busy_s["exchange"])
    assert calls.exposed.expected == pytest.approx(timeline.exposed_by_axis["ulysses"])


def test_it_is_written_beside_the_plan_and_read_back(planned):
    forecast = Forecast.of_plan(planned)
    assert forecast.plan == Plan.load(planned).to_dict() and forecast.hardware == "h100x8"
    assert forecast.world_size == 8 and forecast.num_blocks == 4 and "wan2.1-14b" in forecast.model
    low, expected, high = forecast.step_s
    assert 0 < low < expected < high
    assert sum(forecast.bytes_by_kind.values()) >= forecast.memory_bytes[0] > 0


def test_what_is_no_forecast_of_the_plan_is_refused(planned):
    path = Forecast.beside(planned)
    text = path.read_text()
    Plan(ulysses=8, precision="bf16").save(planned)
    with pytest.raises(ValueError, match=r"forecast of another plan than .*ulysses: 4 → 8.*plan again"):
        Forecast.of_plan(planned)
    Plan.from_dict(json.loads(text)["plan"]).save(planned)
    Forecast.of_plan(planned)
    for damage, message in (
        (text[: len(text) // 2], "no forecast of a plan"),
        (text.replace('"samples"', '"sample"'), "samples"),
        (text.replace('"num_blocks": 4', '"num_blocks": "4"'), "num_blocks must be a valid integer"),
        (json.dumps({"plan": {}}), "missing"),
    ):
        path.write_text(damage)
        with pytest.raises(ValueError, match=message):
            Forecast.of_plan(planned)
    path.unlink()
    with pytest.raises(ValueError, match=r"no forecast beside .*plan\.json, which would be .*plan again"):
        Forecast.of_plan(planned)


@pytest.mark.parametrize(
    ("one", "other", "plan"),
    [
        ("mixed", "ulysses", {"ulysses": 4}),
        ("mixed (dp_shard × ulysses)", "mixed", {"dp_shard": 2, "ulysses": 4}),
        ("data (dp_replicate × dp_shard)", "data", {"dp_replicate": 2, "dp_shard": 2, "ulysses": 2}),
        ("world (dp_shard × tp)", "world", {"dp_shard": 2, "tp": 2}),
        ("dp_shard × tp", "world", {"dp_shard": 2, "tp": 2}),
    ],
)
def test_an_axis_has_one_name(one, other, plan):
    assert axes_named(one, plan) == axes_named(other, plan)
    assert axes_named(one, {**plan, "ring": 2}) != axes_named("ring", {**plan, "ring": 2})
