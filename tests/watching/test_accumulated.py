"""What the gradients of a step are made of, by sums of what each backward left."""

import pytest
import torch
from torch import nn

from opensora_accel.observe import ForwardCall
from opensora_accel.watching.accumulated import Composition, Parts, composition
from opensora_accel.watching.watch import watch

# Of three backwards on two ranks: sums as a loop of those sizes has them.
PARTS = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def made(used, parts=PARTS):
    """Of `used` [ranks, sums]."""
    everyone = [(parts[:, rank].tolist(), used[rank].tolist()) for rank in range(parts.shape[1])]
    return composition(everyone)


@pytest.mark.parametrize("factors", [(1, 1, 1), (0.25, 0.25, 0.25), (0, 0, 1), (0, 1, 1), (0.5, 0.3, 0.2)])
@pytest.mark.parametrize("is_average", [False, True])
def test_each_part_has_its_factor(factors, is_average):
    parts = PARTS.mean(1, keepdim=True).expand_as(PARTS) if is_average else PARTS
    used = sum(factor * part for factor, part in zip(factors, parts, strict=True))
    found = made(used * (1 + 1e-3 * torch.randn_like(used)))  # gradients may be in bf16
    assert found.factors == pytest.approx(factors, abs=1e-2) and found.is_average == is_average
    assert found.counts == tuple(factor > 0 for factor in factors)
    assert found.factor == pytest.approx(sum(factors) / sum(found.counts), abs=1e-2)


def test_a_part_with_nan_was_thrown_away():
    parts = PARTS.clone()
    parts[0, 1, 3] = torch.nan
    assert made(PARTS[1] + PARTS[2], parts).counts == (False, True, True)


def test_the_last_part_alone_is_enough():
    """Batches that are alike have gradients that are, and fit in many ways."""
    assert made(PARTS[0], PARTS[:1].repeat(3, 1, 1)).counts == (False, False, True)


def test_what_does_not_fit_is_not_known():
    assert made(PARTS.sum(0).clamp(-0.5, 0.5)) is None
    assert composition([([[1.0]], [1.0]), ([[1.0], [2.0]], [1.0])]) is None


def test_nothing_that_is_used_is_made_of_nothing():
    assert made(torch.zeros(2, 64)).factor == 0


def test_parts_end_where_gradients_are_gone():
    """Two backwards without anything in between are one part, and what is zeroed in place ends one."""
    model = nn.Linear(3, 70)
    parts = Parts(model)
    for number in range(4):
        for _ in range(2):  # the model has two outputs
            parts.begin_backward()
        model(torch.ones(1, 3)).sum().backward()
        parts.end_backward(2 * (number + 1), number + 1)
        if number in (1, 2):
            model.zero_grad(set_to_none=False)
    first, second, last = parts.all
    assert torch.equal(first.sums, 2 * last.sums) and torch.equal(second.sums, last.sums)
    assert last.sums.sum() == 70 * 4
    uses = Composition((1.0, 0.0, 3.0), is_average=False)
    assert [*parts.thrown_away(uses)] == [(range(4, 6), range(2, 3))]
    assert parts.by_hand(uses, first.sums + 3 * last.sums) == pytest.approx(2)
    state = torch.get_rng_state(), None
    calls = [ForwardCall((), {}, state, (False, torch.bfloat16), {0: torch.ones(1)}) for _ in range(4)]
    assert [float(call.gradients[0]) for call in parts.weighed(uses, calls)] == [0.5, 0.5, 1.5]


def loop(weights, factor, clip=None):
    """Two steps of three backwards whose gradients a loop weighs into buffers, and what is said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model) as run:
        for _ in range(2):
            buffers = [torch.zeros_like(p) for p in model.parameters()]
            for weight in weights:
                loss = model(torch.randn(4, 3)).square().mean()
                run.loss(loss)
                loss.backward()
                for parameter, buffer in zip(model.parameters(), buffers, strict=True):
                    buffer.add_(parameter.grad, alpha=weight)
                    parameter.grad = None
            for parameter, buffer in zip(model.parameters(), buffers, strict=True):
                parameter.grad = factor * (buffer if clip is None else buffer.clamp(-clip, clip))
            optimizer.step()
            optimizer.zero_grad()


def test_weighed_parts_are_let_alone():
    loop((0.5, 0.3, 0.2), 1.0)
    with pytest.raises(ValueError, match="loss scale: 1 times the loss is backwarded in each of 3 backwards"):
        loop((0.5, 0.3, 0.2), 3.0)


def test_what_cannot_be_known_is_said(caplog):
    loop((1, 1, 1), 1 / 3, clip=1e-3)
    assert "is not a sum of them times numbers: so their size is not checked" in caplog.text
