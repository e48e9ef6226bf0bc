"""What the engine refuses, what it leaves behind (nothing), and what users may do to a sharded model."""

import copy
import dataclasses
import io
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.checkpoint import with_preserved_state
from shardformer.modeling.halo import add_halo
from shardformer.modeling.t5 import replace_t5_norms
from shardformer.policy.base import GatherOutput, JointAttention, SplitInput, SplitOutput
from shardformer.policy.wan import WAN
from tests.models import wan, wan_inputs
from tests.shardformer.diffusers_own import accelerator_stand_ins


def traces(model):
    """Everything on the instances that shard() might have left."""
    return [
        (
            name,
            sorted(k for k in vars(m) if not k.startswith("_")),
            len(m._forward_hooks),
            len(m._forward_pre_hooks),
        )
        for name, m in model.named_modules()
    ]


def undone(plan):
    init_parallel(plan)
    model, inputs = wan(), wan_inputs()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    clean, expected = traces(model), model(**inputs, return_dict=False)[0]
    shardformer.shard(model, plan)
    assert [n for n, _ in model.named_parameters()] == list(before), "names changed"
    assert traces(model) != clean
    with pytest.raises(ValueError, match="sharded already"):
        shardformer.shard(model, plan)
    with pytest.raises(ValueError, match="cannot be deep-copied; copy it before"):
        copy.deepcopy(model)
    with pytest.raises(
        ValueError, match=r"cannot be pickled whole.*torch.save\(model.state_dict\(\), path\)"
    ):
        torch.save(model, io.BytesIO())
    torch.save(model.state_dict(), io.BytesIO())
    model.load_state_dict(wan().state_dict())
    shardformer.unshard(model)
    assert copy.deepcopy(model) is not model
    torch.save(model, io.BytesIO())
    assert traces(model) == clean
    assert torch.equal(model(**inputs, return_dict=False)[0], expected)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])
    with pytest.raises(ValueError, match="is not sharded"):
        shardformer.unshard(model)


def test_unshard_gives_the_model_back(ranks):
    ranks(2, undone, Plan(ulysses=2, checkpoint="full", offload=1.0))


class Pipeline:
    """As a pipeline of diffusers: no module, but it has some."""

    def __init__(self):
        self.components = {"transformer": wan(), "vae": nn.Linear(2, 2), "scheduler": object()}


@pytest.mark.parametrize(
    ("make", "plan", "message"),
    [
        (Pipeline, Plan(), r"got a Pipeline: shardformer.shard\(pipe.transformer, plan\)$"),
        (dict, Plan(), "takes a model, a torch.nn.Module; got a dict: shard its transformer"),
        (wan, {"ulysses": 2}, r"takes a Plan, as Plan.from_dict\(\{...\}\); got a dict"),
        (wan, 2, r"takes a Plan, as Plan\(ulysses=2\); got a int"),
    ],
)
def test_what_is_no_model_or_no_plan(make, plan, message):
    with pytest.raises(ValueError, match=message):
        shardformer.shard(make(), plan)


class Unknown(nn.Linear):
    pass


class WanTransformer3D(nn.Linear):
    pass


def test_an_unknown_model_names_the_closest_policy():
    with pytest.raises(ValueError) as caught:
        shardformer.shard(WanTransformer3D(2, 2), Plan())
    message = str(caught.value)
    assert "no policy for WanTransformer3D; the closest is WanTransformer3DModel's" in message
    assert "opensora-accel policy --model" in message and "policy=shardformer.Policy(" in message


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(ulysses=2), "sequence group of 2 ranks, but none is registered"),
        (Plan(ring=2, ulysses=2), "sequence group of 4 ranks, but none is registered"),
        (Plan(tp=2), "tp=2 needs a policy that says where the layers of WanTransformer3DModel are cut"),
    ],
)
def test_a_plan_that_cannot_be_applied(parallel_registry, plan, message):
    with pytest.raises(ValueError, match=message):
        shardformer.shard(wan(), plan)


def group_of_another_size():
    init_parallel(Plan(ulysses=2))
    with pytest.raises(ValueError, match="the registered one has 2"):
        shardformer.shard(wan(), Plan(ulysses=3))


