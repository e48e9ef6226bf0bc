"""Adaptive layer norms are told from what they do with the chunks of their linear layer, and keep values and names."""

import inspect

import pytest
import torch
from torch import nn

from shardformer.modeling import swap_norms
from shardformer.modeling.norms import adaptive
from shardformer.modeling.norms.layer_tiles import TiledLayerNorm
from shardformer.modeling.norms.modulation import find_modulation
from tests.tolerances import assert_close


def adaptive_norms():
    from diffusers.models.normalization import (
        AdaLayerNorm,
        AdaLayerNormContinuous,
        AdaLayerNormZero,
        AdaLayerNormZeroSingle,
        CogVideoXLayerNormZero,
    )

    return {
        "Zero": (AdaLayerNormZero(24), (("x", 1, 0),), "emb", 4),
        "ZeroSingle": (AdaLayerNormZeroSingle(24), (("x", 1, 0),), "emb", 1),
        "Continuous": (AdaLayerNormContinuous(24, 24, False), (("x", 0, 1),), "conditioning_embedding", 0),
        "Continuous, affine": (AdaLayerNormContinuous(24, 24), (("x", 0, 1),), "conditioning_embedding", 0),
        "CogVideoX": (
            CogVideoXLayerNormZero(24, 24),
            (("hidden_states", 1, 0), ("encoder_hidden_states", 4, 3)),
            "temb",
            2,
        ),
        "CogVideoX out": (AdaLayerNorm(24, output_dim=48, chunk_dim=1), (("x", 1, 0),), "temb", 0),
    }


NAMES = list(adaptive_norms())


def arguments(modulation, dtype=torch.float32):
    made = {name: torch.randn(2, 5 + i, 24, dtype=dtype) for i, (name, _, _) in enumerate(modulation.streams)}
    return {**made, modulation.condition: torch.randn(2, 24, dtype=dtype)}


def flat(outs):
    return list(outs) if isinstance(outs, tuple) else [outs]


def outs_and_grads(module, named):
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in named.items()}
    outs = flat(module(**leaves))
    wanted = [*leaves.values(), *module.parameters()]
    return [o.detach() for o in outs], torch.autograd.grad(sum(o.square().sum() for o in outs), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_published_adaptive_norm_is_found(name):
    module, streams, condition, num_rest = adaptive_norms()[name]
    nn.init.zeros_(module.linear.weight)  # as at the start of a training
    found = find_modulation(module)
    assert (found.streams, found.condition, len(found.rest)) == (streams, condition, num_rest)


@pytest.mark.parametrize("name", NAMES)
def test_a_swapped_adaptive_norm_gives_the_same_and_comes_back(small_tiles, monkeypatch, name):
    module, *_ = adaptive_norms()[name]
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    holder, named = nn.ModuleDict({"norm": module}), arguments(find_modulation(module))
    expected, expected_grads = outs_and_grads(module, named)
    keys = list(holder.state_dict())
    report = swap_norms(holder)
    assert report.rows[0].to == "tiles" and holder["norm"] is module and list(holder.state_dict()) == keys
    assert report.rows[0].saved_after == 0 < report.rows[0].saved_before
    calls, original = [], TiledLayerNorm.apply
    monkeypatch.setattr(TiledLayerNorm, "apply", lambda *args: calls.append(1) or original(*args))
    outs, grads = outs_and_grads(module, named)
    assert calls
    for mine, plain in zip([*outs, *grads], [*expected, *expected_grads], strict=True):
        assert_close(mine, plain)
    if "affine" not in name and name != "CogVideoX":
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    assert (
        list(inspect.signature(module.forward).parameters)
        == list(inspect.signature(type(module).forward).parameters)[1:]
    )
    report.undo()
    assert "forward" not in vars(module)


@pytest.mark.parametrize("mode", ["strict", "fast"])
def test_halves_are_kept(mode):
    holder = nn.ModuleDict({"norm": adaptive_norms()["Zero"][0].bfloat16()})
    row = swap_norms(holder, mode).rows[0]
    assert row.to is None and row.reason == "in torch.bfloat16 one pass was measured to be slower"
    assert "forward" not in vars(holder["norm"])


class Cross(nn.Module):
    """Named as diffusers', with the scale on the input instead of the norm."""

    def __init__(self):
        super().__init__()
        self.silu, self.linear, self.norm = nn.SiLU(), nn.Linear(24, 48), nn.LayerNorm(24, 1e-6, False)

    def forward(self, x, emb):
        scale, shift = self.linear(self.silu(emb)).chunk(2, dim=1)
        return self.norm(x * (1 + scale[:, None])) + shift[:, None]


class Twice(Cross):
    def forward(self, x, emb):
        scale, shift = self.linear(self.silu(emb) * 2).chunk(2, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]


class Scaled(Cross):
    def forward(self, x, emb):
        scale, shift = self.linear(self.silu(emb)).chunk(2, dim=1)
        return (self.norm(x) * (1 + scale[:, None]) + shift[:, None]) * 1.5


@pytest.mark.parametrize("kind", [Cross, Twice, Scaled])
def test_what_modulates_otherwise_is_left_alone(kind):
    kind.__name__ = "AdaLayerNormContinuous"
    assert find_modulation(kind()) is None


def test_dropout_is_left_alone_in_every_mode():
    module = adaptive_norms()["Zero"][0].eval()
    module.silu = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    assert find_modulation(module) is None
    module.silu[1].p = 0.0
    assert find_modulation(module) is not None


def test_a_compiler_sees_the_original(small_tiles, monkeypatch):
    module = adaptive_norms()["Zero"][0]
    x, emb = torch.randn(2, 5, 24), torch.randn(2, 24)
    expected = module(x, emb=emb)
    swap_norms(nn.ModuleDict({"norm": module}))
    monkeypatch.setattr(adaptive, "modulate", None)  # would fail
    torch.compiler.reset()
    outs = torch.compile(module, backend="eager", fullgraph=True)(x, emb=emb)
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


@pytest.mark.parametrize(
    "what",
    [
        "a hook on its norm",
        "mixed dtypes",
        "another argument",
        "four dimensions",
        "more conditions than clips",
    ],
)
def test_a_call_that_was_not_probed_runs_the_original(small_tiles, monkeypatch, what):
    module = adaptive_norms()["Zero"][0]
    swap_norms(nn.ModuleDict({"norm": module}))
    monkeypatch.setattr(adaptive, "modulate", None)  # would fail
    x, emb, more = torch.randn(2, 5, 24), torch.randn(2, 24), {}
    if what == "a hook on its norm":
        seen = []
        module.norm.register_forward_hook(lambda *_: seen.append(1))
    elif what == "mixed dtypes":
        x = x.double()
    elif what == "another argument":
        more = {"timestep": torch.tensor([1, 2])}
    elif what == "four dimensions":
        x = torch.randn(2, 2, 5, 24)
    else:
        x = torch.randn(1, 5, 24)
    if what == "mixed dtypes":
        out = module(x, emb=emb, **more)
        assert out[0].dtype == torch.float64
        return
    assert torch.equal(module(x, emb=emb, **more)[0], type(module).forward(module, x, emb=emb, **more)[0])
    assert what != "a hook on its norm" or len(seen) == 2
