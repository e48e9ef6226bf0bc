"""In bf16 ranks that round more than one device are told from those that round elsewhere."""

import pytest
import torch

from opensora_accel.verify.beside_one_device import verify
from opensora_accel.verify.rounding import narrow, rounded
from tests.tiers import PROVE, some
from tests.verify import in_bf16 as steps
from tests.verify.model_steps import TinyDiT, plain_step
from tests.verify.test_correct import LAYERS, MODELS

SEQUENCE = ({"data": 1, "sequence": 2}, {"data": 1, "sequence": 4})
DATA = ({"data": 2, "sequence": 1}, {"data": 4, "sequence": 1})

# Where it shows first: of a module, what it is given.
PLACES = {
    "a ring merges outputs and sums in bf16": "what the module blocks.0.o is given",
    "a ring merges outputs alone in bf16": "what the module blocks.0.o is given",
    "keys and values travel in eight bits": "what the module blocks.0.o is given",
    "keys and values travel in eight bits, ulysses": "what the module blocks.0.o is given",
    "a mean over ranks in eight bits": "what the module pool is given",
    "moments of a norm in bf16": "what the module blocks.0.q is given",
    "tokens leave in eight bits": "what the module out is given",
    "gradients in sixteen bits, hidden by all other roundings": "with all else in fp32, that of out.",
    "places counted in bf16": "what the module places is given",
    "keys and values in eight bits, under the step's autocast": "what the module blocks.0.o is given",
}
IN_A_PLAIN_RUN = ("a ring merges outputs and sums in bf16", "ring")


def cases(named):
    return [
        pytest.param(name, marks=() if name in IN_A_PLAIN_RUN else PROVE, id=name.replace(",", ""))
        for name in named
    ]


@pytest.mark.parametrize("name", cases(steps.WRONG))
def test_ranks_that_round_more_are_found(ranks, name):
    report = verify(steps.WRONG[name], steps.Model, SEQUENCE, dtype="bf16", pool=ranks)
    (cause,) = report.causes
    assert cause.kind == "rounding" and "over sequence" in cause.what
    assert PLACES.get(name, "the gradient of out.") in cause.what, cause.what
    # In fp64 nothing is wrong with it.
    assert all(each.is_right for mesh in report.results for each in mesh.parameters().values())


@pytest.mark.parametrize("name", cases(steps.RIGHT))
def test_ranks_that_round_elsewhere_are_let_alone(ranks, name):
    report = verify(steps.RIGHT[name], steps.Model, SEQUENCE, dtype="bf16", pool=ranks)
    assert report.ok, report
    assert 1e-3 < report.in_bf16.error < 1e-2
    assert all(0.5 < ratio < 1.3 for ratio in report.in_bf16.ratios.values())
    assert report.to_dict()["in_bf16"]["ratios"] == report.in_bf16.ratios


CORRECT = {name: case for name, case in {**LAYERS, **MODELS}.items() if "torch.compile" not in name}


@pytest.mark.parametrize("name", some(CORRECT, "ulysses, masked"))
def test_a_correct_step_raises_no_alarm(ranks, name):
    step, meshes = CORRECT[name]
    model_fn = TinyDiT if step is plain_step else getattr(step, "step", step).model
    report = verify(step, model_fn, meshes, dtype="bf16", pool=ranks)
    assert report.ok, report
    assert report.in_bf16 is not None and not report.in_bf16.reason


def test_one_device_that_loses_gradients_is_told(ranks):
    report = verify(steps.without_a_scaler, steps.Model, DATA[:1], dtype="bf16", pool=ranks)
    (cause,) = report.causes
    assert "in bf16, as it is run, one device already loses the gradient" in cause.what


@PROVE
def test_a_teacher_beside_a_student_is_let_alone(ranks):
    assert verify(steps.two_regions, steps.Model, DATA, dtype="bf16", pool=ranks).ok


def insists_on_fp64(model, run):
    out = model(torch.randn(2, steps.TOKENS, 6))
    assert out.dtype == torch.float64
    loss = out.square().mean()
    loss.backward()
    return loss


def test_a_step_that_fails_in_bf16_alone_is_told(ranks):
    # A mesh of one data rank: nothing has to be averaged.
    report = verify(insists_on_fp64, steps.Model, {"data": 1, "sequence": 2}, dtype="bf16", pool=ranks)
    (cause,) = report.causes
    assert cause.what.startswith("in bf16, as it is run, the step fails: AssertionError")
    assert report.verdict().endswith("but in bf16 the step is not what it is in fp64")


def no_average(model, run):
    loss = model(torch.randn(2, steps.TOKENS, 6)).square().mean()
    loss.backward()
    return loss


def test_what_is_wrong_in_fp64_comes_first(ranks):
    report = verify(no_average, steps.Model, {"data": 2}, dtype="bf16", pool=ranks)
    assert {cause.kind for cause in report.causes} == {"missing sum"}
    assert str(report.in_bf16) == "in bf16: not looked at, as the gradients in fp64 are not right"


def test_other_types_are_refused(ranks):
    with pytest.raises(ValueError, match=r'dtype must be "fp64" or "bf16"; got .fp16'):
        verify(no_average, steps.Model, {"data": 2}, dtype="fp16", pool=ranks)


def test_inputs_are_numbers_that_bf16_has():
    x = torch.randn(100, dtype=torch.float64)
    assert not rounded(x).equal(x)
    assert rounded(x).bfloat16().double().equal(rounded(x))
    assert narrow(rounded(x)).double().equal(rounded(x))
