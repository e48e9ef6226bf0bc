"""Loops of three steps that keep something in bf16 from one to the next, rightly or not."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch.nn.functional import linear

from tests.verify.loops import averaged

STEPS = 3


def batches():
    return [torch.randn(2, 11, 4) for _ in range(STEPS)]


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def around_each_forward(model, run):
    return _trained(model, run, nullcontext(), autocast)


def around_all_steps(model, run):
    """Autocast keeps what it has cast until it ends."""
    return _trained(model, run, autocast(), nullcontext)


def around_nothing(model, run):
    return _trained(model, run, nullcontext(), nullcontext)


def around_all_steps_cleared(model, run):
    return _trained(model, run, autocast(), nullcontext, torch.clear_autocast_cache)


def around_all_steps_cleared_once(model, run):
    """What was cast anew in the second step is old in the third."""
    num_steps = []

    def clear() -> None:
        num_steps.append(1)
        if len(num_steps) < 2:
            torch.clear_autocast_cache()

    return _trained(model, run, autocast(), nullcontext, clear)


def with_adam(model, run):
    return _trained(model, run, nullcontext(), autocast, optimizer=torch.optim.AdamW, lr=1e-2)


class Signs(torch.optim.SGD):
    """Rounding errors turn some of its steps about."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.copy_(parameter.grad.sign())
        return super().step(closure)


def by_signs(model, run):
    return _trained(model, run, nullcontext(), autocast, optimizer=Signs, lr=0.3)


def _trained(model, run, around, inside, after_step=lambda: None, optimizer=torch.optim.SGD, lr=0.1):
    forward, losses = averaged(model, run), {}
    steps = optimizer(model.parameters(), lr=lr)
    with around:
        for number, x in enumerate(batches()):
            with inside():
                loss = forward(x).square().mean()
            loss.backward()
            steps.step()
            steps.zero_grad()
            after_step()
            losses[f"loss {number}"] = loss.detach()
    return losses


def beside_an_average(model, run):
    """Its target is what an average of the weights gives, which follows them."""
    teacher, forward = copy.deepcopy(model), averaged(model, run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches():
        with autocast():
            with torch.no_grad():
                target = teacher(x)
            (forward(x) - 1 - 0.5 * target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for average, parameter in zip(teacher.parameters(), model.parameters(), strict=True):
            average.detach().lerp_(parameter.detach(), 0.5)


def _with_a_copy(model, run, is_written):
    """The last layer computes with a copy of its weight in half precision; its gradient goes to the weight itself."""
    forward = averaged(model, run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out, kept = model.out, model.out.weight.detach().bfloat16().clone()

    def with_copy(x):
        weight = out.weight + (kept.to(out.weight.dtype) - out.weight).detach()
        return linear(x, weight.to(x.dtype), out.bias.to(x.dtype))

    out.forward = with_copy
    for x in batches():
        with autocast():
            loss = forward(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # In fp64 both would be old alike, so only what is run in bf16 forgets it.
        if is_written or out.weight.dtype == torch.float64:
            kept.copy_(out.weight.detach())


def with_a_copy(model, run):
    return _with_a_copy(model, run, is_written=True)


def with_an_old_copy(model, run):
    return _with_a_copy(model, run, is_written=False)


RIGHT = {
    "autocast around each forward": around_each_forward,
    "autocast by the tool": around_nothing,
    "a cache that is cleared": around_all_steps_cleared,
    "AdamW": with_adam,
    "signs": by_signs,
    "an average as a teacher": beside_an_average,
    "a copy that is written": with_a_copy,
}
WRONG = {
    "autocast around all steps": (around_all_steps, 2),
    "a cache that is cleared once": (around_all_steps_cleared_once, 3),
    "a copy that is old": (with_an_old_copy, 2),
}
