"""What optimizers do to weights, by the rate that they take a step with."""

import pytest
import torch
from torch import nn

from opensora_accel.training.prodigy import Prodigy
from opensora_accel.watching.weights import TrainedWeights


def mistakes(optimizer_of, *, size, put_back=False, num_steps=3):
    """What is found of steps of one weight of this size, with gradients of 0.01."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, size)
    trained, optimizer = TrainedWeights(model), optimizer_of(model.parameters())
    trained.start()
    before = model.weight.detach().clone()
    for _ in range(num_steps):
        model.weight.grad = torch.full((4, 4), 0.01)
        trained.note(optimizer)
        optimizer.step()
        if put_back:
            model.weight.data.copy_(before)
    moved = not torch.equal(model.weight, before)
    return [name for name, _ in trained.mistakes(num_steps)], moved


def prodigy(d=1e-6, lr=1.0):
    def make(parameters):
        optimizer = Prodigy([{"params": [*parameters]}], lr=lr, betas=(0.9, 0.99), eps=1e-8)
        optimizer.param_groups[0]["d"] = d
        return optimizer

    return make


def test_the_rate_of_prodigy_is_d_times_lr():
    # A millionth of a hundred is rounded away, and a thousandth is not.
    assert mistakes(prodigy(), size=100.0) == ([], False)
    assert mistakes(prodigy(d=1e-1), size=100.0) == ([], True)
    # By a rate of 1 a weight that does not move is wrong, however it is made of both.
    assert mistakes(prodigy(d=1.0), size=100.0, put_back=True) == (["unmoved weight"], False)
    assert mistakes(prodigy(d=1.0, lr=1e-6), size=100.0, put_back=True) == ([], False)


@pytest.mark.parametrize("lr", [1e-2, 1e-9])
def test_the_rate_of_others_is_lr(lr):
    found = mistakes(lambda parameters: torch.optim.AdamW(parameters, lr=lr), size=1.0, put_back=True)
    assert found == (["unmoved weight"] if lr == 1e-2 else [], False)
