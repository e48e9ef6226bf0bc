"""Weights that are one on one device and two on ranks, and those that only look alike."""

from __future__ import annotations

import pytest

from opensora_accel.verify import verify
from opensora_accel.verify.causes import Consequence
from tests.tiers import PROVE
from tests.verify import ties

MESHES = [{"data": 2}, {"data": 3}]
BOTH = "head.weight and table.weight are one tensor on one device and two over data"
RIGHT = {
    "tied": (ties.plainly, ties.Tied),
    "tied again": (ties.tied_again, ties.Tied),
    "sharded as a whole": (ties.sharded_together, ties.Tied),
    "two that get the sum": (ties.summed, ties.Tied),
    "two of equal values": (ties.plainly, ties.Equal),
    "two of equal values, materialised": (ties.materialised, ties.Equal),
    "two of equal values, sharded": (ties.sharded_apart, ties.Equal),
}
GETS = ": of its gradient's norm table.weight gets "
WRONG = {
    "materialised": (ties.materialised, "untied", BOTH + GETS, "in materialise)"),
    "assigned": (ties.assigned, "untied", BOTH + GETS, "in assigned)"),
    "exchanged": (ties.exchanged, "untied", BOTH + GETS, "in exchanged)"),
    "tied again and exchanged": (ties.tied_again_and_exchanged, "untied", BOTH + GETS, "in exchanged)"),
    "sharded apart": (ties.sharded_apart, "untied", BOTH + GETS, "in materialise)"),
    "other values at the start": (
        ties.starts_apart, "untied", BOTH + ", which start with other values", "in starts_apart)",
    ),
    "after the first step": (
        ties.after_the_first_step, "untied",
        "gradients are right in step 1 and wrong in step 2: " + BOTH + GETS, "in part)",
    ),
    "the second never steps": (
        ties.second_never_steps, "untied", BOTH + ", and after step 1 they have other values", "in materialise)",
    ),
    "the sum, twice": (ties.summed_and_doubled, "scale", "scale 2 on 1 of 3 parameters (table.weight)", "counts twice"),
}  # fmt: skip
PLAIN = ("two that get the sum", "sharded apart", "the second never steps")


def cases(table):
    return [
        pytest.param(*case, id=name, marks=() if name in PLAIN else PROVE) for name, case in table.items()
    ]


@pytest.mark.parametrize(("step", "model_fn"), cases(RIGHT))
def test_what_is_right_is_let_alone(ranks, step, model_fn):
    report = verify(step, model_fn, MESHES, pool=ranks)
    assert report.ok, report
    assert all(report.followed.steps[each.shape] == ties.STEPS for each in report.results)


@pytest.mark.parametrize(("step", "kind", "what", "remedy"), cases(WRONG))
def test_what_comes_apart_is_named(ranks, step, kind, what, remedy):
    report = verify(step, ties.Tied, MESHES, pool=ranks)
    first = report.causes[0]
    assert first.kind == kind and what in first.what, report
    assert remedy in first.remedy, first.remedy
    # Other values at the start make all else wrong; nothing else is said of these.
    assert any(isinstance(cause, Consequence) for cause in report.causes) == ("start" in what)
    if kind == "untied":
        others = [
            name for cause in report.causes[1:] if not isinstance(cause, Consequence) for name in cause.names
        ]
        assert not {*others} & {"head.weight", "table.weight"}, report
