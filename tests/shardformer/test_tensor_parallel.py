"""Tensor parallelism: output, input gradient and every parameter gradient equal those of one device."""

import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.checkpoint import checkpoint_blocks, set_grad_checkpoint
from opensora_accel.precision import lift_casts
from opensora_accel.sharding import Chain, Invariant, Shard
from shardformer.clipping import total_grad_norm
from shardformer.modeling.norms import KERNELS
from shardformer.policy.open_sora import MMDIT_TENSORS
from shardformer.policy.t5 import T5_TENSORS
from shardformer.policy.tensors import ColumnParallel, RowParallel, TensorRegion
from shardformer.tensor_parallel import (
    full_shape,
    full_state_dict,
    full_tensor,
    load_full_state_dict,
    local_tensor,
    shard_tensors,
)
from shardformer.tensor_parallel.apply import _cuts_by_name
from shardformer.tensor_parallel.derive import add_bias, derive_path
from shardformer.tensor_parallel.layers import Entrance
from shardformer.tensor_parallel.plan import plan_region
from tests.attention.counting import counted
from tests.opensora_models import mmdit, mmdit_inputs
from tests.shardformer.modeling.conftest import STAND_IN
from tests.shardformer.test_t5 import encoder
from tests.tolerances import RELATIVE, relative_error, relative_errors

EXACT = RELATIVE[torch.float64]


def build(kind, **options):
    """A model in which fp64 stays fp64, its regions, and a step on it."""
    if kind == "mmdit":
        model, regions, inputs = mmdit(**options), MMDIT_TENSORS, mmdit_inputs()
        inputs["img"].requires_grad_()
    else:
        model, regions = encoder(kind, torch.float64, **options), T5_TENSORS
        ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(1))
        mask = torch.arange(9) < torch.tensor([[9], [6]])
        # Embedded outside, so that the gradient of what enters is compared too.
        inputs = {"inputs_embeds": model.shared(ids).detach().requires_grad_(), "attention_mask": mask}
    lift_casts(model)
    return model, regions, inputs


def step(model, inputs):
    """Output, and the gradients of what enters and of every parameter."""
    model.zero_grad()
    out = model(**inputs)
    out = out if isinstance(out, torch.Tensor) else out.last_hidden_state
    target = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    (out - target).square().mean().backward()
    source = inputs["img"] if "img" in inputs else inputs["inputs_embeds"]
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {"output": out.detach(), "input": source.grad, **grads}
    source.grad = None
    return found


def worst(actual, expected):
    """The largest relative error, with its name."""
    assert actual.keys() == expected.keys()
    return max(
        ((error, n) for n, error in relative_errors(actual, expected).items()), key=lambda pair: pair[0]
    )


def whole(model, found):
    return {name: full_tensor(model, name, tensor) for name, tensor in found.items()}


def compared(kind, options, checkpointing=""):
    model, regions, inputs = build(kind, **options)
    expected = step(model, inputs)
    shard_tensors(model, regions, dist.group.WORLD)
    if checkpointing == "ours":
        checkpoint_blocks(model.double_blocks, "full", 0.0, boundary=("img", "txt"))
        checkpoint_blocks(model.single_blocks, "full", 0.0, boundary=("x",))
    elif checkpointing:
        set_grad_checkpoint(model)
    return worst(whole(model, step(model, inputs)), expected)


MODELS = [
    ("t5", {}),
    ("t5", {"gated": False}),
    ("umt5", {}),
    ("mmdit", {"heads": 4}),
    ("mmdit", {"heads": 3, "fused_qkv": False, "use_liger_rope": True, "qkv_bias": False}),
]
MODEL_NAMES = ["T5", "T5 with a plain MLP", "UMT5", "MMDiT", "MMDiT unfused"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("kind", "options"), MODELS, ids=MODEL_NAMES)
def test_every_gradient_is_that_of_one_device(ranks, num_ranks, kind, options):
    """On 3 ranks 4 heads are 2 + 1 + 1; on 2 ranks 3 heads are 2 + 1."""
    for error, name in ranks(num_ranks, compared, kind, options):
        assert error < EXACT, name


@pytest.mark.slow
def test_four_ranks_of_a_head_each(ranks):
    for kind in ("umt5", "mmdit"):
        for error, name in ranks(4, compared, kind, {"heads": 4}):
            assert error < EXACT, name


