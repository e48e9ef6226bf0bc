"""Whose class a model is: a table is for one package's code, and a name and a structure are easily copied."""

import functools
import types
from functools import partial

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import nn

import shardformer
from opensora_accel import Plan, init_parallel
from shardformer.policy import find_policy, has_policy, tables_named
from shardformer.policy.hunyuan_video import HUNYUAN_VIDEO
from shardformer.policy.identity import misfit
from shardformer.policy.wan import WAN, WAN_VIDEOX
from tests.authors_models import skyreels_v2
from tests.authors_models.step_video import StepVideoModel
from tests.authors_models.videox_fun import models as videox_fun
from tests.models import wan, wan_inputs
from tests.shardformer.conformance import compare, fp64_model, in_double, step
from tests.tolerances import RELATIVE
from tests.video_models import CASES
from tests.video_models.case import Case

EXACT = RELATIVE[torch.float64]


class CutsByLengths(nn.Module):
    """Attends to each sample's first tokens, as many as the mask of the whole sequence shows: VideoX-Fun's way.

    With the tokens split a rank has fewer than that, so that nothing is cut, and padding is attended to.
    """

    def forward(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None
    ):
        def kernel(query, key, value, *, attn_mask=None, **options):
            if attn_mask is None:
                return attend(query, key, value, **options)
            out = torch.zeros_like(query)
            for sample, length in enumerate(attn_mask[:, 0, 0].sum(1).tolist()):
                cut = (each[sample : sample + 1, :, :length] for each in (query, key, value))
                out[sample : sample + 1, :, :length] = attend(*cut, **options)
            return out

        attend, F.scaled_dot_product_attention = F.scaled_dot_product_attention, kernel
        try:
            return THEIRS(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        finally:
            F.scaled_dot_product_attention = attend


THEIRS = HunyuanVideoAttnProcessor2_0()


class HunyuanVideoTransformer3DModel(nn.Module):
    """The name, the modules and the arguments of diffusers' class, of which it is none."""

    def __init__(self):
        super().__init__()
        made = CASES["HunyuanVideo"].make()
        self.config, self.gradient_checkpointing = made.config, False
        for name, child in made.named_children():
            self.add_module(name, child)
        for block in [*self.transformer_blocks, *self.single_transformer_blocks]:
            block.attn.processor = CutsByLengths()

    forward = diffusers.HunyuanVideoTransformer3DModel.forward


def test_a_class_of_the_same_name_and_structure_from_elsewhere_is_refused():
    model = HunyuanVideoTransformer3DModel()
    with pytest.raises(ValueError) as caught:
        find_policy(model)
    assert (
        "HunyuanVideoTransformer3DModel of tests.shardformer.test_identity has the name of a model with a policy, "
        "but is another one: the policy is for the class of diffusers, and this one is of tests"
        in str(caught.value)
    )
    assert 'tables_named("HunyuanVideoTransformer3DModel")' in str(caught.value)
    assert not has_policy(model)


def test_a_known_look_alike_is_refused_with_what_it_does(monkeypatch):
    monkeypatch.setattr(
        HunyuanVideoTransformer3DModel, "__module__", "videox_fun.models.hunyuanvideo_transformer3d"
    )
    with pytest.raises(
        ValueError, match="and this one is of videox_fun: its attention processor cuts queries and"
    ):
        find_policy(HunyuanVideoTransformer3DModel())


def look_alike_by_force():
    plan = Plan(ulysses=2)
    init_parallel(plan)
    case = CASES["HunyuanVideo"]
    model = HunyuanVideoTransformer3DModel().double()
    shardformer.shard(model, plan, policy=HUNYUAN_VIDEO)
    with pytest.raises(ValueError) as caught:
        model(**in_double(case.inputs()), return_dict=False)
    return str(caught.value)


def test_a_mask_that_does_not_reach_the_kernel_is_refused(ranks):
    """Whoever passes the table takes the word for the class; what the module then does with its mask is looked at."""
    for message in ranks(2, look_alike_by_force):
        assert "transformer_blocks.0.attn was given attention_mask, which hides tokens" in message
        assert "and called the kernel without a mask" in message


class Kept(diffusers.WanTransformer3DModel):
    """A user's subclass with a method more."""

    def describe(self):
        return "mine"


class Around(diffusers.WanTransformer3DModel):
    """A forward around the one that it overrides."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states * 1.0, *args, **kwargs)


WAN_OF_DIFFUSERS = diffusers.WanTransformer3DModel


class WanTransformer3DModel(diffusers.WanTransformer3DModel):
    """Of the same name, and a subclass."""


class ByName(diffusers.WanTransformer3DModel):
    def forward(self, *args, **kwargs):
        return diffusers.WanTransformer3DModel.forward(self, *args, **kwargs)


class ByImportedName(WAN_OF_DIFFUSERS):
    def forward(self, *args, **kwargs):
        return WAN_OF_DIFFUSERS.forward(self, *args, **kwargs)


class Rewritten(diffusers.WanTransformer3DModel):
    """A forward of its own, in which a table for diffusers' code has no say."""

    def forward(self, hidden_states, timestep, encoder_hidden_states, return_dict=True):
        return (hidden_states,)


class BlocksInAnotherOrder(diffusers.WanTransformer3DModel):
    """It calls a forward, and that is another one."""

    def forward(self, hidden_states, timestep, encoder_hidden_states, return_dict=True):
        for block in reversed(self.blocks):
            hidden_states = block.forward(hidden_states)
        return (hidden_states,)


def of_class(cls):
    model = wan()
    model.__class__ = cls
    return model


@pytest.mark.parametrize("cls", [Kept, Around, WanTransformer3DModel, ByName, ByImportedName])
def test_a_subclass_that_runs_what_it_inherits_keeps_the_policy(cls):
    assert find_policy(of_class(cls)) is WAN


@pytest.mark.parametrize("cls", [Rewritten, BlocksInAnotherOrder])
def test_a_subclass_with_a_forward_of_its_own_is_refused(cls):
    with pytest.raises(ValueError) as caught:
        find_policy(of_class(cls))
    assert "its forward is of tests.shardformer.test_identity, and does not call that of diffusers" in str(
        caught.value
    )
    # The remedy that the message names.
    assert tables_named("WanTransformer3DModel")[0] is WAN


class CutsAndCallsSuper(WanAttnProcessor):
    def __call__(self, attn, hidden_states, *args, **kwargs):
        super().__init__()
        return hidden_states


def replaced_by_a_program(model):
    model.forward = types.MethodType(Rewritten.forward, model)


def replaced_in_the_class_of_a_block(model):
    block = model.blocks[1]
    block.__class__ = type(
        "Block", (type(block),), {"forward": lambda self, hidden_states, *rest: hidden_states}
    )


def with_another_processor(model):
    model.blocks[1].attn1.processor = CutsByLengths()


def with_a_processor_that_is_derived(model):
    model.blocks[1].attn1.processor = CutsAndCallsSuper()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (replaced_by_a_program, "its forward"),
        (replaced_in_the_class_of_a_block, "blocks.1's forward"),
        (with_another_processor, "the processor of blocks.1.attn1"),
        (with_a_processor_that_is_derived, "the processor of blocks.1.attn1"),
    ],
)
def test_code_of_somebody_else_within_the_model_is_refused(change, what):
    model = wan()
    change(model)
    with pytest.raises(ValueError, match=f"{what} is of tests.shardformer.test_identity"):
        find_policy(model)


