"""Lifted casts: an fp64 run of a real model is fp64 throughout, also where it is recomputed."""

import pytest
import torch
from torch import nn

from opensora_accel.checkpoint import checkpoint_blocks
from opensora_accel.precision import LiftOperations, lift_casts
from tests.models import wan, wan_inputs
from tests.tolerances import relative_errors

NARROW = torch.zeros(1, dtype=torch.float32)
# Every way in which models narrow: each alone would round to fp32.
CASTS = {
    "float": lambda x: x.float(),
    "half": lambda x: x.half().bfloat16(),
    "to dtype": lambda x: x.to(torch.float32),
    "to keyword": lambda x: x.to(dtype=torch.bfloat16),
    "to device and dtype": lambda x: x.to("cpu", torch.float32),
    "to other": lambda x: x.to(NARROW),
    "type_as": lambda x: x.type_as(NARROW),
    "softmax dtype": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    "sum dtype": lambda x: x.sum(-1, dtype=torch.float32),
}


class Casting(nn.Module):
    """A block in a list, as transformers have them."""

    def __init__(self, how):
        super().__init__()
        self.blocks = nn.ModuleList([_Block(how)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class _Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return CASTS[self.how](x) * 1


@pytest.mark.parametrize("how", CASTS)
def test_no_cast_narrows_a_double(how):
    x = torch.full((3,), 1 / 3, dtype=torch.float64)
    model = Casting(how)
    assert model(x).dtype != torch.float64
    undo = lift_casts(model)
    out = model(x)
    assert out.dtype == torch.float64
    if how not in ("softmax dtype", "sum dtype"):
        assert torch.equal(out, x)
    undo()
    assert model(x).dtype != torch.float64 and "forward" not in vars(model)


def test_other_dtypes_and_integers_are_left_alone():
    class Model(nn.Module):
        def forward(self, x):
            return (
                x.float(),
                x.to(torch.int64),
                torch.ones(2).double().type_as(torch.ones(1, dtype=torch.int64)),
            )

    model = Model()
    lift_casts(model)
    single, whole, integer = model(torch.ones(2, dtype=torch.bfloat16))
    assert (single.dtype, whole.dtype, integer.dtype) == (torch.float32, torch.int64, torch.int64)


def halves_error(checkpointed):
    """How far the gradients of two halves of a loss are from adding up to the whole."""
    model, inputs = wan(), wan_inputs()
    lift_casts(model)
    if checkpointed:
        checkpoint_blocks(list(model.blocks), "full")
    weight = torch.rand(inputs["hidden_states"].shape, dtype=torch.float64)
    grads = []
    for part in (1.0, weight, 1 - weight):
        model.zero_grad()
        (model(**inputs, return_dict=False)[0] * part).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    whole, first, second = (dict(enumerate(each)) for each in grads)
    return max(relative_errors({key: first[key] + second[key] for key in whole}, whole).values())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_of_two_halves_add_up_to_the_whole(checkpointed):
    assert halves_error(checkpointed) < 1e-11


def test_what_is_made_without_a_type_is_fp64_and_what_is_written_into_stays():
    out = torch.empty(3)
    with LiftOperations():
        made = [torch.zeros(3), torch.ones(3), torch.rand(3), torch.randn(3), torch.linspace(0, 1, 3)]
        assert {each.dtype for each in made} == {torch.float64}
        assert torch.zeros(3, dtype=torch.int64).dtype == torch.int64
        assert torch.zeros(3, out=out).dtype == torch.float32


PRODUCTS = {
    "einsum": lambda x, narrow: torch.einsum("nd,dh->nh", narrow, x),
    "matmul": lambda x, narrow: narrow @ x,
    "of three": lambda x, narrow: torch.einsum("nd,dh,hk->nk", narrow, x.float(), x),
    "linear": lambda x, narrow: nn.functional.linear(narrow, x.T),
    "mm": lambda x, narrow: narrow.mm(x.float()),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_was_made_in_fp32_is_multiplied_in_fp64(name):
    """As positions are."""

    class Positions(nn.Module):
        def forward(self, x):
            return PRODUCTS[name](x, torch.linspace(0, 1, 12, dtype=torch.float32).view(3, 4))

    model, x = Positions(), torch.randn(4, 4, dtype=torch.float64)
    undo = lift_casts(model)
    found = model(x)
    undo()
    made = torch.linspace(0, 1, 12, dtype=torch.float32).view(3, 4).double()
    assert found.dtype == torch.float64
    assert torch.equal(found, made @ x @ x if name == "of three" else made @ x)