@pytest.mark.parametrize("checkpointing", ["ours", "the model's"])
def test_checkpointed_blocks_have_the_same_gradients(ranks, checkpointing):
    for error, name in ranks(2, compared, "mmdit", {"fused_qkv": False}, checkpointing):
        assert error < EXACT, name


def replicated(kind):
    model, regions, inputs = build(kind)
    shard_tensors(model, regions, dist.group.WORLD)
    found = step(model, inputs)
    equal = {}
    for name, tensor in found.items():
        other = tensor.clone()
        dist.broadcast(other, 0) if name not in model._tensor_shards.cuts else None
        equal[name] = torch.equal(other, tensor)
    return [name for name, same in equal.items() if not same]


@pytest.mark.parametrize("kind", ["t5", "mmdit"])
def test_what_all_ranks_hold_has_one_gradient_bit_for_bit(ranks, kind):
    """Otherwise the optimizer would let the ranks' norms and embeddings drift apart."""
    assert ranks(2, replicated, kind) == [[], []]


def kept_alive(checkpointing):
    """Whether anything of the step outlives it: inputs of layers in which several take one tensor."""
    model, regions, inputs = build("mmdit", fused_qkv=False)
    shard_tensors(model, regions, dist.group.WORLD)
    if checkpointing:
        checkpoint_blocks(model.single_blocks, "full", 0.0, boundary=("x",))
    seen = []
    for block in model.single_blocks:
        block.q_proj.register_forward_pre_hook(lambda _module, args: seen.append(weakref.ref(args[0])))
    step(model, inputs)
    gc.collect()
    return len(seen), [ref() is not None for ref in seen].count(True)


@pytest.mark.parametrize(("checkpointing", "num_calls"), [(False, 2), (True, 4)])
def test_nothing_of_a_step_is_kept(ranks, checkpointing, num_calls):
    assert ranks(2, kept_alive, checkpointing) == [(num_calls, 0)] * 2


def test_a_tensor_that_was_written_to_enters_again():
    entrance, x = Entrance(None), torch.ones(2, requires_grad=True).clone()

    def exchange(tensor, group):
        return tensor * 1

    first = entrance(exchange, x)
    assert entrance(exchange, x) is first
    x.mul_(2)
    assert torch.equal(entrance(exchange, x), first * 2)


def with_swapped_norms():
    """On a stand-in for a kernel: the largest error in fp32, what was swapped, and what ranks have of their own."""
    model, inputs = mmdit().float(), {name: tensor.float() for name, tensor in mmdit_inputs().items()}
    inputs["img"].requires_grad_()
    expected, plan = step(model, inputs), Plan(tp=2)
    init_parallel(plan)
    with mock.patch.dict(KERNELS, {"stand-in": STAND_IN}):
        shardformer.shard(model, plan, norms="strict")
        found = step(model, inputs)
    scales = {name: found[name].clone() for name in found if name.endswith("scale")}
    for scale in scales.values():
        dist.broadcast(scale, 0)
    own = [name for name, scale in scales.items() if not torch.equal(scale, found[name])]
    return worst(whole(model, found), expected), shardformer.norms_of(model).num_swapped, own


def test_swapped_norms_have_the_gradients_of_one_device_too(ranks):
    for (error, name), num_swapped, own in ranks(2, with_swapped_norms):
        assert error < RELATIVE[torch.float32], name
        assert num_swapped > 0 and own == []


def collectives(options):
    model, regions, inputs = build("mmdit", layers=1, **options)
    shard_tensors(model, regions, dist.group.WORLD)
    counts = []
    with counted() as forward:
        out = model(**inputs)
    with counted() as backward:
        out.square().mean().backward()
    for record in (forward, backward):
        assert {call.kind for call in record.calls} == {"all-reduce"}
        counts.append(len(record.calls))
    return tuple(counts)


@pytest.mark.parametrize("options", [{}, {"fused_qkv": False}], ids=["fused", "unfused"])
def test_one_all_reduce_for_each_way_in_and_out(ranks, options):
    """Out: 2 projections, 2 MLPs, linear2. In: the same number, however many layers take the tensor; and 6 norms."""
    assert ranks(2, collectives, options) == [(5, 5 + 6)] * 2


