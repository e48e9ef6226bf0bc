"""In bf16 one device's later steps are followed: what is old is named with its step, and rounding is let alone."""

import pytest

from opensora_accel.verify import verify
from tests.tiers import PROVE
from tests.verify import later_in_bf16 as loops
from tests.verify.loops import Small

MESHES = [{"data": 2}]
IN_A_PLAIN_RUN = ("autocast around all steps", "an average as a teacher")


def cases(table):
    return [pytest.param(name, marks=() if name in IN_A_PLAIN_RUN else PROVE) for name in table]


@pytest.mark.parametrize("name", cases(loops.WRONG))
def test_what_is_old_is_named_with_its_step(ranks, name):
    step, number = loops.WRONG[name]
    report = verify(step, Small, MESHES, dtype="bf16", pool=ranks)
    (cause,) = report.causes
    assert f"right in step{'s' * (number > 2)} 1" in cause.what and f"wrong in step {number}," in cause.what
    assert cause.step == number and cause.error > 5 * cause.rounding > 0
    assert not report.ok and "in each of" not in str(report.in_bf16)


@pytest.mark.parametrize("name", cases(loops.RIGHT))
def test_what_follows_is_let_alone(ranks, name):
    report = verify(loops.RIGHT[name], Small, MESHES, dtype="bf16", pool=ranks)
    assert report.ok, report
    assert f"; in each of {loops.STEPS} steps by what rounding explains" in str(report.in_bf16)
