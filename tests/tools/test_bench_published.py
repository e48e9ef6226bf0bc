"""Published figures beside forecasts: what is printed, and that every training step stands with its source."""

import dataclasses
import sys

import published
import pytest
from published_training import SOURCES, Figure

from opensora_accel.planner.hardware import Hardware

STEPS = [(source, step) for source in SOURCES for step in source()]


def test_every_training_step_has_a_source_and_a_figure():
    assert len(STEPS) >= 20
    assert len({(step.source, step.what) for _source, step in STEPS}) == len(STEPS)
    for source, step in STEPS:
        assert source.__doc__.startswith("github.com/") and "Assumed:" in source.__doc__
        Hardware.named(step.hardware).nodes_of(step.plan.world_size)
        assert step.figure.value > 0


def test_a_summary_of_errors_and_of_what_lies_in_its_interval(monkeypatch, capsys):
    rows = [
        {"what": "one", "published": 10.0, "low": 8.0, "high": 13.0, "unit": "s"},
        {"what": "two", "published": 10.0, "low": 6.0, "high": 8.0, "unit": "s"},
        {"what": "three", "published": 2.0, "low": 2.1, "high": 2.1, "unit": "GiB"},
    ]
    monkeypatch.setattr(published, "TABLES", {"some": lambda: rows})
    monkeypatch.setattr(sys, "argv", ["published.py"])
    assert published.main() == 0
    *_table, seconds, memory = capsys.readouterr().out.splitlines()
    assert seconds == "seconds, figures: 2, median error 18%, worst 30%, 1 within their interval"
    assert memory == "memory, figures: 1, median error 5%, worst 5%, 0 within their interval"


@pytest.mark.prove
def test_a_step_is_foreseen_under_its_own_settings():
    """CogVideoX-2B with adapters of rank 16: with checkpoints less than half of what it needs without."""
    without, with_checkpoints = (
        next(step for _source, step in STEPS if step.what == f"CogVideoX-2b, LoRA of rank 16, batch {what}")
        for what in ("1", "4, checkpoints")
    )
    low, high = without.forecast()
    assert without.figure == Figure("reserved", 43.764) and low < high < 80
    same = dataclasses.replace(without, plan=with_checkpoints.plan)
    _low, less = same.forecast()
    assert less < 0.5 * low
