"""What is planned for: published models with their sizes, a user's file, and what is refused with the remedy."""

from collections import Counter
from itertools import groupby

import pytest
import torch

from opensora_accel import Plan
from opensora_accel.fsdp import kept_in_fp32
from opensora_accel.planner.candidates import Passes, Request
from opensora_accel.planner.estimate import Estimator, Reference
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.models import MODELS, PARTS, named_workload
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.search import exact
from opensora_accel.planner.workload import Workload, step_file
from opensora_accel.training.planned import job_of
from opensora_accel.training.true_size import TrueSize
from tests.tiers import PROVE, some
from tests.training.runs import tiny_config

# Billions of parameters that the models are published with.
PUBLISHED = {
    "wan2.1-1.3b": 1.42,
    "wan2.1-14b": 14.29,
    "wan2.2-5b": 5.00,
    "hunyuan-video": 12.82,
    "ltx-video": 1.92,
    "cogvideox-2b": 1.69,
    "cogvideox-5b": 5.57,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_size_that_it_was_published_with(name):
    with torch.device("meta"):
        model = MODELS[name].build()
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == PUBLISHED[name]
    assert MODELS[name].source


@pytest.mark.prove
def test_what_does_not_train_has_the_size_of_its_class():
    import diffusers
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        LlamaConfig,
        LlamaModel,
        T5Config,
        T5EncoderModel,
        UMT5Config,
        UMT5EncoderModel,
    )

    llama = {"vocab_size": 128_320, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    llama |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    clip = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    # Wan-AI/Wan2.2-TI2V-5B-Diffusers, vae/config.json.
    wan22 = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "patch_size": 2}
    wan22 |= {"in_channels": 12, "out_channels": 12, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    sizes |= {"feed_forward_proj": "gated-gelu"}
    with torch.device("meta"):
        made = {
            "UMT5-XXL": UMT5EncoderModel(UMT5Config(vocab_size=256384, **sizes)),
            "T5-XXL": T5EncoderModel(T5Config(vocab_size=32128, **sizes)),
            "LLaMA 3 8B": LlamaModel(LlamaConfig(**llama)),
            "CLIP-L": CLIPTextModel(CLIPTextConfig(vocab_size=49_408, **clip)),
            "Wan 2.1 VAE": diffusers.AutoencoderKLWan(),
            "Wan 2.2 VAE": diffusers.AutoencoderKLWan(**wan22),
            "HunyuanVideo VAE": diffusers.AutoencoderKLHunyuanVideo(),
            "CogVideoX VAE": diffusers.AutoencoderKLCogVideoX(),
            "LTX-Video VAE": diffusers.AutoencoderKLLTXVideo(),
        }
    told = {
        name: number for model in MODELS.values() for part in PARTS for name, number in getattr(model, part).items()
    }  # fmt: skip
    assert told == {name: sum(p.numel() for p in module.parameters()) for name, module in made.items()}


@pytest.mark.parametrize("name", MODELS)
def test_what_does_not_train_is_told_with_its_size_and_source(name):
    for part in PARTS:
        found = MODELS[name].frozen(part)
        sizes = getattr(MODELS[name], part)
        assert found.size_bytes == 2 * sum(sizes.values()) > 0
        assert all(each in found.source for each in sizes) and "in bf16" in found.source


def test_tokens_are_counted_in_latents_and_patches():
    workload = named_workload("wan2.1-14b", frames=81, height=720, width=1280)
    assert workload.num_tokens == 21 * 45 * 80 == 75_600 and workload.text_tokens == 512
    assert named_workload("ltx-video", frames=121, height=512, width=704).num_tokens == 16 * 16 * 22
    assert named_workload("wan2.2-5b", frames=121, height=704, width=1280, batch=2).batch == 2


@PROVE
@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_is_traced(name):
    workload = named_workload(name, frames=17, height=128, width=256)
    plan = Plan(ulysses=2, dp_shard=2, sharding="zero3", prefetch=0, checkpoint="full", precision="bf16")
    trace = trace_step(workload, plan)
    num_parameters = PUBLISHED[name] * 1e9
    assert trace.parameter_bytes == pytest.approx(4 * num_parameters / 4, rel=0.01)
    # Every block attends to all of the tokens, with text where it shares their sequence, and half of the heads.
    sizes = Counter(
        each.shape[1:4] for each in trace.operations if each.kind == "attention" and each.phase == "forward"
    )
    tokens = {workload.num_tokens, workload.num_tokens + workload.text_tokens}
    whole = {shape: count for shape, count in sizes.items() if shape[2] in tokens}
    assert sum(whole.values()) == trace.num_blocks
    assert all(shape[0] == workload.num_heads // 2 for shape in whole)


STEP = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.drop = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.drop(torch.relu(self.lift(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def model_fn():
    return Model()

def step(model, run):
    from torch.distributed.fsdp import fully_shard
    from opensora_accel import init_parallel

    init_parallel(run.plan, "cpu")
    for module in [*model.blocks, model]:
        fully_shard(module)
    model(torch.randn(5, 8)).square().mean().backward()
"""


def test_a_loop_of_the_users_own_is_traced(tmp_path):
    path = tmp_path / "my_step.py"
    path.write_text(STEP)
    trace = trace_step(step_file(path), Plan(dp_shard=4, sharding="zero3"))
    kinds = Counter(operation.collective for operation in trace.operations)
    assert trace.num_blocks == 3 and kinds["all-gather"] == 6 and kinds["reduce-scatter"] == 3
    assert trace.parameter_bytes == 3 * (2 * 8 * 32 + 32 + 8) * 4 // 4
    gemms = Counter(
        each.shape for each in trace.operations if each.kind == "gemm" and each.phase == "forward"
    )
    assert gemms == {(1, 5, 32, 8): 3, (1, 5, 8, 32): 3}
    # The optimizer has its state, though the step runs once.
    assert trace.memory[0].bytes_by_kind["optimizer state"] >= 2 * trace.parameter_bytes


def test_a_configured_run_is_traced(clips, tmp_path):
    config = tiny_config(clips, tmp_path)
    true = TrueSize.of(config)
    workload = Workload(
        "config", true.model, true.prepare, accumulation=2, fused_optimizer=False, architecture="cpu"
    )
    trace = trace_step(workload, Plan(ulysses=2, sharding="zero3", checkpoint="full"))
    assert trace.num_blocks == true.arguments["num_layers"]
    # Two passes, of which each recomputes every block.
    phases = [phase for phase, _ in groupby(each.phase for each in trace.operations)]
    assert phases.count("recompute") == 2 * trace.num_blocks and phases[-1] == "optimizer"


PLANS = [
    Plan(ulysses=2, sharding="zero3", checkpoint="full", precision="bf16"),
    Plan(dp_replicate=2, precision="bf16"),
    Plan(dp_shard=2, sharding="zero2"),
]


@PROVE
@pytest.mark.parametrize("plan", some(PLANS, PLANS[0]), ids=str)
def test_what_adapters_freeze_has_neither_gradients_nor_averages(clips, tmp_path, plan):
    """And takes two bytes an element in bf16, but for what the model keeps in fp32."""
    job = job_of(tiny_config(clips, tmp_path, plan, **{"lora.rank": 2}))
    ((workload, _share),) = job.mix
    with torch.device("meta"):
        model = workload.model_fn()
    kept, trained, frozen = kept_in_fp32(model), 0, 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            trained += 4 * parameter.numel()
        else:
            narrow = plan.precision == "bf16" and id(parameter) not in kept
            frozen += (2 if narrow else 4) * parameter.numel()
    trace = trace_step(workload, plan)
    shards = plan.num_shards
    # Rows of 3 and 16 heads' channels do not divide evenly.
    assert trace.trained_bytes == pytest.approx(trained / shards, rel=0.02)
    assert trace.parameter_bytes == pytest.approx((trained + frozen) / shards, rel=0.02)
    request = Request(job.mix, Hardware.named("h100x8-ib400"), 2, plan.precision, job.residents)
    kinds = exact(request, plan, Passes()).bytes_by_kind
    assert kinds["ema"] == trace.trained_bytes
    estimator = Estimator(Reference.of(workload, plan.precision), request.hardware)
    estimated = estimator.bytes_by_kind(plan)
    assert estimator.trained_bytes(plan) == trained // shards
    assert estimated["optimizer state"] == pytest.approx(2 * trained / shards, abs=2)
    # It knows nothing of what is kept in fp32.
    assert frozen * 0.8 < shards * estimated["parameters"] - trained <= frozen


def test_a_step_that_reads_values_is_refused(tmp_path):
    path = tmp_path / "reads.py"
    path.write_text(STEP.replace(".backward()", ".item()"))
    with pytest.raises(ValueError, match=r"keep \.item\(\) and \.numpy\(\) out of it"):
        trace_step(step_file(path), Plan(dp_shard=2, sharding="zero3"))


def test_a_step_that_calls_another_model_is_refused(tmp_path):
    path = tmp_path / "other.py"
    path.write_text(STEP + "\n\ndef step(model, run):\n    Model()(torch.randn(5, 8)).sum().backward()\n")
    with pytest.raises(ValueError, match="never calls the model"):
        trace_step(step_file(path), Plan())


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "sizes", "told"),
    [
        ("wan-14b", {}, "no model is called 'wan-14b'; did you mean 'wan2.1-14b'"),
        ("HunyuanVideo", {}, "did you mean 'hunyuan-video'"),
        ("gpt", {}, "known are wan2.1-1.3b, .*--step FILE.py"),
        (
            "wan2.1-14b",
            {"frames": 80},
            r"frames \(80\) must be a multiple of 4 and one more, .* use 77 or 81",
        ),
        ("ltx-video", {"frames": 81 + 4}, r"multiple of 8 and one more, for the codec; use 81 or 89"),
        (
            "wan2.1-14b",
            {"height": 724},
            r"height \(724\) must be divisible by codec \(8\) × patch \(2\) = 16; use 720",
        ),
        ("wan2.2-5b", {"width": 1296}, r"width \(1296\) must be divisible by .* = 32; use 1280 or 1312"),
        ("wan2.1-14b", {"height": 8}, r"height \(8\) .* use 16"),
        ("wan2.1-14b", {"frames": 0}, "frames must be at least 1; got 0"),
        ("wan2.1-14b", {"batch": 0}, "batch must be at least 1; got 0"),
        ("wan2.1-14b", {"text_tokens": -1}, "text tokens must be at least 1; got -1"),
    ],
)
def test_names_and_sizes_are_refused_with_what_would_do(name, sizes, told):
    given = {"frames": 81, "height": 704, "width": 1280} | sizes
    with pytest.raises(ValueError, match=told):
        named_workload(name, **given)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def step(model, run): pass", r"defines no model_fn\(\)"),
        ("def model_fn(): pass", r"defines no step\(model, run\)"),
        ("import nothing_of_that_name", r"cannot be loaded \(line 1\)"),
    ],
)
def test_a_file_that_does_not_do_is_refused(tmp_path, text, told):
    path = tmp_path / f"file_{abs(hash(text))}.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        step_file(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        step_file(tmp_path / "none.py")
