"""Weights, samples and draws that stand still are told, once; those that only seem to are not."""

import pytest
import torch
from torch import nn

from opensora_accel.watching import watch


def run(*, rate=lambda step: 0.1, noise=lambda step: torch.randn(100), sample=lambda step: step, num_steps=24,
        dtype=torch.float32, every=4):  # fmt: skip
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with watch(model, every=every) as watched:
        for step in range(1, num_steps + 1):
            x = torch.randn(4, 3, dtype=dtype) + noise(step)[:3].mean().to(dtype)
            loss = model(x).square().mean()
            watched.loss(loss, samples=[f"{sample(step)}.mp4"])
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
            optimizer.zero_grad()


def told(caplog, **options):
    before = torch.randn
    run(**options)
    assert torch.randn is before, "draws are still followed"
    return [each.getMessage() for each in caplog.records if each.name.endswith("standstill")]


def test_what_moves_is_let_alone(caplog):
    assert told(caplog) == []
    # Every second step, or for the looks' own steps alone.
    assert told(caplog, rate=lambda step: 0.1 * (step % 2)) == []
    assert told(caplog, sample=lambda step: step // 2, noise=lambda step: fixed(step // 2)) == []


def fixed(seed):
    return torch.randn(100, generator=torch.Generator().manual_seed(seed))


def test_a_dead_learning_rate_is_told_once(caplog):
    (message,) = told(caplog, rate=lambda step: 0.1 if step < 4 else 0.0)
    assert (
        "until step 17, 2 weights have had gradients in 4 looks and have not moved by a bit: weight"
        in message
    )
    assert "whose learning rate is 0 now" in message


def test_a_step_that_is_rounded_away_is_told(caplog):
    (message,) = told(caplog, rate=lambda step: 0.1 if step < 4 else 1e-9, dtype=torch.bfloat16)
    assert "whose learning rate is 1e-09 now" in message


def test_a_stuck_loader_is_told_once(caplog):
    (message,) = told(caplog, sample=lambda step: min(step, 7))
    assert "rank 0 trained on the same samples (7.mp4) in all steps from 14 to 17" in message


@pytest.mark.parametrize("seed", [0, 5])
def test_draws_that_repeat_are_told_once(caplog, seed):
    (message,) = told(caplog, noise=lambda step: fixed(seed))
    assert (
        "rank 0 drew the same numbers at test_standstill.py:" in message
        and "in all steps from 6 to 9" in message
    )
