"""Every defect that a step is given is found, and named right: what is wrong, over which axis, by what factor.

`make test` tries one defect of each kind, `make prove PART=verify` all of them; with ARGS=-s it prints what each is
called.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from opensora_accel.training.tiny_run import write_clips
from tests.tiers import PROVE
from tests.verify.model_steps import TrainerStep
from tests.verify.mutants import MUTANTS, REPRESENTATIVES
from tests.verify.mutants_of_forwards import FORWARD_MUTANTS

_NOT_A_DEFECT = r"^(Syntax|Name|Attribute|Import|Assertion|ModuleNotFound)Error"
"""How a step ends whose defect could not be put in; it would be found by accident."""


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


def cases(mutants):
    """One of each kind for a plain run, the others for `make prove`."""
    return [
        pytest.param(each, id=each.name, marks=() if each in REPRESENTATIVES else PROVE) for each in mutants
    ]


@pytest.mark.parametrize("mutant", cases(MUTANTS))
def test_a_defect_is_found(reports, mutant):
    report = reports(mutant)
    assert not report.ok
    texts = [text for mesh in report.results for text in mesh.errors.values()]
    assert not any(re.search(_NOT_A_DEFECT, text, re.M) for text in texts), texts
    if mutant in REPRESENTATIVES:
        assert mutant.is_named_by(report.findings[0]), report


def test_the_defects_of_a_plain_run_have_all_names():
    assert {mutant.kind for mutant in REPRESENTATIVES} == {mutant.kind for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", cases(FORWARD_MUTANTS))
def test_a_wrong_forward_is_traced_to_its_module(reports, mutant):
    finding, *_ = reports(mutant).findings
    traced = r"the forward is wrong already, first in part(, before part\.\w+)? \(its inputs are right\)"
    assert re.match(traced, finding.remedy), finding.remedy


@pytest.mark.prove
def test_every_defect_is_named_right(reports):
    """Kind, axes and factor as in the table: by one of the findings, and nearly always by the first."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 159
    places = [_place_of_name(mutant, reports(mutant)) for mutant in MUTANTS]
    for mutant, place in zip(MUTANTS, places, strict=True):
        print(f"{'not named' if place is None else f'finding {place + 1}'}: {mutant}")
        if place != 0:
            print(*(f"    {finding.what}" for finding in reports(mutant).findings), sep="\n")
    num_named, num_first = sum(place is not None for place in places), places.count(0)
    print(f"{len(MUTANTS)} defects, {num_named} named right, {num_first} by the first finding")
    assert num_named == len(MUTANTS)
    assert num_first >= len(MUTANTS) - 1


def _place_of_name(mutant, report):
    """The place of the first finding that names it right."""
    return next((i for i, finding in enumerate(report.findings) if mutant.is_named_by(finding)), None)
