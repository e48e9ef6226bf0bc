"""What the comparison of techniques counts is checked; its times are not, because this machine is shared."""

import json

import pytest
from techniques import NONE, TECHNIQUES, WHOLE, compare, main

from opensora_accel import Plan
from opensora_accel.observe.fitting import BlockMemory, StepMemory


def row(name, peak, workers):
    plan, against = TECHNIQUES[name]
    blocks = [{"parameters": 10, "inputs": 5, "kept": 100, "mlp": 40}] * 4
    memory = {"plan": TECHNIQUES[against][0].to_dict(), "blocks": blocks, "parameters_outside": 0}
    memory |= {"gradient_ratio": 1.0, "state_ratio": 2.0}
    seen = {"peak_bytes": peak, "accounting": memory, "bytes_by_kind": {"other": peak}}
    return {"strategy": name, "against": against, "plan": plan.to_dict(), "workers": workers, "seen": seen}


def test_time_is_paid_on_all_devices_and_memory_is_held_against_its_own_reference():
    rows = [
        row(NONE, 600, 1),
        row("ulysses 2", 400, 2),
        row("ring 4", 300, 2),
        row(WHOLE, 800, 2),
        row("zero3", 600, 2),
    ]
    compare(rows, [[1.0, 2.0], [0.6, 1.2], [0.5, 1.0], [2.0, 4.0], [3.0, 6.0]])
    assert [each["paid"]["median"] for each in rows] == pytest.approx([1, 1.2, 1.0, 1, 1.5])
    assert [each["saved"] for each in rows] == pytest.approx([0, 1 / 3, 1 / 2, 0, 1 / 4])
    blocks = (BlockMemory(10, 5, 100, 40),) * 4
    plain = StepMemory(Plan(), blocks, 0, gradient_ratio=1.0, state_ratio=2.0)
    assert rows[1]["accounted_bytes"] == plain.needs(Plan(ulysses=2))
    assert rows[1]["deviation"] == pytest.approx(rows[1]["accounted_bytes"] / 400 - 1)


@pytest.mark.prove
def test_a_short_run_has_its_rows(tmp_path):
    paths = [
        "--output",
        f"{tmp_path}/t.json",
        "--markdown",
        f"{tmp_path}/t.md",
        "--picture",
        f"{tmp_path}/t.png",
    ]
    assert main(["--device", "cpu", "--quick", *paths]) == 0
    result = json.loads((tmp_path / "t.json").read_text())
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    rows = {each["strategy"]: each for each in result["techniques"]}
    assert list(rows) == [name for name, (plan, _against) in TECHNIQUES.items() if plan.world_size <= 2]
    for each in rows.values():
        assert sum(size for kind, size in each["seen"]["bytes_by_kind"].items() if "host" not in kind) == (
            pytest.approx(each["seen"]["peak_bytes"], rel=0.02)
        )
        assert len(each["paid"]["rounds"]) == 2 and each["paid"]["q1"] <= each["paid"]["q3"]
    peaks = {name: each["seen"]["peak_bytes"] for name, each in rows.items()}
    assert peaks["checkpoint full"] < peaks["checkpoint selective"] < peaks["none"]
    assert peaks["zero3"] < peaks[WHOLE] and peaks["ring 2"] < peaks[NONE]
    moved = [rows[f"checkpoint full, offload {share}"]["seen"]["bytes_by_kind"] for share in ("0.5", "1.0")]
    assert all(kinds["block inputs on the host"] > 0 for kinds in moved)
    assert rows[NONE]["deviation"] == pytest.approx(0, abs=1e-3)
