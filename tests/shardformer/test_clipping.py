"""Gradients are clipped as torch clips them, and nothing asks for the norm while the device computes it."""

import pytest
import torch
from torch import nn

from opensora_accel.observe.modes import OperatorMode
from shardformer import clip_grad_norm_


class Reads(OperatorMode):
    """Operators that bring a number to the host."""

    def __init__(self):
        super().__init__()
        self.names = []

    def after(self, func, args, kwargs, outputs):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.names.append(func.name())


def model_with(scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    (scale * model(torch.randn(5, 4))).square().sum().backward()
    return model


def grads(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_it_is_torchs(max_norm):
    ours, theirs = model_with(1.0), model_with(1.0)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    with Reads() as reads:
        norm = clip_grad_norm_(ours, max_norm)
    assert torch.equal(norm, expected) and all(map(torch.equal, grads(ours), grads(theirs)))
    assert reads.names == []


@pytest.mark.parametrize(("scale", "max_norm"), [(float("inf"), 1.0), (float("nan"), 1.0), (1.0, 0.0)])
def test_gradients_stay_where_there_is_nothing_to_scale_by(scale, max_norm):
    model = model_with(1.0)
    model[0].weight.grad[0, 0] *= scale
    before = [grad.clone() for grad in grads(model)]
    norm = clip_grad_norm_(model, max_norm)
    assert not norm.isfinite() or max_norm == 0
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(grads(model), before, strict=True))