def test_a_group_of_another_size_is_refused(ranks):
    ranks(2, group_of_another_size)


def axes_of_another_shape():
    init_parallel(Plan(ulysses=2))
    with pytest.raises(ValueError, match="the plan has ring=2, but the registered ring group has 1 ranks"):
        shardformer.shard(wan(), Plan(ring=2))


def axes_without_a_ring_in_the_plan():
    """Joint attention would run on the ring, self-attention over all ranks."""
    init_parallel(Plan(ring=2, ulysses=2))
    with pytest.raises(ValueError, match="the plan has ring=1, but the registered ring group has 2 ranks"):
        shardformer.shard(wan(), Plan(ulysses=4))


def test_axes_of_another_shape_are_refused(ranks):
    ranks(4, axes_without_a_ring_in_the_plan)
    """As many ranks of the sequence, but they would exchange heads where the plan wants keys to go round."""
    ranks(2, axes_of_another_shape)


class Tower(nn.Module):
    """Not a model of diffusers: the user's own, with attention that never reaches the kernel."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x))


def own_policy():
    init_parallel(Plan(ulysses=2))
    torch.manual_seed(0)
    model, plan = Tower().double(), Plan(ulysses=2)
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    expected = model(x)
    expected.square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    entry, leave = (SplitInput("first", "input"),), (GatherOutput("last"),)
    policy = shardformer.Policy(models=("Tower",), split_inputs=entry, gather_outputs=leave)
    out = shardformer.shard(model, plan, policy=policy)(x)
    assert torch.allclose(out, expected, rtol=1e-12)
    out.square().mean().backward()
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        dist.all_reduce(parameter.grad)
        assert torch.allclose(parameter.grad / 2, grad, rtol=1e-12)
    shardformer.unshard(model)
    for broken, message in (
        (
            shardformer.Policy(("Tower",), split_inputs=(SplitInput("middle", "input"),)),
            "names 'middle', which fits no module of Tower: it has first, last",
        ),
        (
            shardformer.Policy(("Tower",), split_inputs=(SplitInput("first", "x"),)),
            "the forward of Linear takes input",
        ),
        (
            shardformer.Policy(("Tower",), split_inputs=entry, self_attention=("blocks.*",)),
            "'blocks.*', which fits no module",
        ),
        (shardformer.Policy(("Tower",), split_inputs=entry, gather_outputs=(GatherOutput("end"),)), "'end'"),
    ):
        tower = Tower()
        clean = traces(tower)
        with pytest.raises(ValueError) as caught:
            shardformer.shard(tower, plan, policy=broken)
        assert message in str(caught.value) and traces(tower) == clean
    # A wrong table must not be wrong silently: this "attention" would see its own tokens only.
    policy = shardformer.Policy(
        ("Tower",), split_inputs=entry, gather_outputs=leave, self_attention=("last",)
    )
    with pytest.raises(ValueError, match="did not call scaled_dot_product_attention"):
        shardformer.shard(Tower(), plan, policy=policy)(x.float())


def test_a_users_own_policy(ranks):
    ranks(2, own_policy)


def after_an_exception():
    plan = Plan(ulysses=2)
    init_parallel(plan)
    model = shardformer.shard(wan(), plan)
    expected = model(**wan_inputs(), return_dict=False)[0]
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**wan_inputs(frames=3), return_dict=False)
    handle.remove()
    assert with_preserved_state(abs) is abs, "a checkpoint elsewhere would bring along what is no more"
    assert torch.equal(model(**wan_inputs(), return_dict=False)[0], expected)
    handle = model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**wan_inputs(frames=3), return_dict=False)
    handle.remove()
    assert torch.equal(model(**wan_inputs(), return_dict=False)[0], expected)
    assert with_preserved_state(abs) is abs


def interrupt(*_):
    raise KeyboardInterrupt


def checkpoint_functions():
    plan = Plan(ulysses=2)
    init_parallel(plan)
    model = wan()
    model.enable_gradient_checkpointing()
    function = model._gradient_checkpointing_func
    shardformer.shard(model, plan)
    for _ in range(2):
        model(**wan_inputs(), return_dict=False)
        assert model._gradient_checkpointing_func.checkpoint is function
    shardformer.unshard(model)
    assert model._gradient_checkpointing_func is function


def test_the_models_checkpoint_function_is_wrapped_once_and_given_back(ranks):
    ranks(2, checkpoint_functions)


def test_a_failed_forward_leaves_no_state(ranks):
    ranks(2, after_an_exception)


def train(model, inputs):
    """A user's training step, three times: the losses, and a checksum of the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**inputs, return_dict=False)[0].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(p.double().sum().item() for p in model.parameters())


