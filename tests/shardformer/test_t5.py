"""T5's norm and the T5 policy: the same numbers, the same parameter objects."""

import pytest
import torch
from torch import nn

import shardformer
from opensora_accel import Plan
from shardformer.modeling.t5 import T5LayerNorm
from shardformer.policy.t5_encoder import T5EncoderPolicy


def encoder(kind, dtype=torch.float32, heads=4, gated=True):
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    model, config = {"t5": (T5EncoderModel, T5Config), "umt5": (UMT5EncoderModel, UMT5Config)}[kind]
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": heads}
    made = model(config(**sizes, feed_forward_proj="gated-gelu" if gated else "relu", dropout_rate=0.0)).to(
        dtype
    )
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_that_of_transformers_bit_for_bit(dtype):
    from transformers.models.t5.modeling_t5 import T5LayerNorm as Reference

    reference = Reference(64, eps=1e-6).to(dtype)
    nn.init.normal_(reference.weight)
    mine = T5LayerNorm.from_native_module(reference, process_group=None)
    assert mine.weight is reference.weight and mine.variance_epsilon == 1e-6
    x = torch.randn(3, 5, 64).to(dtype)
    for tensor in (x, x.float(), x * 1e-3):
        assert torch.equal(mine(tensor), reference(tensor)) and mine(tensor).dtype == reference(tensor).dtype


def test_the_norm_in_fp64_is_fp64():
    norm, x = T5LayerNorm(32).double(), torch.randn(4, 32, dtype=torch.float64)
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(norm(x), exact, rtol=1e-14)
    assert torch.autograd.gradcheck(norm, x.requires_grad_())


@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_the_policy_swaps_every_norm_and_back(kind):
    model = encoder(kind)
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    before = {name: parameter for name, parameter in model.named_parameters()}
    expected = model(input_ids=ids).last_hidden_state
    shardformer.shard(model, Plan(), policy=T5EncoderPolicy())
    norms = [m for m in model.modules() if type(m) is T5LayerNorm]
    assert len(norms) == 5 and not any(
        "T5LayerNorm" in type(m).__name__ and m not in norms for m in model.modules()
    )
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert torch.equal(model(input_ids=ids).last_hidden_state, expected)
    shardformer.unshard(model)
    assert not any(type(m) is T5LayerNorm for m in model.modules())


def test_a_fused_norm_becomes_plain():
    """apex's class by name: a torch RMSNorm stands in for it, as its kernel needs a GPU."""

    class FusedRMSNorm(nn.RMSNorm):
        pass

    model = encoder("t5")
    for block in model.encoder.block:
        for layer in block.layer:
            fused = FusedRMSNorm(32, eps=1e-6)
            fused.weight = layer.layer_norm.weight
            layer.layer_norm = fused
    ids = torch.arange(6).view(1, 6)
    expected = encoder("t5")(input_ids=ids).last_hidden_state
    shardformer.shard(model, Plan())
    assert not any(type(m) is FusedRMSNorm for m in model.modules())
    assert torch.equal(model(input_ids=ids).last_hidden_state, expected)


def test_a_layer_norm_is_refused():
    with pytest.raises(ValueError, match="RMSNorm with one weight vector and no bias; LayerNorm is none"):
        T5LayerNorm.from_native_module(nn.LayerNorm(4))


def test_checkpointing_a_t5_keeps_its_gradients():
    ids, grads = torch.arange(8).view(1, 8), []
    for plan in (Plan(), Plan(checkpoint="full", offload=1.0)):
        model = shardformer.shard(encoder("t5"), plan)
        model(input_ids=ids).last_hidden_state.square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