def state_dicts(kind):
    """Saved on these ranks, loaded on one device and on shards that were other numbers."""
    model, regions, _inputs = build(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    undo = shard_tensors(model, regions, dist.group.WORLD)
    saved = full_state_dict(model)
    assert saved.keys() == before.keys()
    steps = torch.tensor(3.0)  # an optimizer's state holds numbers too
    assert all(full_tensor(model, name, steps) == local_tensor(model, name, steps) == 3 for name in before)
    assert any(model.state_dict()[name].shape != before[name].shape for name in before)
    parameters = dict(model.named_parameters())
    assert all(full_shape(model, name, p.shape) == before[name].shape for name, p in parameters.items())
    # As with a model that was built without memory, so that no rank ever holds the whole of it.
    model.to("meta").to_empty(device="cpu")
    load_full_state_dict(model, saved)
    again = full_state_dict(model)
    with pytest.raises(ValueError, match="load a whole state dict, as full_state_dict"):
        load_full_state_dict(model, model.state_dict())
    with pytest.raises(ValueError, match=r"missing \['"):
        load_full_state_dict(model, dict(list(saved.items())[1:]))
    undo()  # of what was loaded, in parameters that are others
    after = model.state_dict()
    return all(torch.equal(before[n], found[n]) for found in (saved, again, after) for n in before)


@pytest.mark.parametrize("kind", ["umt5", "mmdit"])
def test_a_state_dict_is_saved_and_loaded_whole(ranks, kind):
    assert ranks(3, state_dicts, kind) == [True] * 3


def undone(kind, options):
    model, regions, inputs = build(kind, **options)
    expected = step(model, inputs)
    parameters = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    grads = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    facts = [sorted(vars(m)) + [str(m)] for m in model.modules()]

    undo = shard_tensors(model, regions, dist.group.WORLD)
    with pytest.raises(ValueError, match="tensor-parallel already"):
        shard_tensors(model, regions, dist.group.WORLD)
    sharded = dict(model.named_parameters())
    assert all(p.grad is None or p.grad.shape == p.shape for p in sharded.values())
    for module in model.modules():  # what a layer says of itself is what it holds
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
        if isinstance(module, nn.Embedding):
            assert module.weight.shape == (module.num_embeddings, module.embedding_dim)
    same = all(sharded[name] is p for name, p in parameters.items())
    smaller = sum(p.numel() for p in sharded.values()) < sum(p.numel() for p in before.values())
    undo()
    after = dict(model.named_parameters())
    same &= all(after[n] is p and torch.equal(p, before[n]) for n, p in parameters.items())
    same &= all(torch.equal(after[name].grad, grad) for name, grad in grads.items())
    same &= facts == [sorted(vars(m)) + [str(m)] for m in model.modules()]
    found = step(model, inputs)
    return same and smaller and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("kind", "options"), MODELS, ids=MODEL_NAMES)
def test_undone_it_is_the_model_as_before_bit_for_bit(ranks, kind, options):
    assert ranks(3, undone, kind, options) == [True] * 3


def with_fsdp(plan):
    from torch.distributed.fsdp import fully_shard

    mesh = init_parallel(plan)
    model, regions, inputs = build("mmdit")
    expected = step(model, inputs)
    shard_tensors(model, regions, parallel_states.get_tensor_parallel_group())
    for block in [*model.double_blocks, *model.single_blocks]:
        fully_shard(block, mesh=parallel_states.get_mesh("mixed"))
    fully_shard(model, mesh=parallel_states.get_mesh("mixed"))
    assert mesh.size() == 4
    error = worst(whole(model, step(model, inputs)), expected)
    norm = torch.stack([grad.norm() for name, grad in expected.items() if name not in ("output", "input")])
    saved = full_state_dict(model)
    for parameter in model.parameters():
        parameter.detach().zero_()
    load_full_state_dict(model, saved)
    exact = all(torch.equal(saved[name], tensor) for name, tensor in mmdit().state_dict().items())
    again = full_state_dict(model)
    exact &= all(torch.equal(saved[name], again[name]) for name in saved)
    return error, relative_error(total_grad_norm(model), norm.norm()), exact


