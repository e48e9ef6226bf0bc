"""The single device is held against its own loss: mistakes that it makes too are found, and their operator is named."""

from functools import partial

import pytest
import torch

from opensora_accel import parallel_states
from opensora_accel.observe.meshes import MeshShape, Run
from opensora_accel.verify.derivatives import check_derivatives
from opensora_accel.verify.run_step import observe
from tests.tiers import PROVE
from tests.verify import one_device as steps
from tests.video_models import CASES
from tests.video_models.flex import use_dense_flex_attention

ALONE = MeshShape.of({"data": 1})


def found_of(model_fn, step=steps.step):
    def turn(*probes):
        run = Run(ALONE, 0, 0, 1, is_reference=True)
        try:
            return observe(step, model_fn, run, keeps_dropout=True, probes=probes)
        finally:
            parallel_states.reset()

    return check_derivatives(turn)


WRONG = {
    "a norm's root is a constant": (steps.WrongNorm, r"Norm\.backward", {"x"}),
    "a gate's gradient of one sample": (steps.WrongGate, r"Gated\.backward", {"w"}),
    "an operator of a library": (
        steps.WrongLibrary,
        r"the backward of opensora_accel_tests::twice_scaled",
        {"x", "w"},
    ),
    "a square weight that is not transposed": (steps.WrongSquare, r"Transposed\.backward", {"x"}),
    "kept by reference, then written to": (steps.Overwritten, r"the backward of the model", {"w"}),
    "draws of a recomputation": (steps.LostDraws, r"the backward of the model", {"w"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backward_is_found_and_named(name):
    model_fn, operator, arguments = WRONG[name]
    found = found_of(model_fn)
    first = found.operators[0]
    assert first.name.startswith(operator.replace("\\", "")), first
    assert arguments <= set(first.arguments), first
    assert first.draws == (model_fn is steps.LostDraws)
    assert found.wrong and found.causes_doubt and not found.reason


@pytest.mark.parametrize(
    ("model_fn", "without"),
    [
        (
            steps.WithoutBackward,
            {"w", "enter.weight", "enter.bias", "inner.weight", "inner.bias"},
        ),
        (steps.BesideItsInput, {"w"}),
    ],
)
def test_parameters_that_a_kernel_cuts_off_are_named(model_fn, without):
    found = found_of(model_fn)
    assert set(found.cut_off) == without and not found.operators
    assert all("one_device.py" in line and "in middle" in line for line in found.stops)


RIGHT = {
    "plain": steps.Small,
    "a norm": steps.GoodNorm,
    "a gate": steps.GoodGate,
    "an operator of a library": steps.GoodLibrary,
    "a square weight": steps.GoodSquare,
    "kept by reference": steps.NotOverwritten,
    "recomputed, with its draws": steps.KeptDraws,
    "recomputed, the reentrant way": steps.KeptDrawsReentrant,
    "dropout": steps.WithDropout,
    "kinks": steps.WithKinks,
    "complex weights": steps.ThroughSpectrum,
    "detached": steps.Detached,
    "without gradients": steps.WithoutGradients,
    "of a number": steps.OfANumber,
    "straight through": steps.StraightThrough,
}
ON_PURPOSE = {"detached", "without gradients", "of a number", "straight through"}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_backward_is_let_alone(name):
    found = found_of(RIGHT[name])
    assert not found.causes_doubt and not found.reason and not found.without_gradients, found
    assert len(found.slopes) == 3 and found.error < 1e-8
    assert bool(found.stops) == (name in ON_PURPOSE)


@pytest.mark.parametrize(
    "step", [steps.accumulated, steps.with_a_teacher, steps.trained_twice, steps.with_a_penalty]
)
def test_loops_are_let_alone(step):
    found = found_of(steps.GoodNorm if step is not steps.with_a_penalty else steps.Small, step)
    assert not found.causes_doubt and not found.reason, found
    assert found.factor == pytest.approx(0.5 if step is steps.accumulated else 1.0, rel=1e-6)
    assert found.error < 1e-8


def test_a_wrong_backward_is_found_under_a_teacher():
    assert found_of(steps.WrongNorm, steps.with_a_teacher).operators


def test_another_forward_without_gradients_is_told():
    found = found_of(steps.AnotherForward)
    assert 1e-3 < found.without_gradients < 2e-2
    assert not found.causes_doubt


def unseeded(model, run):
    generator = torch.Generator()
    generator.seed()
    loss = model(torch.randn(2, 5, 4, generator=generator)).square().mean()
    loss.backward()


def returns_its_gradients(model, run):
    loss = model(torch.randn(2, 5, 4)).square().mean()
    names, parameters = zip(*model.named_parameters(), strict=True)
    return {"gradients": dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))}


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (unseeded, "two runs with the same seeds have different losses"),
        (returns_its_gradients, "the step calls no backward"),
    ],
)
def test_what_cannot_be_measured_says_why(step, reason):
    found = found_of(steps.Small, step)
    assert found.reason.startswith(reason) and not found.causes_doubt


def step_of_case(case, model, run):
    """A random combination of all outputs."""
    generator = torch.Generator().manual_seed(3)
    out = model(**case.inputs())
    outputs = [each for each in torch.utils._pytree.tree_leaves(out) if isinstance(each, torch.Tensor)]
    loss = sum(
        (each * torch.randn(each.shape, generator=generator, dtype=torch.float64)).mean()
        for each in outputs
        if each.requires_grad
    )
    loss.backward()
    return loss


FEW = ("Wan", "LTX-Video", "Latte", "MiniMax H3")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else PROVE) for n in CASES])
def test_no_model_of_diffusers_is_suspected(name):
    use_dense_flex_attention()
    found = found_of(CASES[name].make, partial(step_of_case, CASES[name]))
    assert not found.causes_doubt and not found.reason and not found.without_gradients, found
    assert found.error < 1e-6
