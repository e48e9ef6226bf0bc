"""A sharded model beside what else its users do to it: add adapters, shard its parameters, checkpoint by themselves."""

import inspect
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import opensora_accel.checkpoint
import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.observe import CollectiveRecorder
from tests.opensora_models.mmdit import flash_attention
from tests.shardformer.conformance import compare, errors, fp64_model, in_double, of_first_rank, step
from tests.tiers import each_once
from tests.tolerances import RELATIVE
from tests.video_models import CASES

# One of a kind: self-attention, joint attention with frames given, a grid, whole frames with a halo.
KINDS = ["Wan", "HunyuanVideo, first frame given", "STDiT3", "SANA-Video", "MMDiT"]
EXACT = RELATIVE[torch.float64]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    each_once(
        KINDS,
        [
            Plan(dp_shard=2, ring=2, sharding="zero3", checkpoint="full", offload=1.0),
            Plan(ulysses=2, sharding="zero3"),
            Plan(dp_replicate=2, ulysses=2, sharding="zero2"),
        ],
        KINDS[:3],
    ),
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


def adapted_whole():
    """PEFT's own wrapper around the model: it is told what to shard, and that works."""
    from peft import LoraConfig, get_peft_model

    plan = Plan(ulysses=2)
    init_parallel(plan)
    case, found = CASES["Wan"], []
    for sharded in (False, True):
        whole = get_peft_model(fp64_model(case), LoraConfig(target_modules=["to_q"], init_lora_weights=False))
        torch.manual_seed(0)
        for parameter in whole.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter)
        if sharded:
            with pytest.raises(ValueError) as caught:
                shardformer.shard(whole, plan)
            assert "its part 'base_model.model' is a WanTransformer3DModel, which has: shard that" in str(
                caught.value
            )
            shardformer.shard(whole.get_submodule("base_model.model"), plan)
        found.append(step(whole, case, in_double(case.inputs()) | {"return_dict": False}))
    return compare(found[1], found[0])


def test_the_part_of_a_wrapped_model_is_sharded(ranks):
    for found in ranks(2, adapted_whole):
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


def checkpointed_by(kind, model, case):
    """Turns on a checkpointing that users have besides the plan's."""
    if kind == "the model's own":
        case.enable_checkpointing(model)
    elif kind == "the model's own, reentrant":
        model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=True))
    elif kind == "torch's wrapper":
        blocks = set(shardformer.blocks_of(model))
        apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)
    else:
        for block in shardformer.blocks_of(model):
            by_hand(block, opensora_accel.checkpoint.checkpoint if "ours" in kind else checkpoint)


def wrapped_and_sharded_by_torch():
    """Checkpoint wrappers around the blocks, and FSDP2 around those, as torch's own trainers do."""
    plan = Plan(ulysses=2)
    init_parallel(plan)
    case, inputs = CASES["Wan"], in_double(CASES["Wan"].inputs())
    expected, model = (fp64_model(case) for _ in range(2))
    checkpointed_by("torch's wrapper", shardformer.shard(model, plan), case)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    for each in (expected, model):
        each(**inputs, return_dict=False)[0].square().mean().backward()
    found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    found = {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in found.items()}
    return compare(found, {name: parameter.grad for name, parameter in expected.named_parameters()})


def test_checkpoint_wrappers_under_fully_shard(ranks):
    for found in ranks(2, wrapped_and_sharded_by_torch):
        assert max(found.values()) < EXACT


