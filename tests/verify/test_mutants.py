"""Every defect that can be put into our collectives and divisors is found, and nearly every one named right."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from opensora_accel.training.proof import write_clips
from tests.verify.mutants import MUTANTS
from tests.verify.mutants_of_forwards import FORWARD_MUTANTS
from tests.verify.steps import TrainerStep


@pytest.fixture(scope="module")
def reports(ranks, tmp_path_factory):
    """`reports(mutant)`: what the verifier says of it, once for all tests of this module."""
    clips = write_clips(tmp_path_factory.mktemp("mutants") / "clips")
    known = {}

    def report_of(mutant):
        if mutant.name not in known:
            is_trainer = isinstance(mutant.step, TrainerStep)
            here = replace(mutant, step=replace(mutant.step, folder=clips)) if is_trainer else mutant
            known[mutant.name] = here.verify(ranks)
        return known[mutant.name]

    return report_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_found(reports, mutant):
    report = reports(mutant)
    assert not report.ok
    # A defect that cannot run would be found by accident.
    texts = [text for result in report.results for text in result.errors.values()]
    assert not any(
        re.search(r"^(Syntax|Name|Attribute|Import|Assertion|ModuleNotFound)Error", t, re.M) for t in texts
    )


@pytest.mark.parametrize("mutant", FORWARD_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_forward_is_traced_to_its_module(reports, mutant):
    finding, *_ = reports(mutant).findings
    traced = r"the forward is wrong already, first in part(, before part\.\w+)? \(its inputs are right\)"
    assert re.match(traced, finding.remedy), finding.remedy


def test_defects_are_named_right(reports):
    """Kind, axes and factor as in the table: by one of the findings, and mostly by the first. `-s` shows all."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    places = [_place_of_name(mutant, reports(mutant)) for mutant in MUTANTS]
    for mutant, place in zip(MUTANTS, places, strict=True):
        print(f"{'not named' if place is None else f'finding {place + 1}'}: {mutant}")
        if place != 0:
            print(*(f"    {finding.what}" for finding in reports(mutant).findings), sep="\n")
    num_named, num_first = sum(place is not None for place in places), places.count(0)
    print(f"{len(MUTANTS)} defects, {num_named} named right, {num_first} by the first finding")
    assert num_named == len(MUTANTS)
    assert num_first >= 0.95 * len(MUTANTS)


def _place_of_name(mutant, report):
    """Of the first finding that names it right."""
    return next((i for i, finding in enumerate(report.findings) if mutant.is_named_by(finding)), None)
