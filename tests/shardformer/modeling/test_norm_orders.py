"""What a norm computes is told from its values: its order, its eps, its parameters; and nothing from its name."""

import pytest
import torch
from torch import nn

from shardformer.modeling.norm_orders import ORDERS, LeftAlone, NotANorm, find_meaning
from tests.shardformer.modeling.zoo import Lookalike, published, t5

PUBLISHED = {entry[0]: entry for entry in published()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_norm_is_found_bit_for_bit(name):
    _, module, order, eps, has_weight, has_bias = PUBLISHED[name]
    meaning = find_meaning(module)
    assert (meaning.order.name, meaning.eps, meaning.exact) == (order, eps, True)
    assert (meaning.weight, meaning.bias) == ("weight" if has_weight else None, "bias" if has_bias else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_order_found_is_the_module_in_fp32_and_halves(name, dtype):
    module = PUBLISHED[name][1].to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    meaning = find_meaning(module)
    x = torch.randn(3, 7, 24).to(dtype)
    weight, bias = (None if n is None else getattr(module, n) for n in (meaning.weight, meaning.bias))
    for tensor in (x, x * 1e-3):
        out = meaning.order(tensor, weight, bias, meaning.eps)
        assert torch.equal(out, module(tensor)) and out.dtype == module(tensor).dtype


def test_orders_differ_in_bf16_where_their_formula_is_the_same():
    x, weight = torch.randn(64, 128).bfloat16(), torch.randn(128).bfloat16()
    outs = {order.name: order(x, weight, None, 1e-6) for order in ORDERS if order.name in ("t5", "product")}
    different = (outs["t5"] != outs["product"]).float().mean()
    assert 0.2 < different < 0.35


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 3.7e-6, 1e-12, 0.01])
def test_eps_is_measured_whatever_its_attribute_is_called(eps):
    norm = Lookalike(lambda x, w: t5(x, w, eps))
    norm.variance_epsilon = 0.5  # a lie
    norm.smallest = eps
    assert find_meaning(norm).eps == eps


def test_an_eps_that_no_attribute_holds_is_left_alone():
    norm = Lookalike(lambda x, w: t5(x, w, 3.7e-6))
    with pytest.raises(
        LeftAlone, match=r"its eps, measured as 3.7e-06, is in no attribute and not a usual one"
    ):
        find_meaning(norm)


def test_another_class_that_computes_the_same_is_found_to_the_last_bit():
    class Quiet(Lookalike):
        pass

    meaning = find_meaning(Quiet(t5))
    assert meaning.order.rounds == "weight" and meaning.eps == 1e-6 and not meaning.exact


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, w: x / (x.abs().mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),  # statistics in bf16
        lambda x, w: (w + 0.5) * t5(x, torch.ones_like(w)),
        lambda x, w: t5(x, w).float(),
        lambda x, w: t5(x, w) * 1.01,
        lambda x, w: w * x / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + 1e-6).to(x.dtype),
        lambda x, w: w * (x.float() - x.float().mean()) / (x.float().std() + 1e-6),
    ],
    ids=["L1", "half statistics", "offset", "returns fp32", "scaled", "eps outside", "over all"],
)
def test_a_lookalike_is_left_alone(compute):
    with pytest.raises((LeftAlone, NotANorm)):
        find_meaning(Lookalike(compute))


@pytest.mark.parametrize(
    "module",
    [
        nn.SiLU(),
        nn.Identity(),
        nn.Dropout(0.5),
        nn.Linear(4, 4),
        nn.GroupNorm(2, 24),
        nn.Softmax(-1),
        nn.PReLU(24),
    ],
)
def test_what_does_not_normalise_its_last_dimension_is_no_norm(module):
    with pytest.raises(NotANorm):
        find_meaning(module)


class Noisy(Lookalike):
    def forward(self, x):
        return t5(x, self.weight) * (1 + 0.01 * torch.rand(())) if self.training else t5(x, self.weight)


def wrapped():
    norm = Lookalike(t5)
    norm.forward = norm.forward
    return norm


def hooked():
    norm = nn.RMSNorm(24)
    norm.register_forward_hook(lambda *_: None)
    return norm


def with_buffer():
    norm = Lookalike(t5)
    norm.register_buffer("steps", torch.zeros(()))
    return norm


def with_subclass():
    class Special(torch.Tensor):
        pass

    norm = nn.RMSNorm(24)
    norm.weight = nn.Parameter(torch.ones(24).as_subclass(Special))
    return norm


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (wrapped, "its forward is wrapped"),
        (hooked, "it has hooks"),
        (with_buffer, "it keeps state in buffers"),
        (lambda: Noisy(t5), "other values in training or at a second call"),
        (lambda: Noisy(t5).eval(), "other values in training or at a second call"),
        (with_subclass, "its weight is a Special; swap before sharding or quantising"),
        (lambda: nn.LayerNorm((3, 24), elementwise_affine=False), "it normalises 2 dimensions"),
    ],
)
def test_what_a_probe_cannot_vouch_for_is_left_alone(make, reason):
    with pytest.raises(LeftAlone, match=reason):
        find_meaning(make())


def test_a_parametrized_norm_is_no_leaf_and_left_alone():
    norm = nn.RMSNorm(24)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
    with pytest.raises(NotANorm):
        find_meaning(norm)


def test_a_norm_on_the_meta_device_is_probed_on_the_cpu():
    meaning = find_meaning(nn.RMSNorm(24, eps=1e-6, device="meta"))
    assert meaning.order.name == "product" and meaning.eps == 1e-6


def test_probing_changes_neither_the_module_nor_the_random_state():
    norm = nn.RMSNorm(24, eps=1e-6).bfloat16()
    weight, before, state = norm.weight, norm.weight.detach().clone(), torch.get_rng_state()
    norm.weight.grad = torch.ones_like(norm.weight)
    find_meaning(norm)
    assert norm.weight is weight and torch.equal(weight, before) and weight.dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), state) and norm.training


def test_weight_and_bias_are_told_apart_by_their_effect():
    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.ones(24))  # multiplies
            self.weight = nn.Parameter(torch.zeros(24))  # is added

        def forward(self, x):
            return torch.nn.functional.layer_norm(x, (24,), self.bias, self.weight, 1e-5)

    meaning = find_meaning(Swapped())
    assert (meaning.weight, meaning.bias) == ("bias", "weight")
