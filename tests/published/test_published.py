"""Every published bug is found and rightly named, or stands among what is not found yet; its right twin is let alone.

`make test` tries one bug for each tool, `make prove PART=published` all of them; with ARGS=-s it prints what each is
called, and a summary. `python -m tests.published VeOmni#338` shows one.
"""

from __future__ import annotations

import collections
import inspect

import pytest

from opensora_accel.observe.meshes import MeshShape
from tests.published import page
from tests.published.__main__ import main
from tests.published.bug import Twin, what_is_left
from tests.published.suite import BUGS, IN_A_PLAIN_RUN, NAMED_OTHERWISE, NOT_FOUND_YET
from tests.tiers import PROVE

CASES = [pytest.param(bug, id=bug.name, marks=() if bug.name in IN_A_PLAIN_RUN else PROVE) for bug in BUGS]
LONGEST = 40


@pytest.fixture(scope="module")
def found(ranks):
    """`found(bug, is_wrong)`: what is said of it, once for all tests of this module."""
    known = {}

    def findings(bug, is_wrong):
        key = bug.name, is_wrong
        if key not in known:
            known[key] = bug.found(ranks, is_wrong)
        return known[key]

    return findings


def test_the_suite_is_what_it_says():
    names = [bug.name for bug in BUGS]
    assert len(set(names)) == len(names) >= 40
    assert {*NOT_FOUND_YET, *NAMED_OTHERWISE} <= set(names)
    assert not {*NOT_FOUND_YET} & {*NAMED_OTHERWISE}
    for bug in BUGS:
        assert bug.mechanism.endswith(".") and bug.hides, bug.name
        assert len(inspect.getsource(bug.step).splitlines()) <= LONGEST, bug.name
        assert 2016 < bug.year < 2027 and bug.repository.count("/") == 1
    # Two pairs would share a step only by mistake.
    assert len({bug.step for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in BUGS if bug.name in NOT_FOUND_YET])
def test_what_is_not_found_is_wrong_all_the_same(ranks, bug):
    """Run as it is, in fp32: its twin leaves other gradients, weights or losses."""
    num_ranks = MeshShape.of(bug.meshes[0], bug.data_axes).world_size
    wrong, right = (ranks(num_ranks, what_is_left, Twin(bug, is_wrong)) for is_wrong in (True, False))
    assert right == ranks(num_ranks, what_is_left, Twin(bug, False))
    assert any(
        len(one) != len(other) or one != pytest.approx(other, rel=1e-5)
        for one, other in zip(wrong, right, strict=True)
    )


@pytest.mark.parametrize("bug", CASES)
def test_the_right_twin_is_let_alone(found, bug):
    assert found(bug, False) == []


@pytest.mark.parametrize("bug", CASES)
def test_the_bug_is_found_or_known_not_to_be(found, bug):
    findings = found(bug, True)
    if bug.name in NOT_FOUND_YET:
        assert findings == [], f"{bug.name} is found: take it out of NOT_FOUND_YET, and write the page anew"
        return
    assert findings, bug.name
    is_named_first = findings[0][1]
    if bug.name in NAMED_OTHERWISE:
        assert not is_named_first, f"{bug.name} is named right: take it out of NAMED_OTHERWISE"
    else:
        assert is_named_first, findings


def test_the_page_has_every_bug_and_no_other():
    text, says = page.written()
    assert page.tables(says) in text
    assert {name for name, line in says.items() if not line} == set(NOT_FOUND_YET)
    guide = (page.PAGE.parent / "verify.md").read_text(encoding="utf-8")
    assert (
        f"What it says of {len(BUGS)} silent bugs that other frameworks [have published](published.md)"
        in guide
    )


@pytest.mark.parametrize("bug", CASES)
def test_the_page_says_what_the_tool_says(found, bug):
    _, says = page.written()
    assert page.first_line(found(bug, True)) == says[bug.name]


def test_the_command_shows_a_bug(capsys):
    assert main(["verl#436"]) == 0
    shown = capsys.readouterr().out
    assert "wrong: loss scale: 1 times the loss is backwarded" in shown and "right: nothing" in shown
    assert main(["verl#0"]) == 2
    assert "there is no such bug among verl#0" in capsys.readouterr().err


@pytest.mark.prove
def test_summary(found):
    """95 % is found, 90 % is named right by the first finding, and no twin is called wrong."""
    counts = collections.Counter()
    for bug in BUGS:
        wrong, right = found(bug, True), found(bug, False)
        is_first = bool(wrong) and wrong[0][1]
        print(
            f"{bug.tool:13} {bug.name:24} {'named first' if is_first else 'found' if wrong else 'not found'}"
        )
        print(*(f"    {line}" for line, _ in wrong), sep="\n")
        counts.update(
            {"written": 1, "found": bool(wrong), "named first": is_first, "silent twins": not right}
        )
        counts.update({f"{bug.tool}: written": 1, f"{bug.tool}: found": bool(wrong)})
    for kind, number in counts.items():
        print(f"{number:4} {kind}")
    assert counts["silent twins"] == len(BUGS)
    assert counts["found"] >= 0.95 * len(BUGS) and counts["named first"] >= 0.9 * len(BUGS)
