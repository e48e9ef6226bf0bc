"""Published figures beside forecasts: what is printed, and that every training step stands with its source."""

import statistics
import sys

import published
import pytest
from published_rows import Fit, Row, fitted, left_out, summary
from published_training import SOURCES, Figure

from opensora_accel.planner.hardware import Hardware
from tests.tiers import PROVE

STEPS = [(source, step) for source in SOURCES for step in source()]


def test_every_training_step_has_a_source_and_a_figure():
    assert len(STEPS) >= 20
    assert len({(step.source, step.what) for _source, step in STEPS}) == len(STEPS)
    for source, step in STEPS:
        assert source.__doc__.startswith("github.com/") and "Assumed:" in source.__doc__
        Hardware.named(step.hardware).nodes_of(step.plan.world_size)
        assert step.figure.value > 0


def a_row(source, published_s, foreseen_s, fixed_s=0.0):
    """Of seconds, of which some are no compute."""
    hardware = Hardware.named("h100x8")

    def seconds(fitted):
        return fixed_s + foreseen_s * fitted.slowness["gemm"]

    return Row(source, "a step", "s", published_s, hardware, seconds)


def test_what_is_fitted_is_the_factor_of_the_median_source_and_the_width_of_nine_of_ten():
    # Sources are 1.1, 1.2 and 1.5 times slower than foreseen; the first one has most figures.
    rows = [a_row("one", 1.1, 1.0) for _ in range(6)] + [a_row("two", 2.4, 2.0), a_row("two", 2.4, 2.0)]
    rows += [a_row("three", 15.0, 10.0), a_row("three", 15.0, 10.0)]
    fit = fitted(rows)
    assert fit.factor == pytest.approx(1.2)
    # Nine of ten of them: those of the third source are 25 % slower than that.
    assert fit.width == 0.26
    assert fitted(rows[:8]) == Fit(pytest.approx((1.1 * 1.2) ** 0.5), 0.06)
    # What no factor multiplies is no slower.
    assert fitted([a_row("one", 3.0, 1.0, fixed_s=1.5)] * 2).factor == pytest.approx(1.5, rel=0.02)


def test_a_figure_is_judged_by_the_other_sources():
    rows = [a_row("one", 1.0, 1.0)] * 3 + [a_row("two", 1.5, 1.0)] * 3
    judged = left_out(rows)
    assert [fit.factor for _row, fit in judged] == pytest.approx([1.5] * 3 + [1.0] * 3)
    assert summary("seconds", judged) == (
        "seconds: 6 figures of 2 sources, median error 41.7%, worst 50%, 0 in their interval (0%)"
    )


def test_an_interval_holds_where_compute_is_within_its_width():
    row = a_row("one", 1.3, 1.0)
    assert row.interval(Fit(1.2, 0.1)) == pytest.approx((1.08, 1.32)) and row.holds(Fit(1.2, 0.1))
    assert not row.holds(Fit(1.1, 0.1)) and row.error(Fit(1.1, 0.1)) == pytest.approx(1.1 / 1.3 - 1)
    memory = Row("one", "a step", "GiB", 50.0, size=48.0)
    assert memory.interval(Fit(1.0, 0.05)) == pytest.approx((45.6, 50.4))


def test_the_table_has_each_figure_and_a_line_of_each_kind(monkeypatch, capsys):
    rows = [a_row("one", 1.0, 1.0), a_row("two", 1.5, 1.0), Row("three", "a step", "GiB", 50.0, size=48.0)]
    monkeypatch.setattr(published, "TABLES", {"some": lambda: iter(rows)})
    monkeypatch.setattr(sys, "argv", ["published.py"])
    assert published.main() == 0
    out = capsys.readouterr().out
    assert out.count("| one: a step | 1 s | +0% |") == 1 and "| three: a step | 50 GiB | -4% |" in out
    assert "seconds: 2 figures of 2 sources" in out and "memory: 1 figures of 1 sources" in out
    assert "seconds, fitted to all: 1.225 times as much" in out


@PROVE
def test_an_autocast_step_reserves_what_was_published():
    """CogVideoX-2B with adapters of rank 16, without checkpoints: 43.76 GiB in the first step."""
    step = next(step for _source, step in STEPS if step.what == "CogVideoX-2b, LoRA of rank 16, batch 1")
    assert step.figure == Figure("in the first step", 43.764)
    assert step.row().error(Fit(1.0, 0.0)) == pytest.approx(0.0, abs=0.02)


@PROVE
def test_hardware_has_what_is_fitted_to_all_published_figures():
    rows = [row for rows_of in published.TABLES.values() for row in rows_of()]
    assert len(rows) >= 50
    h100, errors, held = Hardware.named("h100"), [], []
    for kind, factor, width in (
        ("seconds", h100.slowness["gemm"], h100.uncertainties["gemm"]),
        ("memory", 1 + h100.allocator_slack, h100.uncertainties["reserved"]),
    ):
        of_kind = [row for row in rows if row.kind == kind]
        fit = fitted(of_kind)
        assert (fit.factor, fit.width) == (pytest.approx(factor, abs=0.006), width)
        judged = left_out(of_kind)
        errors += [abs(row.error(each)) for row, each in judged]
        held += [row.holds(each) for row, each in judged]
        assert (
            f"{sum(row.holds(each) for row, each in judged)} of {len(judged)} figures"
            in h100.sources["uncertainties"]
        )
    assert statistics.median(errors) <= 0.1
    assert 0.85 <= statistics.mean(held) <= 0.95
    nemo = [row for row in rows if row.source.startswith("NeMo Automodel")]
    assert len(nemo) == 2 and all(abs(row.error(Fit(1.0, 0.0))) <= 0.05 for row in nemo)
