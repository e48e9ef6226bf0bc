"""A sharded model beside what else its users do to it: compile its blocks, add adapters, shard its parameters."""

import inspect

import pytest
import torch

import shardformer
from opensora_accel import Plan, init_parallel
from tests.opensora_models.mmdit import flash_attention
from tests.shardformer.conformance import compare, errors, fp64_model, in_double, step
from tests.tolerances import RELATIVE
from tests.video_models import CASES

# One of a kind: self-attention, joint attention with frames given, a grid, whole frames with a halo.
KINDS = ["Wan", "HunyuanVideo, first frame given", "STDiT3", "SANA-Video", "MMDiT"]
EXACT, CLOSE = RELATIVE[torch.float64], RELATIVE[torch.float32]


def compiled(name, plan):
    """Gradient errors in fp32, and why the compiler left its graphs."""
    init_parallel(plan)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    case, inputs = CASES[name], CASES[name].inputs()
    expected = step(case.make(), case, inputs)
    model = shardformer.shard(case.make(), plan)
    for block in shardformer.blocks_of(model):
        block.compile(backend="aot_eager")
    found = compare(step(model, case, inputs), expected)
    return found, list(torch._dynamo.utils.counters["graph_break"]), torch._dynamo.utils.counters["stats"]


@pytest.mark.parametrize("name", ["Wan", "HunyuanVideo", "SANA-Video"])
@pytest.mark.parametrize("plan", [Plan(ulysses=2), Plan(ring=2, checkpoint="full")], ids=str)
def test_blocks_compile_around_attention(ranks, name, plan):
    for found, breaks, stats in ranks(2, compiled, name, plan):
        assert max(found.values()) < CLOSE
        assert stats["unique_graphs"] >= 1
        assert all("sequence-parallel attention communicates" in reason for reason in breaks)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(ulysses=2, sharding="zero3"),
        Plan(dp_shard=2, ring=2, sharding="zero3", checkpoint="full", offload=1.0),
        Plan(dp_replicate=2, ulysses=2, sharding="zero2"),
    ],
    ids=str,
)
def test_gradients_under_fsdp2(ranks, name, plan):
    for found in ranks(plan.world_size, errors, name, plan):
        assert max(found.values()) < EXACT


def adapted(name, plan, targets):
    """With LoRA on some layers, and all else frozen: gradients of the adapters, and of the inputs."""
    from peft import LoraConfig

    init_parallel(plan)
    case, inputs, models = CASES[name], in_double(CASES[name].inputs()), []
    for sharded in (False, True):
        model = fp64_model(case)
        model.requires_grad_(False)
        torch.manual_seed(3)
        # Not zero, as LoRA starts: half of the gradients would be.
        model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        models.append(shardformer.shard(model, plan) if sharded else model)
    expected, found = (step(model, case, inputs) for model in models)
    assert len(expected) > 8 and all(
        "lora" in key or key.split()[0] in ("output", "input") for key in expected
    )
    return compare(found, expected)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("Wan", ["to_q", "to_v", "proj_out", "net.2"]),
        ("CogVideoX", ["to_k", "to_out.0", "proj_out"]),
        ("LTX-2", ["to_q", "to_v", "proj_in", "proj_out"]),
    ],
)
@pytest.mark.parametrize("plan", [Plan(ulysses=2), Plan(ring=2, checkpoint="full")], ids=str)
def test_gradients_of_adapters(ranks, name, targets, plan):
    for found in ranks(2, adapted, name, plan, targets):
        assert max(found.values()) < EXACT


def adapted_too_late():
    from peft import LoraConfig

    plan = Plan(ulysses=2)
    init_parallel(plan)
    case = CASES["Wan"]
    model = shardformer.shard(case.make(), plan)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    model(**case.inputs())  # inside of what is sharded
    model.delete_adapters("default")
    model.add_adapter(LoraConfig(r=2, target_modules=["proj_out"]))
    with pytest.raises(ValueError, match=r"proj_out was replaced after shard.*add adapters before it"):
        model(**case.inputs())


def test_an_adapter_around_what_was_sharded_is_refused(ranks):
    """Its own part would add this rank's tokens to everybody's."""
    ranks(2, adapted_too_late)


def with_flash_attention(plan):
    """The released MMDiT calls flash-attn, which no function mode of torch sees."""
    init_parallel(plan)
    name = "MMDiT"
    case, inputs = CASES[name], in_double(CASES[name].inputs())
    with flash_attention():
        expected = step(fp64_model(case), case, inputs)
        model = shardformer.shard(fp64_model(case), plan)
        found = compare(step(model, case, inputs), expected)
        shardformer.unshard(model)
        model.zero_grad()
        again = step(model, case, inputs)
    assert all(torch.equal(again[key], value) for key, value in expected.items())
    return found


@pytest.mark.parametrize("plan", [Plan(ulysses=2), Plan(ring=2, checkpoint="full")], ids=str)
def test_a_model_that_calls_flash_attention(ranks, plan):
    for found in ranks(2, with_flash_attention, plan):
        assert max(found.values()) < EXACT


def parts_of_a_whole():
    plan = Plan(ulysses=2)
    init_parallel(plan)
    model = torch.nn.Sequential(CASES["Wan"].make())
    with pytest.raises(ValueError, match="its part '0' is a WanTransformer3DModel, which has: shard that"):
        shardformer.shard(model, plan)


def test_a_wrapper_is_told_what_to_shard(ranks):
    ranks(2, parts_of_a_whole)


def test_the_engine_knows_no_model():
    """A model's class or module name in it would be a table in the wrong place."""
    import shardformer.engine.apply as engine
    from shardformer.policy import model_names

    folder = __import__("pathlib").Path(inspect.getfile(engine)).parent
    source = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    assert not [name for name in model_names() if name in source]
    assert not [
        word for word in ("transformer_blocks", "attn1", "proj_out", "Wan", "diffusers.") if word in source
    ]
