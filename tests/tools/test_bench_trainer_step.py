"""The benchmark of the trainer's step runs, and counts what it says; its times are not looked at."""

import json

from trainer_step import main


def test_both_sides_take_steps(tmp_path):
    assert main(["--quick", "--device", "cpu", "--output", str(tmp_path / "result.json")]) == 0
    (row,) = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert all(len(row[side]["rounds"]) == 2 for side in ("trainer", "plain loop", "ratio"))
    assert row["ratio"]["rounds"][0] > 0
