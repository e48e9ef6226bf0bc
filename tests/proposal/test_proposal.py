"""Policies that are proposed for models with hand-written ones, as if these were not there; and for others."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from opensora_accel import cli
from opensora_accel.proposal import as_code, propose_policy
from opensora_accel.proposal.draft import draft
from opensora_accel.proposal.propose import MESHES, _reason, _Step
from opensora_accel.verify import verify
from shardformer.policy import FAMILIES, counts, find_policy, tables_of
from shardformer.policy.base import GatherOutput, JointAttention, Policy, SplitInput
from tests.tiers import PROVE, some
from tests.video_models import CASES

# Separate and joined text, positions in blocks, beside them and inside attention, packed kernels, times of tokens.
KNOWN = [
    "Wan",
    "Wan, time per token",
    "Wan, image",
    "Wan VACE",
    "WanModel, its authors'",
    "SkyReels-V2, diffusion forcing",
    "HunyuanVideo",
    "HunyuanVideo 1.5",
    "HunyuanVideo, its authors'",
    "CogVideoX",
    "LTX-Video",
    "LTX-Video, its authors'",
    "Kandinsky 5, its authors'",
    "Step-Video, its authors'",
    "SkyReels-V2, its authors', diffusion forcing",
    "Mochi",
    "EasyAnimate",
    "Kandinsky 5",
    "Open-Sora-Plan, its authors'",
    "MMDiT",
    "FLUX.1",
    "FLUX.2",
    "SD 3.5",
    "Qwen-Image",
    "Qwen-Image-Edit",
    "JoyImage-Edit",
]


def make(name):
    return CASES[name].make()


def inputs(name):
    return CASES[name].inputs()


def attention_of(policy):
    """What a policy says of attention; how a proposal must agree with the table of an engineer."""
    return {
        (kind, getattr(entry, "module", entry), getattr(entry, "text", None))
        for kind in ("self_attention", "joint_attention", "whole_queries")
        for entry in getattr(policy, kind)
    }


@PROVE
@pytest.mark.filterwarnings("ignore:In CPU autocast", "ignore:CPU Autocast")  # Mochi
@pytest.mark.parametrize("name", some(KNOWN, "HunyuanVideo, its authors'"))
def test_a_known_models_policy_is_found_again(ranks, name):
    proposal = propose_policy(partial(make, name), partial(inputs, name), pool=ranks)
    assert proposal.ok, [attempt.reason for attempt in proposal.attempts]
    by_hand = find_policy(make(name))
    assert attention_of(proposal.policy) == attention_of(by_hand)
    assert [entry.module for entry in proposal.policy.blocks] == [entry.module for entry in by_hand.blocks]
    assert set(proposal.policy.positions) == set(by_hand.positions)


KANDINSKY = "Kandinsky 5, its authors'"


def long_caption():
    """41 tokens, more than half of the clip's 75."""
    text = {"text_embed": torch.randn(1, 41, 16), "text_rope_pos": torch.arange(41)}
    return {name: value for name, value in (inputs(KANDINSKY) | text).items() if name != "attention_mask"}


def test_blocks_of_a_long_caption_are_not_the_clips():
    (policy,) = draft(make(KANDINSKY), long_caption()).policies()
    assert policy.blocks == find_policy(make(KANDINSKY)).blocks
    assert policy.self_attention == ("visual_transformer_blocks.*.self_attention",)


# The caption is split, and the clip's attention takes what is left for text.
OF_THE_CAPTION = Policy(
    models=("DiffusionTransformer3D",),
    arguments="x text_embed pooled_text_embed time visual_rope_pos text_rope_pos",
    split_inputs=(
        SplitInput("text_transformer_blocks.0", "x"),
        SplitInput("text_transformer_blocks.*", "rope", dim=0),
    ),
    gather_outputs=(GatherOutput("text_transformer_blocks.-1"),),
    self_attention=("text_transformer_blocks.*.self_attention",),
    joint_attention=(JointAttention("visual_transformer_blocks.*.self_attention", "last"),),
)


def short_caption():
    return {name: value for name, value in inputs(KANDINSKY).items() if name != "attention_mask"}


@PROVE
def test_what_a_transport_says_is_no_reason(ranks):
    report = verify(_Step(OF_THE_CAPTION, short_caption), partial(make, KANDINSKY), MESHES[:1], pool=ranks)
    said = " ".join(text for mesh in report.results for text in mesh.errors.values())
    assert "gloo" in said
    reason = _reason(report)
    assert "the ranks exchanged tensors of different sizes" in reason and "gloo" not in reason