@pytest.mark.slow
def test_fsdp2_shards_the_shares(ranks):
    """The input is the same on both data ranks, so that its mean gradient is one device's."""
    for (error, name), norm_error, exact in ranks(4, with_fsdp, Plan(dp_shard=2, tp=2, sharding="zero3")):
        assert error < EXACT, name
        assert norm_error < EXACT and exact


def norms():
    model, regions, inputs = build("umt5")
    step(model, inputs)
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    shard_tensors(model, regions, dist.group.WORLD)
    step(model, inputs)
    whole, wrapped = full_state_dict(model), nn.ModuleDict({"encoder": model, "other": nn.Linear(2, 2)})
    part = full_state_dict(wrapped)
    assert all(torch.equal(part[f"encoder.{name}"], tensor) for name, tensor in whole.items())
    compiled = full_state_dict(torch.compile(model))
    assert all(torch.equal(compiled[f"_orig_mod.{name}"], tensor) for name, tensor in whole.items())
    found = [total_grad_norm(each) for each in (model, wrapped, torch.compile(model))]
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    found.append(total_grad_norm(model))
    block = next(module for module in model.modules() if type(module).__name__.endswith("CheckpointWrapper"))
    block.again = block._modules.pop("_checkpoint_wrapped_module")
    with pytest.raises(ValueError, match="was cut by shard_tensors and has another name now"):
        total_grad_norm(model)
    return max(relative_error(norm, expected) for norm in found)


@pytest.mark.slow
def test_the_norm_of_all_gradients_is_that_of_one_device(ranks):
    assert max(ranks(3, norms)) < EXACT


def under_autocast():
    """Mean error against fp64 of one device's output and of ours, and the dtypes."""
    model, regions, inputs = build("mmdit")
    exact = model(**inputs)
    inputs = mmdit_inputs(torch.float32)
    outs, dtypes = [], []
    for sharded in (False, True):
        model = mmdit(torch.float32)
        model.single_blocks[0].linear2.register_forward_hook(lambda _m, _args, out: dtypes.append(out.dtype))
        if sharded:
            shard_tensors(model, regions, dist.group.WORLD)
        with torch.autocast("cpu", torch.bfloat16):
            outs.append(model(**inputs))
        outs[-1].float().square().mean().backward()
    assert outs[0].dtype == outs[1].dtype and dtypes == [torch.bfloat16] * 2
    with torch.inference_mode():
        model(**inputs)
    return [(out.double() - exact).abs().mean().item() for out in outs]


def test_under_autocast_it_is_as_exact_as_one_device(ranks):
    for single, parallel in ranks(2, under_autocast):
        assert 0 < parallel < 1.2 * single


def test_the_calculator_refuses_what_does_not_fit():
    up, down = [("wi", "o")], [("wo", "i")]
    (first,), (last,) = derive_path([up, down])
    assert (first.enter.__name__, first.leave) == ("copy_forward_reduce_backward", None)
    assert (last.enter, last.leave.__name__) == (None, "reduce_forward_copy_backward")
    assert (first.output, last.output) == (Shard("o"), Invariant())
    with pytest.raises(ValueError, match=r"wo is sharded along 'i' and wo.weight along 'o'.*all-gather"):
        derive_path([up, [("wo", "o")]])
    with pytest.raises(ValueError, match=r"wi.weight is sharded along 'i' over tp, but .* replicated"):
        derive_path([[("wi", "i")], down])
    with pytest.raises(ValueError, match="ends with wi sharded along 'o' over tp"):
        derive_path([up])
    with pytest.raises(ValueError, match=r"the input of q is sharded along 'i' and q.weight along 'o'"):
        derive_path([up, [("o", "i"), ("q", "o")]])


def test_a_bias_added_to_terms_is_refused():
    chain = Chain({"tp": 2})
    chain.tensor("x", "si", tp=Shard("i"))
    chain.tensor("weight", "oi", tp=Shard("i"))
    terms = chain.einsum("terms", "so", "x", "weight")
    with pytest.raises(ValueError, match="do not lie alike; move one of them first"):
        add_bias(chain, "wo", terms)


