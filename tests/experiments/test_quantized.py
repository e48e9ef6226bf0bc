"""Frozen layers in codes of 8 and 4 bits: their values, their gradients, and runs of adapters on any mesh."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardformer
from opensora_accel import Plan, deferred_init, init_parallel, load_weights, materialize
from opensora_accel.experiments.quantized import QuantizedLinear, quantize, quantize_frozen
from opensora_accel.observe.fakes import fake_world
from opensora_accel.training import summary
from opensora_accel.weights import Stored
from tests.models import wan
from tests.tiers import PROVE, some
from tests.training.runs import SHARDED, lora_config, losses, save_tiny_wan

KINDS = ("int8", "nf4")


def test_a_row_by_hand():
    weight = torch.zeros(2, 64)
    weight[0, :4] = torch.tensor([1.0, -0.3, 0.06, 0.0])
    codes, scales = quantize(weight, "nf4")
    assert codes.shape == (2, 32) and codes[0, :2].tolist() == [15 * 16 + 4, 8 * 16 + 7]
    assert scales.tolist() == [[1.0], [0.0]]
    layer = layer_of(weight, "nf4")
    assert layer.weight[0, :4].tolist() == pytest.approx([1.0, -0.28444138, 0.07958030, 0.0])
    assert torch.equal(layer.weight[1], torch.zeros(64))  # no row of NaN
    codes, scales = quantize(weight, "int8")
    assert codes[0, :4].tolist() == [127, -38, 8, 0] and codes[1].tolist() == [0] * 64
    assert scales[0].item() == pytest.approx(1 / 127, rel=2**-8)


def layer_of(weight, kind, bias=False):
    linear = nn.Linear(weight.size(1), weight.size(0), bias=bias, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return QuantizedLinear(linear.requires_grad_(False), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [64, 130, 36])
def test_values_are_as_near_as_codes_can_be(kind, columns):
    """And codes of the values are the same codes: what was rounded once stays."""
    weight = torch.randn(7, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer = layer_of(weight, kind)
    assert layer.weight.shape == weight.shape
    blocks = F.pad(weight, (0, -columns % 64)).view(7, -1, 64) if kind == "nf4" else weight[:, None]
    largest = blocks.abs().amax(2, keepdim=True).expand_as(blocks).flatten(1)[:, :columns]
    # Half of the widest gap of 16 values, or of 254; and a scale that is rounded to bf16.
    bound = (0.1520 if kind == "nf4" else 1 / 254) + 2**-8
    assert ((layer.weight - weight).abs() <= bound * largest).all()
    codes, scales = quantize(layer.weight, kind)
    assert torch.equal(codes, layer.codes) and torch.equal(scales, layer.scales)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_does_not_change_in_bf16(kind):
    layer = layer_of(torch.randn(5, 200), kind)
    assert torch.equal(layer.scales.bfloat16().float(), layer.scales)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_the_values_and_keeps_the_codes_alone(kind, bias):
    layer = layer_of(torch.randn(40, 130, dtype=torch.float64), kind, bias)
    x = torch.randn(2, 11, 130, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = layer(x)
    expected = F.linear(other, layer.weight, layer.bias)
    assert torch.equal(found, expected)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-13, atol=1e-13)
    assert {id(each) for each in kept} == {id(layer.codes), id(layer.scales)}
    assert torch.autograd.gradcheck(layer, torch.randn(3, 130, dtype=torch.float64, requires_grad=True))


@pytest.mark.prove
@pytest.mark.parametrize("columns", [64, 256])
def test_codes_are_those_of_bitsandbytes(columns):
    sys.path.append(str(Path(sys.prefix) / "peers"))
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(16, columns, generator=torch.Generator().manual_seed(3))
    # Scales that bf16 has.
    weight.view(16, -1, 64)[..., 0] = 4.0
    codes, scales = quantize(weight, "nf4")
    theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(theirs.view_as(codes), codes) and torch.equal(state.absmax.view_as(scales), scales)
    values = functional.dequantize_4bit(theirs, state)
    torch.testing.assert_close(layer_of(weight, "nf4").weight, values, rtol=1e-6, atol=1e-7)


def quantized_wan(folder="", seed=3):
    with deferred_init(seed):
        model = wan(torch.float32)
    if folder:
        load_weights(model, folder)
    quantize_frozen(model.requires_grad_(False), "nf4", folder)
    return model


def test_what_the_model_keeps_exact_stays_whole():
    model = materialize(quantized_wan())
    quantized = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert quantized == {
        f"blocks.{block}.{name}"
        for block in (0, 1)
        for name in (
            *(f"attn{number}.{part}" for number in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")),
            "ffn.net.0.proj",
            "ffn.net.2",
        )
    }
    assert summary._num_parameters(model) == sum(parameter.numel() for parameter in wan().parameters())
    assert all(
        module.weight.isfinite().all() for module in model.modules() if isinstance(module, QuantizedLinear)
    )


def test_a_rank_reads_its_rows_alone_and_has_the_codes_of_one_device(tmp_path, monkeypatch):
    torch.manual_seed(0)
    wan(torch.float32).save_pretrained(tmp_path)
    # By what led to it, whole, and from the file.
    plain = wan(torch.float32)
    load_weights(plain, tmp_path)
    quantize_frozen(plain.requires_grad_(False), "nf4")
    expected = plain.state_dict()
    found = materialize(quantized_wan(tmp_path)).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    read, call = dict[str, int](), Stored.read

    def counted(self, dtype, region=()):
        tensor = call(self, dtype, region)
        read[self.name] = read.get(self.name, 0) + tensor.numel()
        return tensor

    monkeypatch.setattr(Stored, "read", counted)
    with fake_world(1, 3):
        plan = Plan(ulysses=3, sharding="zero3", precision="bf16")
        init_parallel(plan, "cpu")
        model, _ = shardformer.parallelize(quantized_wan(tmp_path), plan, torch.device("cpu"))
    layer = model.blocks[0].attn1.to_q
    rows = slice(-(-layer.out_features // 3), 2 * -(-layer.out_features // 3))
    assert torch.equal(layer.codes.to_local(), expected["blocks.0.attn1.to_q.codes"][rows])
    assert layer.codes.dtype == torch.uint8 and layer.scales.dtype == torch.bfloat16
    # Once for codes and once for scales.
    assert read["blocks.0.attn1.to_q.weight"] == 2 * (rows.stop - rows.start) * layer.in_features


# ---- in the trainer


@pytest.fixture
def base(tmp_path):
    return save_tiny_wan(tmp_path / "base")


MESHES = [*SHARDED, Plan(ulysses=2, checkpoint="selective"), Plan(ring=2, sharding="zero3", cpu_offload=True)]


@PROVE
@pytest.mark.slow
@pytest.mark.parametrize("kind", some(["nf4", "int8"]))
@pytest.mark.parametrize("adapter", some(["lora", "dora", "lokr"]))
@pytest.mark.parametrize("plan", some(MESHES, MESHES[1]), ids=str)
def test_losses_are_those_of_one_device(ranks, clips, base, tmp_path, kind, adapter, plan):
    changes = {"lora.base": kind, "lora.kind": adapter}
    fp64 = Plan(precision="fp64")
    (one,) = ranks(1, losses, lora_config(clips, base, tmp_path / "one", fp64, **changes))
    sharded = lora_config(clips, base, tmp_path / "run", plan.replace(precision="fp64"), **changes)
    for found in ranks(plan.world_size, losses, sharded):
        assert found == pytest.approx(one, rel=1e-9)
    whole = lora_config(clips, base, tmp_path / "whole", fp64, **{"lora.kind": adapter})
    (without,) = ranks(1, losses, whole)
    # Near to those of the model itself, and not the same.
    assert one != without and one == pytest.approx(without, rel=0.05)


def trained(config, saved=None, until=None):
    """Adapters after the run, or where it stopped; bytes of frozen layers on this rank; where it was saved."""
    from opensora_accel.training.adapters import saved_weights
    from opensora_accel.training.loop import Trainer
    from opensora_accel.training.saved_state import read_record

    trainer = Trainer(config, saved, read_record(saved) if saved else None)
    for _ in range((until or config.steps) - trainer.state.step):
        trainer.step()
    model = trainer.state.model
    frozen = [p for p in model.blocks.parameters() if not p.requires_grad]
    size = sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in frozen)
    after = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone()
        for name, p in saved_weights(model).items()
    }
    folder = trainer.save()
    trainer.saver.wait()
    trainer.train()
    return after, size, folder


@PROVE
@pytest.mark.parametrize("kind", some(["nf4", "int8"]))
def test_a_run_in_bf16_goes_on_bit_for_bit_and_is_exported(ranks, clips, base, tmp_path, kind):
    from diffusers import WanTransformer3DModel

    plan = Plan(dp_shard=2, sharding="zero3", precision="bf16")
    config = lora_config(clips, base, tmp_path / "run", plan, **{"lora.base": kind})
    whole = ranks(2, trained, config)
    half = dataclasses.replace(config, output=str(tmp_path / "half"))
    ((_, size, saved), *_) = ranks(2, trained, half, None, 2)
    for (expected, _, _), (found, _, _) in zip(whole, ranks(2, trained, half, saved), strict=True):
        assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)
    plain = ranks(
        2, trained, dataclasses.replace(config, lora=dataclasses.replace(config.lora, base="whole"))
    )
    # Of two bytes an element there are layers of norms, biases and tables beside.
    assert size < {"nf4": 0.55, "int8": 0.75}[kind] * plain[0][1]
    model = WanTransformer3DModel.from_pretrained(base)
    model.load_lora_adapter(str(tmp_path / "run" / "lora"), prefix="transformer", use_safetensors=True)
    assert any("lora" in name for name, _ in model.named_parameters())


def test_the_run_says_how_the_base_is_kept(run, clips, base, tmp_path):
    config = lora_config(clips, base, tmp_path / "run", **{"lora.base": "nf4", "steps": 1})
    (tmp_path / "run.json").write_text(json.dumps(dataclasses.asdict(config)))
    status, text = run("train", "--config", tmp_path / "run.json")
    assert status == 0 and "whose frozen layers are kept in nf4, on 1 CPU rank(s)" in text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lora.rank": 0}, "lora.base are for a run with lora.rank; set it, or leave them out"),
        ({"plan.tp": 3}, "keeps layers by their rows, which plan.tp cuts otherwise; set plan.tp to 1"),
        ({"lora.base": "int4"}, "lora.base"),
    ],
)
def test_what_cannot_be_is_refused(clips, base, tmp_path, changes, told):
    with pytest.raises(ValueError, match=told):
        lora_config(clips, base, tmp_path / "run", **{"lora.base": "nf4", **changes})


def test_a_model_of_which_nothing_is_frozen_is_refused():
    with pytest.raises(ValueError, match="WanTransformer3DModel has none; leave it out"):
        quantize_frozen(wan(), "int8")


@PROVE
@pytest.mark.slow
@pytest.mark.parametrize("command", [pytest.param("verify", marks=PROVE), "plan"])
def test_commands_take_it(run, clips, base, tmp_path, command):
    plan = Plan(precision="bf16")
    config = lora_config(clips, base, tmp_path / "run", plan, **{"lora.base": "nf4"})
    (tmp_path / "run.json").write_text(json.dumps(dataclasses.asdict(config)))
    more = ["--gpus", 2, "--hardware", "h100x8-ib400"] if command == "plan" else ["--max-ranks", 2]
    status, text = run(command, "--config", tmp_path / "run.json", *more)
    assert status == 0, text
    assert "those of a single device" in text or command == "plan"