def test_a_table_as_code_is_the_table():
    for policy in [policy for family in FAMILIES for policy in tables_of(family)]:
        if not policy.tensors:
            names = {}
            exec(as_code(policy), names)
            assert names["POLICY"] == policy


def test_a_count_that_was_drafted_is_code():
    count = partial(counts.count_own, module="blocks.*", argument="sizes.1", text=True)
    names = {}
    exec(as_code(Policy(("Model",), functions=(count,))), names)
    (found,) = names["POLICY"].functions
    assert (found.func, found.keywords) == (count.func, count.keywords)


class Block(nn.Module):
    def __init__(self, attends=True):
        super().__init__()
        self.qkv, self.out, self.attends = nn.Linear(24, 72), nn.Linear(24, 24), attends

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v) if self.attends else (q @ k.mT).softmax(-1) @ v
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """`mixes`: between its blocks it does what no entry that is proposed can say."""

    def __init__(self, attends=True, mixes=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.mixes = nn.Linear(8, 24), nn.Linear(24, 8), mixes
        self.blocks = nn.ModuleList(Block(attends) for _ in range(2))

    def forward(self, video):
        x = self.embed(video)
        for block in self.blocks:
            x = block(x)
            if self.mixes:
                x = x + x.roll(1, dims=1)
        return self.head(x)


def video():
    return {"video": torch.randn(2, 35, 8)}


def test_what_no_draft_can_say_is_not_proven(ranks):
    proposal = propose_policy(partial(Model, mixes=True), video, pool=ranks)
    assert not proposal.ok and len(proposal.attempts) > 1
    assert all(attempt.reason for attempt in proposal.attempts)


@pytest.mark.parametrize(
    ("model_fn", "inputs_fn", "message"),
    [
        (partial(Model, attends=False), video, "attention that is written out cannot be spread over ranks"),
        (
            partial(Block),
            lambda: {"x": torch.randn(2, 35, 24)},
            "has no torch.nn.ModuleList whose items attend",
        ),
        (Model, lambda: {"clip": torch.randn(2, 35, 8)}, "fails on these inputs, on one device: TypeError"),
        (Model, lambda: [torch.randn(2, 35, 8)], "a dict of its forward's arguments; got a Model and a list"),
        (partial(make, "Latte"), partial(inputs, "Latte"), "attends along one dimension of a grid of tokens"),
    ],
)
def test_why_nothing_is_proposed_is_said(model_fn, inputs_fn, message):
    with pytest.raises(ValueError, match=message):
        propose_policy(model_fn, inputs_fn)


STEP_FILE = """
import torch
from tests.proposal.test_proposal import Model, video

def make_model():
    return Model()

def wrong_inputs():
    return {"clip": torch.randn(2, 35, 8)}
"""


def test_the_command_prints_python_that_shards_the_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(STEP_FILE, encoding="utf-8")
    assert (
        cli.main(["policy", "--model", "mine.py:make_model", "--inputs", "mine.py:video", "--out", "out.py"])
        == 0
    )
    printed, names = capsys.readouterr().out, {}
    assert "Proposed for Model, and proven: 12 gradients are those of one device" in printed
    assert Path("out.py").read_text(encoding="utf-8") == printed
    exec(printed, names)
    assert names["POLICY"].self_attention == ("blocks.*",)
    assert [entry.module for entry in names["POLICY"].gather_outputs] == ["head"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "mine.py", "--inputs", "mine.py:video"], "is MODULE:NAME or FILE.py:NAME"),
        (["--model", "mine.py:missing", "--inputs", "mine.py:video"], "has no missing that can be called"),
        (["--model", "gone.py:make_model", "--inputs", "mine.py:video"], "there is no file gone.py"),
        (["--model", "gone.models:Model", "--inputs", "mine.py:video"], "there is no module gone.models"),
        (
            ["--model", "torch.nn:Linear", "--inputs", "mine.py:video"],
            "Linear needs in_features, out_features",
        ),
        (
            ["--model", "mine.py:make_model", "--inputs", "mine.py:wrong_inputs"],
            "unexpected keyword argument",
        ),
        (
            ["--model", "mine.py:make_model", "--inputs", "mine.py:video", "--out", "no/x.py"],
            "there is no folder",
        ),
    ],
)
def test_wrong_options_are_told_in_one_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(STEP_FILE, encoding="utf-8")
    assert cli.main(["policy", *options]) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