WRONG = [
    (TensorRegion("blocks.*", ()), "'blocks.*' fits no module of MMDiTModel"),
    (
        TensorRegion("double_blocks.*", ((ColumnParallel("mlp"),),)),
        "no layer 'mlp'; its modules are img_attn",
    ),
    (
        TensorRegion("double_blocks.*", ((ColumnParallel("img_attn.q_proj", optional=True),),)),
        "none of the layers img_attn.q_proj",
    ),
    (
        TensorRegion("double_blocks.*.img_mlp", ((ColumnParallel("0"),), (ColumnParallel("2"),))),
        "double_blocks.0.img_mlp: the input of 2 is sharded along 'i' and 2.weight along 'o'",
    ),
    (
        TensorRegion("double_blocks.*.img_mlp", ((ColumnParallel("1"),), (RowParallel("2"),))),
        "1 is a GELU; tensor parallelism cuts nn.Linear",
    ),
    (
        TensorRegion(
            "single_blocks.*", ((ColumnParallel("linear1"),), (RowParallel("linear2"),)), ("num_heads",)
        ),
        "linear2 takes a segment of 108 channels, of which the ranks hold (72, 36), but the layers before it give "
        "segments of 180; name the segments",
    ),
    (
        TensorRegion(
            "single_blocks.*", ((ColumnParallel("linear1", ("hidden_size",)),), (RowParallel("linear2"),))
        ),
        "segment 'hidden_size', which is none of the region's head_widths and widths",
    ),
    (
        TensorRegion(
            "single_blocks.*",
            ((ColumnParallel("linear1", ("hidden_size",)),), (RowParallel("linear2"),)),
            head_widths=("hidden_size",),
        ),
        "the segments of linear1 are 36 = 36 channels, but it has 180; name them all, in order",
    ),
    (
        TensorRegion("single_blocks.*", (), ("num_heads",), widths=("scale",)),
        "its attribute scale should count channels or heads; it is 0.28",
    ),
    (
        TensorRegion("double_blocks.*", (), ("num_heads", "head_dim")),
        "the heads are counted differently: {'num_heads': 3, 'head_dim': 12}",
    ),
    (
        TensorRegion("", ((ColumnParallel("img_in"),),), heads=("num_head",)),
        "tensor parallelism of MMDiTModel: 'MMDiTModel' object has no attribute 'num_head'",
    ),
    (
        TensorRegion(
            "double_blocks.*.img_mlp", ((ColumnParallel("0"),), (RowParallel("2"),)), shared=("norm",)
        ),
        "tensor parallelism of double_blocks.0.img_mlp: Sequential has no attribute `norm`",
    ),
]


def refused(region, num_ranks=2):
    model = mmdit()
    with pytest.raises(ValueError) as raised:
        list(plan_region(model, region, num_ranks, 0))
    return str(raised.value)


@pytest.mark.parametrize(("region", "words"), WRONG, ids=range(len(WRONG)))
def test_a_table_that_does_not_fit_is_refused(region, words):
    assert words in refused(region)


def test_more_ranks_than_heads_are_refused_with_the_degrees_that_work():
    words = refused(MMDIT_TENSORS[0], num_ranks=4)
    assert "num_heads has 3 heads, so some of the tp=4 ranks would have none; use tp=3 or less" in words


def test_a_whole_model_is_left_alone():
    model, _regions, inputs = build("mmdit")
    assert all(torch.equal(p, full_state_dict(model)[name]) for name, p in model.named_parameters())
    step(model, inputs)
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert relative_error(total_grad_norm(model), expected) < EXACT


def test_a_weight_of_two_modules_is_refused():
    model = mmdit()
    model.single_blocks[1].linear2.weight = model.single_blocks[0].linear2.weight
    with pytest.raises(
        ValueError, match=r"single_blocks.0.linear2 is in two regions, or another module holds"
    ):
        _cuts_by_name(model, [each for region in MMDIT_TENSORS for each in plan_region(model, region, 2, 0)])


def refused_whole():
    model, regions, inputs = build("mmdit")
    expected = step(model, inputs)
    for wrong in ([*regions, TensorRegion("nothing", ())], [*regions, regions[1]]):
        with pytest.raises(ValueError, match=r"fits no module|is in two regions"):
            shard_tensors(model, wrong, dist.group.WORLD)
    found = step(model, inputs)
    return all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_refused_table_leaves_the_model_as_it_was(ranks):
    assert ranks(2, refused_whole) == [True, True]