def by_hand(block, function):
    """As a user's own loop over the blocks does, which calls a checkpoint of each."""
    kind = type(block)

    def call(self, *args, **kwargs):
        return function(partial(kind.__call__, self), *args, use_reentrant=False, **kwargs)

    block.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def checkpointed(name, kind):
    """Two microbatches in flight, the second half as large, and forward again before the second's backward."""
    plan = Plan(ulysses=2)
    init_parallel(plan)
    case, inputs, found = CASES[name], in_double(CASES[name].inputs()), []
    halves = {key: value[:1] if torch.is_tensor(value) else value for key, value in inputs.items()}
    halves["hidden_states"] = halves["hidden_states"][:, :, :3]
    for sharded in (False, True):
        model = fp64_model(case)
        if sharded:
            shardformer.shard(model, plan)
            checkpointed_by(kind, model, case)
        first, second = (model(**each, return_dict=False)[0] for each in (inputs, halves))
        first.square().mean().backward()
        third = model(**inputs, return_dict=False)[0]
        second.square().mean().backward()
        third.square().mean().backward()
        found.append(
            {key.replace("_checkpoint_wrapped_module.", ""): p.grad for key, p in model.named_parameters()}
        )
    return compare(found[1], found[0])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("the model's own", "HunyuanVideo, first frame given"),
        ("the model's own, reentrant", "HunyuanVideo, first frame given"),
        pytest.param("the model's own, reentrant", "Wan", marks=pytest.mark.prove),
        ("torch's wrapper", "HunyuanVideo, first frame given"),
        pytest.param("torch's wrapper", "SANA-Video", marks=pytest.mark.prove),
        ("ours, by hand", "HunyuanVideo, first frame given"),
        ("torch's own, by hand", "Wan"),  # which nobody tells: self-attention without a mask needs nothing
    ],
)
def test_gradients_under_another_checkpointing(ranks, name, kind):
    for found in ranks(2, checkpointed, name, kind):
        assert max(found.values()) < EXACT


def checkpointed_by_hand(name):
    plan = Plan(ulysses=2)
    init_parallel(plan)
    case = CASES[name]
    model = shardformer.shard(case.make(), plan)
    checkpointed_by("torch's own, by hand", model, case)
    out = step_forward(model, case)
    remedy = r"opensora_accel.checkpoint.checkpoint in place of torch's"  # the test above does that
    with pytest.raises(ValueError, match=f"by a checkpoint that shardformer does not know of.*{remedy}"):
        out.square().mean().backward()


def wrapped_too_early():
    plan = Plan(ulysses=2)
    init_parallel(plan)
    model = CASES["Wan"].make()
    checkpointed_by("torch's wrapper", model, CASES["Wan"])
    with pytest.raises(
        ValueError, match=r"blocks.0 is wrapped already \(by CheckpointWrapper\); wrap it after shard"
    ):
        shardformer.shard(model, plan)


def test_blocks_that_were_wrapped_before_are_refused(ranks):
    ranks(2, wrapped_too_early)


def step_forward(model, case):
    extra = {"return_dict": False} if "return_dict" in inspect.signature(model.forward).parameters else {}
    out = model(**case.inputs(), **extra)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize(
    "name", ["HunyuanVideo", "Allegro, padded clips", "Helios", "LTX-2", "SANA-Video", "Latte", "STDiT3"]
)
def test_a_checkpoint_that_is_not_told_is_refused_where_it_would_be_wrong(ranks, name):
    ranks(2, checkpointed_by_hand, name)


def one_within_another():
    """A student holds its teacher, trained too, and both bring checkpointing along."""
    plan = Plan(ulysses=2)
    init_parallel(plan)
    cases = [CASES[name] for name in ("CogVideoX", "HunyuanVideo, first frame given")]
    inputs, found = [in_double(case.inputs()) for case in cases], []
    for sharded in (False, True):
        student, teacher = models = [fp64_model(case) for case in cases]
        if sharded:
            for model in models:
                shardformer.shard(model, plan).enable_gradient_checkpointing()
        student.teacher, outs = teacher, []

        def teach(*_, teacher=teacher, outs=outs):
            outs.append(teacher(**inputs[1], return_dict=False)[0])

        student.patch_embed.register_forward_pre_hook(teach)
        outs.append(student(**inputs[0], return_dict=False)[0])
        sum(out.square().mean() for out in outs).backward()
        found.append({key: p.grad for key, p in student.named_parameters()})
    return compare(found[1], found[0])


def test_a_sharded_model_within_another(ranks):
    for found in ranks(2, one_within_another):
        assert max(found.values()) < EXACT