def three_lines_in_a_plain_loop():
    """The user's own DDP loop on the world, unchanged but for the three lines."""
    plan = Plan(dp_replicate=2, ulysses=2, checkpoint="full", offload=1.0)
    init_parallel(plan)
    model = shardformer.shard(wan(torch.float32), plan)

    model = nn.parallel.DistributedDataParallel(model)
    data_rank = parallel_states.get_data_parallel_group().rank()
    inputs = {k: v[data_rank : data_rank + 1] for k, v in wan_inputs(torch.float32).items()}
    return train(model, inputs)


def plain_loop():
    return train(wan(torch.float32), wan_inputs(torch.float32))


def test_three_lines_in_a_loop_with_ddp(ranks):
    found = ranks(4, three_lines_in_a_plain_loop)
    (expected, checksum), *_ = ranks(1, plain_loop)
    for rank in range(4):
        assert found[rank][1] == pytest.approx(checksum, rel=1e-5)
    for step in range(3):
        mean = (found[0][0][step] + found[2][0][step]) / 2
        assert mean == pytest.approx(expected[step], rel=1e-5)


class Pair(Tower):
    """Its first layer is called with a tuple and its last returns one: (what is constant, tokens [S, B, C])."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Second(), Second()

    def forward(self, x):
        return self.last(self.first((x[:1], x)))[1]


class Second(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, pair):
        return pair[0], super().forward(pair[1])


def items_from_the_end(entry):
    plan = Plan(ulysses=2)
    init_parallel(plan)
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(7, 2, 4)
    expected, sizes = model(x), []
    policy = shardformer.Policy(
        ("Pair",),
        **{"split_inputs" if isinstance(entry, SplitInput) else "split_outputs": (entry,)},
        gather_outputs=(GatherOutput("last", dim=0, index=-1),),
    )
    shardformer.shard(model, plan, policy=policy)
    model.last.register_forward_pre_hook(lambda _, args: sizes.append(args[0][1].size(0)))
    assert torch.allclose(model(x), expected)
    return sizes


@pytest.mark.parametrize(
    "entry",
    [SplitInput("first", "pair.-1", dim=0), SplitOutput("first", indices=(-1,), dim=0)],
    ids=["in", "out"],
)
def test_items_are_counted_from_the_end_too(ranks, entry):
    assert ranks(2, items_from_the_end, entry) == [[4], [3]]


def test_a_norm_swap_that_fits_no_norm_is_refused():
    policy = shardformer.Policy(("Tower",), replacements=(partial(replace_t5_norms, names=("RMSNrom",)),))
    with pytest.raises(ValueError, match="swaps norms called RMSNrom, but Tower has none"):
        shardformer.shard(Tower(), Plan(), policy=policy)


class Attends(nn.Module):
    """Of text [B, 2, 6] and video: three heads of two, with options of the kernel."""

    def __init__(self, options):
        super().__init__()
        self.embed, self.attention, self.options = nn.Linear(6, 6), nn.Identity(), options
        self.attention.forward = self.attend

    def attend(self, x):
        heads = x.unflatten(-1, (3, 2)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, **self.options).transpose(1, 2)

    def forward(self, x, text=None):
        x = self.embed(x)
        return self.attention(x if text is None else torch.cat([text, x], 1))[:, -x.size(1) :]


class Whole(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.end = inner, nn.Flatten(2)

    def forward(self, x, text=None):
        return self.end(self.inner(x, text))


def with_options(options, joint):
    plan = Plan(ulysses=2)
    init_parallel(plan)
    torch.manual_seed(0)
    model, x = Whole(Attends(options)), 3 * torch.randn(2, 7, 6)
    inputs = (x, torch.randn(2, 2, 6)) if joint else (x,)
    expected = model(*inputs)
    path = "inner.attention"
    attention = (
        {"joint_attention": (JointAttention(path, "first"),)} if joint else {"self_attention": (path,)}
    )
    policy = shardformer.Policy(
        ("Whole",),
        split_inputs=(SplitInput("inner.embed", "input"),),
        gather_outputs=(GatherOutput("end"),),
        **attention,
    )
    return torch.allclose(shardformer.shard(model, plan, policy=policy)(*inputs), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "joint"),
    [({"scale": 0.1}, False), ({"is_causal": True}, False), ({"scale": 0.1}, True)],
    ids=str,
)
def test_options_of_the_kernel_reach_it(ranks, options, joint):
    assert all(ranks(2, with_options, options, joint))


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)) if width else None, 1e-6


def test_a_norm_that_cannot_be_swapped_leaves_the_others_as_they_were():
    tower = Tower()
    tower.first, tower.last = RMSNorm(4), RMSNorm(0)
    policy = shardformer.Policy(("Tower",), replacements=(replace_t5_norms,))
    with pytest.raises(ValueError, match="T5LayerNorm replaces an RMSNorm with one weight vector"):
        shardformer.shard(tower, Plan(), policy=policy)
    assert type(tower.first) is RMSNorm


def outputs_of_another_kind():
    plan = Plan(ulysses=2)
    init_parallel(plan)
    for entry, message in (
        (SplitOutput("rope", indices=(0, 2)), "names item 2 of rope's output, which is 2 items"),
        (SplitOutput("rope", indices=(0, 1), ndim=3), "where it has 3 dims, but it is"),
        (SplitOutput("rope", indices=(0, 1), dim=7), "splits dim 7 of rope's output 0, but it is"),
    ):
        policy = dataclasses.replace(WAN, split_outputs=(entry,))
        model = shardformer.shard(wan(), plan, policy=policy)
        with pytest.raises(ValueError) as caught:
            model(**wan_inputs())
        assert message in str(caught.value)


def test_a_table_of_outputs_that_are_not_there_is_refused(ranks):
    ranks(2, outputs_of_another_kind)


def test_norms_are_swapped_on_request_and_back(parallel_registry):
    model, inputs = wan(torch.float32), wan_inputs(torch.float32)
    expected = model(**inputs, return_dict=False)[0]
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match='norms="strict"'):
        shardformer.norms_of(model)
    shardformer.shard(model, Plan(), norms="strict")
    assert "RMSNorm" in str(shardformer.norms_of(model))
    assert torch.equal(model(**inputs, return_dict=False)[0], expected)
    shardformer.unshard(model)
    assert [type(module) for module in model.modules()] == kinds


def test_a_halo_that_is_too_short_is_refused(parallel_registry):
    conv = nn.Conv3d(2, 2, (5, 1, 1), padding=(2, 0, 0))
    with pytest.raises(ValueError, match="conv reaches 2 rows along dim 2, the policy's halo 1"):
        add_halo(conv, "conv", None, 2, 1, lambda: None)
    add_halo(conv, "conv", None, 2, 2, lambda: None)()
    add_halo(conv, "conv", None, 3, 1, lambda: None)()


def parallel_already():
    from diffusers import ContextParallelConfig

    plan = Plan(ulysses=2)
    init_parallel(plan)
    model = wan()
    with accelerator_stand_ins():
        model.enable_parallelism(
            config=ContextParallelConfig(ulysses_degree=2, mesh=parallel_states.get_mesh()["ring", "ulysses"])
        )
    with pytest.raises(ValueError, match=r"is parallel already \(.*enable_parallelism"):
        shardformer.shard(model, plan)


def test_a_model_that_diffusers_parallelised_is_refused(ranks):
    ranks(2, parallel_already)
