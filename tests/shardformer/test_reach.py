"""How far a table's entries reach: into *args, **options, objects and tuples, and to tokens that are kept as a grid."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.arguments import change_at
from shardformer.policy.base import Blocks, Policy, SplitInput
from shardformer.policy.counts import count_own
from shardformer.policy.frames import gather_frames, split_frames, spread_by_frames
from tests.opensora_models.randomize import randomize
from tests.shardformer.conformance import compare, fp64_model, in_double, step
from tests.tolerances import RELATIVE
from tests.video_models.case import Case, randn

DIM, HEADS = 12, 3


class Block(nn.Module):
    """Of tokens [B, T, H, W, C], a time for every frame, and options: a table for every token, their number."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.time = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Linear(1, DIM)

    def forward(self, *args, **options):
        x, times = args
        kind, num_tokens = options["sizes"]
        assert kind == "video"
        q, k, v = self.qkv(x).reshape(x.size(0), num_tokens, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        q, k = (each * options["places"].table for each in (q, k))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.out(out) * self.time(times)[:, :, None, None]


class Gridded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.embed, self.head = nn.Linear(4, DIM), nn.Linear(DIM, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, clip, times):
        x = self.embed(clip)
        num_tokens = clip[0, ..., 0].numel()
        table = torch.arange(1.0, num_tokens + 1).sin().to(x)[:, None]
        for block in self.blocks:
            x = block(x, times, places=SimpleNamespace(table=table), sizes=("video", num_tokens))
        return self.head(x)


def spread_frames(spread):
    split_frames(spread, "blocks.0", "args.0")
    split_frames(spread, "blocks.*", "args.1")
    count_own(spread, "blocks.*", "sizes.1")
    gather_frames(spread, "head")


def give_frames(spread):
    spread_by_frames(spread, "clip", dim=1)


def split_table(spread):
    """What `SplitInput("blocks.*", "places.table", dim=0)` does, but behind `spread_frames`."""
    tokens = spread.tokens

    def split(table):
        return tokens.split(table, 0, tokens.share(len(table), "the table"), is_shared=True)

    spread.change_arguments("blocks.*", "", lambda arguments, _: change_at(arguments, "places.table", split))


POLICY = Policy(
    models=("Gridded",),
    arguments="clip times",
    split_inputs=(SplitInput("blocks.*", "places.table", dim=0),),
    functions=(give_frames, spread_frames),
    self_attention=("blocks.*",),
    blocks=(Blocks("blocks", ()),),
)
# The grid of the tokens, which are split first, tells how many a frame has.
BY_THE_GRID = replace(POLICY, split_inputs=(), functions=(spread_frames, split_table))


def errors(plan, policy, num_frames):
    init_parallel(plan)
    case = Case(
        lambda: randomize(Gridded()),
        lambda: {"clip": randn(2, num_frames, 3, 5, 4), "times": randn(2, num_frames, 1, seed=2)},
        ("clip", "times"),
    )
    inputs = in_double(case.inputs())
    expected = step(fp64_model(case), case, inputs)
    model = shardformer.shard(fp64_model(case), plan, policy=policy)
    sizes = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: sizes.append(args[0].size(1)))
    return max(compare(step(model, case, inputs), expected).values()), sizes[0]


@pytest.mark.parametrize(
    ("plan", "policy", "num_frames", "shares"),
    [
        (Plan(ulysses=2), POLICY, 5, [3, 2]),
        (Plan(ring=3, checkpoint="full", offload=1.0), POLICY, 5, [2, 2, 1]),
        (Plan(ring=3, checkpoint="full", offload=1.0), BY_THE_GRID, 5, [2, 2, 1]),
        (Plan(ulysses=3), BY_THE_GRID, 2, [1, 1, 0]),
    ],
)
def test_gradients_are_those_of_one_device(ranks, plan, policy, num_frames, shares):
    found = ranks(plan.world_size, errors, plan, policy, num_frames)
    assert max(error for error, _ in found) < RELATIVE[torch.float64]
    assert [size for _, size in found] == shares


def refusal(change):
    plan = Plan(ulysses=2)
    init_parallel(plan)
    with pytest.raises(ValueError) as caught:
        model = shardformer.shard(Gridded(), plan, policy=Policy(**vars(POLICY) | change))
        model(randn(2, 5, 3, 5, 4), randn(2, 5, 1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"split_inputs": (SplitInput("blocks.0", "args.2"),)},
            "names the argument 'args.2', but this tuple has 2 items",
        ),
        (
            {"split_inputs": (SplitInput("blocks.*", "places.tables", dim=0),)},
            "names the argument 'places.tables', but this SimpleNamespace has table",
        ),
        (
            {"split_inputs": (SplitInput("head", "x", dim=1),)},
            "names head's argument 'x', but the forward of Linear takes input",
        ),
        (
            {"functions": (partial(count_own, module="head", argument="num_tokens"),)},
            "names head's argument 'num_tokens', but the forward of Linear takes input",
        ),
        (
            {"functions": (partial(gather_frames, module="tail"),)},
            "the policy names 'tail', which fits no module of Gridded: it has embed, head, blocks",
        ),
        (
            {"split_inputs": (SplitInput("", "times"),), "functions": (give_frames,)},
            "the policy splits an argument of Gridded before it knows the frames",
        ),
        (
            {
                "split_inputs": (),
                "functions": (partial(split_frames, module="blocks.0", argument="args.1"),),
            },
            "splits blocks.0's args.1 by frames, but 5 are not those of tokens that are not split yet",
        ),
    ],
)
def test_a_table_that_reaches_for_what_is_not_there_is_told(ranks, change, message):
    for told in ranks(2, refusal, change):
        assert message in told