def with_a_group_and_no_axes(name, plan):
    """Open-Sora's way, and ColossalAI's: setters, and no mesh of ours."""
    everyone = dist.new_group(range(dist.get_world_size()))
    parallel_states.set_sequence_parallel_group(everyone)
    parallel_states.set_mixed_parallel_group(everyone)
    case, inputs = CASES[name], in_double(CASES[name].inputs())
    expected = of_first_rank(lambda: step(fp64_model(case), case, inputs))
    model = shardformer.shard(fp64_model(case), plan)
    return compare(step(model, case, inputs), expected)


@pytest.mark.parametrize("name", ["Wan", "HunyuanVideo", "STDiT3", "LTX-2"])
@pytest.mark.parametrize("plan", [Plan(ulysses=2), Plan(ring=2)], ids=["ulysses", "ring"])
def test_a_sequence_group_alone_is_enough_for_one_axis(ranks, name, plan):
    for found in ranks(2, with_a_group_and_no_axes, name, plan):
        assert max(found.values()) < EXACT


def with_a_group_for_two_axes():
    parallel_states.set_sequence_parallel_group(dist.new_group(range(dist.get_world_size())))
    with pytest.raises(
        ValueError, match=r"only their sequence group is registered.*register_groups\(plugin\)"
    ):
        shardformer.shard(CASES["Wan"].make(), Plan(ring=2, ulysses=2))


def test_a_sequence_group_alone_is_not_enough_for_two(ranks):
    ranks(4, with_a_group_for_two_axes)


def sent(name):
    plan = Plan(ulysses=2)
    init_parallel(plan)
    case = CASES[name]
    model = shardformer.shard(case.make(), plan)
    with CollectiveRecorder() as forward:
        out = step_forward(model, case)
    with CollectiveRecorder() as backward:
        out.square().mean().backward()
    return [Counter(call.kind for call in recorded.calls) for recorded in (forward, backward)]


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # Backward gathers the tokens, and what all blocks get of the timesteps, and what the output layer does.
        ("Wan, time per token", {"all-to-all": 4, "all-gather": 1}, {"all-to-all": 4, "all-gather": 3}),
        # Its own input is split, which takes no gradient here.
        ("LTX-Video", {"all-to-all": 4, "all-gather": 1}, {"all-to-all": 4}),
        # Into a frame's own attention and back, in either of the spatial blocks.
        ("STDiT3, frames given", {"all-to-all": 4, "all-gather": 1}, {"all-to-all": 4, "all-gather": 1}),
        (
            "SANA-Video",
            {"all-reduce": 2, "all-to-all": 2, "all-gather": 1},
            {"all-reduce": 2, "all-to-all": 2, "all-gather": 1},
        ),
        # Its mask of blocks is slices.
        (
            "SkyReels-V2, diffusion forcing",
            {"all-to-all": 4, "all-gather": 1},
            {"all-to-all": 4, "all-gather": 2},
        ),
    ],
)
def test_a_step_sends_its_tokens_and_no_sizes(ranks, name, forward, backward):
    """Two blocks: what a forward knows of its tokens is not exchanged, what all blocks get is gathered once."""
    for found in ranks(2, sent, name):
        assert found == [forward, backward]


def fewer_frames(name, dims):
    """Two frames on three ranks: the model would fail on the rank without any, and the others would wait."""
    plan = Plan(ring=3)
    init_parallel(plan)
    case = CASES[name]
    model, inputs = shardformer.shard(case.make(), plan), case.inputs()
    for argument, (dim, size) in dims.items():
        inputs[argument] = inputs[argument].narrow(dim, 0, size)
    with pytest.raises(ValueError, match=r"has 2 .*cannot run on none, as some of 3 ranks would have to"):
        model(**inputs)


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("Latte", {"hidden_states": (2, 2), "encoder_attention_mask": (0, 4)}),
        (
            "Wan Animate",
            {"hidden_states": (2, 2), "pose_hidden_states": (2, 1), "face_pixel_values": (2, 1)},
        ),
        ("SANA-Video, time per token", {"hidden_states": (2, 2), "timestep": (1, 2 * 15)}),
    ],
)
def test_fewer_frames_than_ranks_are_refused_on_every_rank(ranks, name, dims):
    ranks(3, fewer_frames, name, dims)


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
