"""Every policy against its real model: output, input gradients and all parameter gradients of one device, in fp64."""

import inspect
import pkgutil
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.arguments import value_at
from opensora_accel.precision import LiftOperations
from shardformer.paths import find
from shardformer.policy import FAMILIES, UNSUPPORTED, find_policy, model_names, tables_of
from shardformer.spread import Spread, Tokens
from tests.models import wan, wan_inputs
from tests.opensora_models import stdit3
from tests.opensora_models.stdit3 import v13
from tests.shardformer.conformance import errors, fp64_model, in_double, step
from tests.shardformer.test_engine import traces
from tests.tiers import each_once, some
from tests.tolerances import RELATIVE, relative_error, relative_errors
from tests.video_models import CASES

# tools/check_policies.py tries more of them. Here each is one of a kind: the model's own checkpointing, more ranks than
# divide anything, and both axes with recomputation and offload.
MESHES = {
    "ulysses 2, own checkpointing": Plan(ulysses=2),
    "ring 3": Plan(ring=3),
    "ring 2 × ulysses 2, checkpoint": Plan(ring=2, ulysses=2, checkpoint="full", offload=1.0),
}


# One of each class; its other inputs (an image, a mask, times of its own for every token) are for `make prove`.
PLAIN = [name for name in CASES if ", " not in name or name.endswith("'s") or name.endswith("s'")]


# `make test-core` leaves those out that start four ranks.
ROWS = [
    pytest.param(*row.values, marks=[*row.marks, *([pytest.mark.slow] if "×" in row.values[1] else [])])
    for row in each_once(CASES, MESHES, PLAIN)
]


@pytest.mark.parametrize(("name", "mesh"), ROWS)
def test_gradients_are_those_of_one_device(ranks, name, mesh):
    plan = MESHES[mesh]
    for found in ranks(plan.world_size, errors, name, plan, "own" in mesh):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < RELATIVE[torch.float64], worst


@pytest.mark.parametrize("name", some(name for name in CASES if name.startswith("MMDiT")))
@pytest.mark.parametrize(
    "plan",
    some(
        [
            Plan(ring=2, tp=2, checkpoint="full"),
            Plan(ulysses=2, tp=2),
            Plan(dp_shard=2, tp=2, sharding="zero3"),
            Plan(dp_replicate=2, tp=2, sharding="zero2"),
        ]
    ),
    ids=str,
)
def test_tensor_and_sequence_parallelism_together(ranks, name, plan):
    for found in ranks(plan.world_size, errors, name, plan):
        assert max(found.values()) < RELATIVE[torch.float64]


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi
@pytest.mark.prove
def test_the_mlps_of_every_policy_run_in_chunks(parallel_registry):
    """Of each model class once; some call them with tokens that have no batch."""
    seen, plan = set(), Plan(mlp_chunks=3)
    for name, case in CASES.items():
        model = case.make()
        if type(model) in seen or not find_policy(model).mlps:
            continue
        seen.add(type(model))
        inputs = in_double(case.inputs())
        with LiftOperations():
            expected = step(fp64_model(case), case, inputs)
            found = step(shardformer.shard(fp64_model(case), plan), case, inputs)
        worst = max(relative_errors(found, expected).values())
        assert worst < RELATIVE[torch.float64], name
    assert len(seen) > 20


def test_blocks_whose_mlp_cannot_run_in_chunks_are_told(parallel_registry, caplog):
    """A peak that stays must not look as if it had gone."""
    for name in ("Wan", "HunyuanVideo"):
        shardformer.shard(CASES[name].make(), Plan(mlp_chunks=2))
    (told,) = [record.getMessage() for record in caplog.records if record.name == "shardformer.engine.apply"]
    assert "leaves 2 of 4 blocks as they are (HunyuanVideoSingleTransformerBlock)" in told


def test_the_index_names_every_table_and_no_other():
    found = {
        module.name: {name for policy in tables_of(module.name) for name in policy.models}
        for module in pkgutil.iter_modules(shardformer.policy.__path__)
    }
    assert {family: names for family, names in found.items() if names} == {
        family: set(names) for family, names in FAMILIES.items()
    }


def test_every_policy_has_a_case():
    made = {type(case.make()).__name__ for case in CASES.values()}
    assert set(model_names()) <= made | {"T5EncoderModel", "UMT5EncoderModel"}
    assert made <= set(model_names())


@pytest.mark.parametrize("name", CASES)
def test_the_blocks_are_named(name):
    assert len(shardformer.blocks_of(CASES[name].make())) >= 2


def test_no_video_model_of_diffusers_is_left_out_silently():
    import diffusers

    video = {name for name in dir(diffusers) if name.endswith(("Transformer3DModel", "TemporalModel"))}
    assert video and video <= set(model_names()) | set(UNSUPPORTED)
    assert not set(model_names()) & set(UNSUPPORTED)
    for name in UNSUPPORTED:
        assert hasattr(diffusers, name) or name == "TransformerSpatioTemporalModel", name
    page = (Path(__file__).resolve().parents[2] / "docs/policies.md").read_text(encoding="utf-8")
    assert [name for name, why in UNSUPPORTED.items() if f"| `{name}` | {why} |" not in page] == []


class Indexed(WanTransformer3DModel):
    """A fork with an argument more, which speaks of frames by their place in the clip."""

    def forward(self, hidden_states, *args, frame_index=None, **kwargs):
        out = super().forward(hidden_states, *args, **kwargs)
        return out if frame_index is None else (out[0].index_fill(2, torch.tensor(frame_index), 0.0),)