def with_teacache():
    model = skyreels_v2.WanModel()
    model.enable_teacache = True
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            partial(StepVideoModel, parallel=True),
            "its parallel is True, and it splits its tokens by itself then",
        ),
        (with_teacache, "its enable_teacache is True, and it leaves out blocks, which split the tokens"),
    ],
)
def test_a_setting_of_authors_models_that_no_table_serves_is_told(make, reason):
    with pytest.raises(ValueError, match=reason):
        find_policy(make())


def test_a_cache_of_videox_fun_is_told():
    """Its stand-in derives from another class with a table, which would serve it; theirs does not."""
    model = videox_fun.Wan2_2Transformer3DModel()
    assert misfit(model, WAN_VIDEOX) is None
    model.teacache = "enabled"
    assert "its teacache is 'enabled', and it leaves out blocks" in misfit(model, WAN_VIDEOX)


class OwnProcessor(WanAttnProcessor):
    def __call__(self, attn, hidden_states, *args, **kwargs):
        return super().__call__(attn, hidden_states, *args, **kwargs)


def wrapped_by_a_library(model):
    original = model.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        return original(*args, **kwargs)

    model.forward = forward


def wrapped_without_a_trace(model):
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)


def with_a_processor_that_calls_its_own(model):
    model.set_attn_processor(OwnProcessor())


@pytest.mark.parametrize(
    "change", [wrapped_by_a_library, wrapped_without_a_trace, with_a_processor_that_calls_its_own]
)
def test_code_around_that_of_the_package_keeps_the_policy(change):
    model = wan()
    change(model)
    assert find_policy(model) is WAN


def errors_around(cls, plan):
    init_parallel(plan)
    case = Case(lambda: of_class(cls), lambda: wan_inputs() | {"return_dict": False})
    inputs = in_double(case.inputs())
    expected = step(fp64_model(case), case, inputs)
    model = shardformer.shard(fp64_model(case), plan)
    assert len(shardformer.blocks_of(model)) == 2
    return max(compare(step(model, case, inputs), expected).values())


def test_a_subclass_around_its_base_is_exact(ranks):
    assert max(ranks(2, errors_around, Around, Plan(ring=2))) < EXACT


def blocks_by_a_table_that_was_passed(plan):
    init_parallel(plan)
    model = shardformer.shard(of_class(Rewritten), plan, policy=WAN)
    return len(shardformer.blocks_of(model))


def test_a_sharded_model_knows_the_table_that_was_passed(ranks):
    assert ranks(2, blocks_by_a_table_that_was_passed, Plan(ulysses=2)) == [2, 2]


@pytest.mark.parametrize(
    "name",
    [
        "LTX-2",
        "SkyReels-V2, its authors'",
        "WanModel, its authors'",
        "WanModel, musubi-tuner's",
        "Wan 2.1, VideoX-Fun's",
    ],
)
def test_a_subclass_that_passes_its_arguments_on_has_the_table_of_its_base(name):
    model = CASES[name].make()
    expected = find_policy(model)
    base = type(model)

    def forward(self, *args, **kwargs):
        return base.forward(self, *args, **kwargs)

    model.__class__ = type("Mine", (base,), {"forward": forward})
    assert find_policy(model) is expected