class AsItsAuthorsBuildIt(WanTransformer3DModel):
    """Wan with a module of another name, and rotary positions made inside attention."""

    def __init__(self):
        nn.Module.__init__(self)
        self.blocks = nn.ModuleList([nn.ModuleDict({"self_attn": nn.Linear(2, 2), "ffn": nn.Linear(2, 2)})])
        self.rope, self.condition_embedder, self.proj_out = nn.Identity(), nn.Identity(), nn.Identity()


def test_a_name_alone_does_not_make_a_policy_fit():
    with pytest.raises(ValueError) as caught:
        find_policy(AsItsAuthorsBuildIt())
    message = str(caught.value)
    assert (
        "AsItsAuthorsBuildIt of tests.shardformer.test_policies has the name of a model with a policy"
        in message
    )
    assert "but is another one: the policy names 'blocks.*.attn1', which fits no module" in message


def test_modules_that_functions_name_tell_a_model_from_others():
    """A table whose function names what is not there would be found for another model, and fail in `shard`."""
    seen = set()
    for model in (CASES[name].make() for name in PLAIN):
        policy, clean = find_policy(model), traces(model)
        known = [name for path in policy.paths for name, _module in find(model, path)]
        with ExitStack() as undo:
            spread = Spread(model, Tokens(None), undo)
            for function in policy.functions:
                function(spread)
        assert traces(model) == clean
        assert [
            name
            for name in spread.hooked
            if not any((not name or f"{each}.".startswith(f"{name}.")) for each in known)
        ] == []
        seen |= set(policy.functions)
    assert len(seen) > 10


def test_a_setting_that_no_table_serves_is_refused_with_the_reason():
    with pytest.raises(
        ValueError, match=r"its kernel_size is \(8, 8, -1\), and attention in windows needs whole"
    ):
        find_policy(stdit3(release=v13, kernel_size=(8, 8, -1)))


def with_an_argument_more():
    plan = Plan(ulysses=2)
    init_parallel(plan)
    model, inputs = wan(), wan_inputs() | {"return_dict": False}
    model.__class__ = Indexed
    expected = model(**inputs)[0]
    shardformer.shard(model, plan)
    with pytest.raises(ValueError) as caught:
        model(**inputs, frame_index=[0])
    assert "Indexed's frame_index cannot be split over ranks: the policy for WanTransformer3DModel" in str(
        caught.value
    )
    return relative_error(model(**inputs, frame_index=None)[0], expected)


def test_an_argument_that_a_table_was_not_made_for_must_be_left_out(ranks):
    assert max(ranks(2, with_an_argument_more)) < RELATIVE[torch.float32]


@pytest.mark.parametrize("name", CASES)
def test_every_argument_of_the_model_was_looked_at(name):
    """A release of diffusers that adds one fails here: does it speak of tokens or frames by their place?"""
    model = CASES[name].make()
    known = find_policy(model).arguments.split()
    # *args and **kwargs are looked at by what they hold.
    named = [
        name for name, p in inspect.signature(model.forward).parameters.items() if "VAR" not in p.kind.name
    ]
    assert [name for name in named if name not in known] == []


def sharded_and_back(name):
    """Whether unsharding gives the model back, bit for bit; elements of what enters the last block, here and whole."""
    plan = Plan(ring=2)
    init_parallel(plan)
    case = CASES[name]
    model, inputs = case.make(), case.inputs()
    block, argument = shardformer.blocks_of(model)[-1], find_policy(model).blocks[-1].boundary[0]
    sizes: list[int] = []

    def record(module, args, kwargs):
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        sizes.append(value_at(arguments, argument).numel())

    block.register_forward_pre_hook(record, with_kwargs=True)
    clean, expected = traces(model), step(model, case, inputs)
    names = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    model.zero_grad()
    shardformer.shard(model, plan)
    assert [(name, id(parameter)) for name, parameter in model.named_parameters()] == names
    # The share is seen by a hook that runs after those that split.
    block.register_forward_pre_hook(record, with_kwargs=True)
    step(model, case, inputs)
    model.zero_grad()
    block._forward_pre_hooks.popitem()
    block._forward_pre_hooks_with_kwargs.popitem()
    shardformer.unshard(model)
    assert traces(model) == clean
    found = step(model, case, inputs)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    return sizes[2], sizes[0]


@pytest.mark.parametrize("name", some(CASES, *PLAIN[::8]))
def test_a_block_computes_its_share_and_unshard_gives_the_model_back(ranks, name):
    """Equal gradients alone would be found of ranks that all compute everything."""
    (mine, whole), (others, _) = ranks(2, sharded_and_back, name)
    if name.startswith(
        ("MMDiT", "HunyuanVideo, its", "FLUX.2")
    ):  # last blocks hold the text too, on every rank
        assert max(mine, others) < 0.6 * whole
    else:
        assert mine + others == whole and max(mine, others) < 0.75 * whole


def on_meta():
    """Wan 2.1's 14B, as its config says."""

    plan = Plan(ring=2, ulysses=2, checkpoint="full")
    init_parallel(plan)
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=40, attention_head_dim=128, ffn_dim=13824, num_layers=40, text_dim=4096
        )
    start = time.monotonic()
    shardformer.shard(model, plan)
    return time.monotonic() - start, sum(parameter.numel() for parameter in model.parameters())


def test_a_model_of_14b_parameters_is_sharded_on_meta_in_seconds(ranks):
    for seconds, parameters in ranks(4, on_meta):
        assert parameters > 14e9 and seconds < 5
