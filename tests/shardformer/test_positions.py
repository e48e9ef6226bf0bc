"""Positions, masks and kernels that a model brings along inside attention, where the tokens are split already."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.communications import share_sizes
from shardformer.modeling.flash_attn import Lengths, redirect_flash_attn
from shardformer.modeling.masks import Extent, MaskReader
from shardformer.policy.base import Blocks, GatherOutput, Policy, Positions, SplitInput
from shardformer.policy.wan import WAN_AUTHORS
from tests.authors_models.wan import WanModel, wan_model_inputs
from tests.opensora_models.randomize import randomize
from tests.shardformer.conformance import compare, fp64_model, in_double, of_first_rank, step
from tests.tolerances import RELATIVE
from tests.video_models.case import Case

EXACT = RELATIVE[torch.float64]
UNTOLD = replace(WAN_AUTHORS, positions=(), kernel_functions=())


def case_of(positions, kernel, padded=False):
    return Case(
        lambda: randomize(WanModel(positions, kernel)), lambda: wan_model_inputs(padded), ("x", "context")
    )


def errors(plan, policy, positions, kernel, padded=False):
    init_parallel(plan)
    case = case_of(positions, kernel, padded)
    inputs = in_double(case.inputs())
    expected = of_first_rank(lambda: step(fp64_model(case), case, inputs))
    model = shardformer.shard(fp64_model(case), plan, policy=policy)
    return max(compare(step(model, case, inputs), expected).values())


def refusal(plan, policy, positions, kernel, padded=False):
    """What a forward and backward say; every rank must say it, since otherwise some would wait."""
    try:
        return f"right to {errors(plan, policy, positions, kernel, padded):.0e}"
    except ValueError as error:
        return str(error)


MESHES = [Plan(ulysses=2), Plan(ring=3, checkpoint="full")]


@pytest.mark.parametrize("plan", MESHES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_a_rotary_function_sees_the_whole_clip(ranks, plan, padded):
    assert max(ranks(plan.world_size, errors, plan, WAN_AUTHORS, "rope_apply", "k_lens", padded)) < EXACT


@pytest.mark.parametrize("plan", MESHES, ids=str)
def test_a_model_that_asks_for_its_tokens(ranks, plan):
    """`local_tokens` in the model's code, and nothing of positions in the policy."""
    assert max(ranks(plan.world_size, errors, plan, UNTOLD, "local_tokens", "sdpa")) < EXACT


@pytest.mark.parametrize("positions", ["counted", "sliced"])
def test_positions_counted_from_a_ranks_own_tokens_are_refused(ranks, positions):
    for message in ranks(2, refusal, Plan(ulysses=2), UNTOLD, positions, "sdpa"):
        assert "blocks.0.self_attn made a tensor" in message
        assert "positions would count from 0 on every rank" in message and "local_tokens" in message


@pytest.mark.parametrize("kernel", ["mask", "mask of zeros"])
def test_a_mask_counted_from_a_ranks_own_tokens_is_refused(ranks, kernel):
    for message in ranks(2, refusal, Plan(ring=2), UNTOLD, "none", kernel, True):
        assert (
            "blocks.0.self_attn made a mask (2, 1, 1, 3" in message and "keys to hide would count" in message
        )


def test_a_mask_that_hides_nothing_may_be_made_anywhere(ranks):
    assert max(ranks(2, errors, Plan(ring=2), UNTOLD, "none", "mask of ones")) < EXACT


VARLEN = replace(WAN_AUTHORS, kernel_functions=("flash_attn_varlen_func",))


@pytest.mark.parametrize("kernel", ["varlen by position", "varlen by name"])
@pytest.mark.parametrize("plan", MESHES, ids=str)
def test_packed_tokens(ranks, plan, kernel):
    assert max(ranks(plan.world_size, errors, plan, VARLEN, "rope_apply", kernel)) < EXACT


@pytest.mark.parametrize("kernel", ["flash_attn_qkvpacked_func", "flash_attn_varlen_qkvpacked_func"])
@pytest.mark.parametrize("plan", MESHES, ids=str)
def test_queries_keys_and_values_in_one_tensor(ranks, plan, kernel):
    policy = replace(WAN_AUTHORS, kernel_functions=(kernel,))
    assert max(ranks(plan.world_size, errors, plan, policy, "rope_apply", kernel)) < EXACT


def test_keys_and_values_in_one_tensor_are_refused_by_name(ranks):
    policy = replace(WAN_AUTHORS, kernel_functions=("flash_attn_kvpacked_func",))
    for told in ranks(2, refusal, Plan(ulysses=2), policy, "rope_apply", "flash_attn_kvpacked_func"):
        assert (
            "flash_attn_kvpacked_func got a tensor (2, 3" in told and "takes q, k and v, or all three" in told
        )


@pytest.mark.parametrize("positions", ["none", "local_tokens"])
def test_a_function_of_positions_that_is_never_called_is_refused(ranks, positions):
    policy = replace(UNTOLD, positions=WAN_AUTHORS.positions)
    for told in ranks(2, refusal, Plan(ulysses=2), policy, positions, "sdpa"):
        assert (
            "the policy says that rope_apply gives tokens their positions, but WanModel did not call it"
            in told
        )


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            "window",
            r"flash_attention got window_size=(4, 4), which sequence-parallel attention does not have",
        ),
        (
            "slopes",
            r"flash_attention got q_scale=a tensor (3,), which sequence-parallel attention does not have",
        ),
    ],
)
def test_arguments_without_a_parallel_counterpart_are_refused(ranks, kernel, message):
    for told in ranks(2, refusal, Plan(ulysses=2), WAN_AUTHORS, "rope_apply", kernel):
        assert message in told


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn.flash_attn_func", "WanModel.attend"])
def test_a_function_that_the_package_lacks_is_an_error_at_shard(ranks, name):
    for policy in (replace(UNTOLD, kernel_functions=(name,)), replace(UNTOLD, positions=(Positions(name),))):
        for told in ranks(2, refusal, Plan(ulysses=2), policy, "none", "sdpa"):
            assert (
                f"the policy names the function {name!r}, which the package of WanModel (tests.authors_models.wan) does"
                in told
            )


def test_an_argument_that_the_function_lacks_is_an_error_at_shard(ranks):
    policy = replace(UNTOLD, positions=(Positions("rope_apply", tables=("table",)),))
    for told in ranks(2, refusal, Plan(ulysses=2), policy, "none", "sdpa"):
        assert "rope_apply's argument 'table', but it takes x, grid_sizes, freqs" in told


def rotate(x, table):
    return x * table


class Rotation(nn.Module):
    """A table for the whole clip that enters as a method's argument, inside attention."""

    def forward(self, x, table):
        return rotate(x, table)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.rotation = nn.Linear(12, 36), nn.Linear(12, 12), Rotation()
        self.table = nn.Parameter(torch.randn(1, 75, 1, 4))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (9, 4)).chunk(3, 2)
        q, k = self.rotation(q, self.table), self.rotation(k, table=self.table)
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.out(out.transpose(1, 2).flatten(2))


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.attends, self.last = nn.Linear(4, 12), Attends(), nn.Linear(12, 4)

    def forward(self, x):
        return self.last(self.attends(self.first(x)))


def learned_table(name):
    plan = Plan(ulysses=2)
    init_parallel(plan)
    policy = Policy(
        models=("Learned",),
        split_inputs=(SplitInput("first", "input"),),
        gather_outputs=(GatherOutput("last"),),
        self_attention=("attends",),
        positions=(Positions(name, tables=("table",)),),
        blocks=(Blocks("", ("x",)),),
    )
    case = Case(
        Learned, lambda: {"x": torch.randn(2, 75, 4, generator=torch.Generator().manual_seed(1))}, ("x",)
    )
    inputs = in_double(case.inputs())
    expected = of_first_rank(lambda: step(fp64_model(case), case, inputs))
    model = shardformer.shard(fp64_model(case), plan, policy=policy)
    found = compare(step(model, case, inputs), expected)
    shardformer.unshard(model)
    assert torch.equal(step(model.requires_grad_(), case, inputs)["output 0"], expected["output 0"])
    return max(found.values())


@pytest.mark.parametrize("name", ["Rotation.forward", "rotate"])
def test_a_table_is_cut_where_it_enters(ranks, name):
    assert max(ranks(2, learned_table, name)) < EXACT


class Recomputed(Learned):
    """Its own code recomputes attention, by a checkpoint that brings no state along."""

    use_reentrant = False

    def forward(self, x):
        x = torch_checkpoint(self.attends, self.first(x), use_reentrant=self.use_reentrant)
        return self.last(x)


class RecomputedReentrantly(Recomputed):
    use_reentrant = True


def recomputed(cls):
    """What backward says of positions in a recomputation that knows no shares, and of the function elsewhere."""
    plan = Plan(ulysses=2)
    init_parallel(plan)
    policy = Policy(
        models=(cls.__name__,),
        split_inputs=(SplitInput("first", "input"),),
        gather_outputs=(GatherOutput("last"),),
        self_attention=("attends",),
        positions=(Positions("rotate", tables=("table",)),),
    )
    model, other = cls(), Learned()
    expected = other(torch.ones(1, 75, 4))
    shardformer.shard(model, plan, policy=policy)
    # Another model calls the same function, outside of a forward of the sharded one.
    assert torch.equal(other(torch.ones(1, 75, 4)), expected)
    try:
        model(torch.randn(2, 75, 4)).square().mean().backward()
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("cls", [Recomputed, RecomputedReentrantly])
def test_positions_that_an_unknown_checkpoint_recomputes_are_refused(ranks, cls):
    for told in ranks(2, recomputed, cls):
        assert (
            "rotate, which gives tokens their positions, is recomputed by a checkpoint that shardformer does"
            in told
        )
        assert "opensora_accel.checkpoint.checkpoint in place of torch's" in told


class ByFrame(Learned):
    """Turns the tokens of a frame by its number, counted inside attention."""

    def forward(self, x, num_frames, size):
        x = self.first(x)
        self.attends.rotation.forward = lambda x, table: self.turn(x, num_frames, size)
        return self.last(self.attends(x))

    def turn(self, x, num_frames, size):
        turned = (
            x.unflatten(1, (num_frames, size)) * (torch.arange(num_frames) / 7).cos()[:, None, None, None]
        )
        return turned.flatten(1, 2)


def spread_by_frames(spread):
    """The model is told how many frames there are, and passes that on."""
    tokens = spread.tokens

    def change(arguments, name):
        tokens.state.unit = arguments["size"]
        tokens.share(arguments["num_frames"] * arguments["size"], name)
        arguments["num_frames"] = tokens.state.frames[tokens.group.rank()]

    spread.change_arguments("", "num_frames size", change)


def frames_counted_inside():
    plan = Plan(ulysses=2)
    init_parallel(plan)
    policy = Policy(
        models=("ByFrame",),
        split_inputs=(SplitInput("first", "input"),),
        gather_outputs=(GatherOutput("last"),),
        self_attention=("attends",),
        functions=(spread_by_frames,),
    )
    model = shardformer.shard(ByFrame(), plan, policy=policy)
    with pytest.raises(ValueError, match="positions would count from 0 on every rank"):
        model(torch.ones(2, 75, 4), 5, 15)


def test_positions_of_whole_frames_counted_inside_are_refused(ranks):
    """The shares fit the grid of every rank, so that nothing else would tell."""
    ranks(2, frames_counted_inside)


class Broadcast(Learned):
    """Scales all tokens alike, by a tensor of dims of 1 that is made inside attention."""

    def forward(self, x):
        x = self.first(x)
        self.attends.rotation.forward = lambda x, table: x * torch.linspace(0.5, 1, 4)[None, None]
        return self.last(self.attends(x))


def one_token_a_rank():
    plan = Plan(ring=2)
    init_parallel(plan)
    policy = Policy(
        models=("Broadcast",),
        split_inputs=(SplitInput("first", "input"),),
        gather_outputs=(GatherOutput("last"),),
        self_attention=("attends",),
    )
    return shardformer.shard(Broadcast(), plan, policy=policy)(torch.ones(2, 2, 4)).shape


def test_a_rank_of_one_token_takes_no_broadcast_for_positions(ranks):
    assert ranks(2, one_token_a_rank) == [(2, 2, 4)] * 2


def test_local_tokens_are_all_of_them_on_one_device():
    assert shardformer.local_tokens(7) == slice(0, 7)


def asked():
    """Before the split, and after it."""
    plan = Plan(ring=3)
    init_parallel(plan)
    torch.manual_seed(0)
    seen = []

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            seen.append(shardformer.local_tokens(x.size(1)))
            x = self.first(x)
            seen.append(shardformer.local_tokens(7))
            with pytest.raises(
                ValueError, match=r"local_tokens\(5\): the tokens that are split over the ranks are 7"
            ):
                shardformer.local_tokens(5)
            return self.last(x)

    policy = Policy(
        ("Asks",), split_inputs=(SplitInput("first", "input"),), gather_outputs=(GatherOutput("last"),)
    )
    shardformer.shard(Asks(), plan, policy=policy)(torch.ones(2, 7, 4))
    assert shardformer.local_tokens(7) == slice(0, 7)
    return seen


def test_local_tokens_are_a_ranks_own_in_a_sharded_forward(ranks):
    for seen, own in zip(ranks(3, asked), (slice(0, 3), slice(3, 5), slice(5, 7)), strict=True):
        assert seen == [slice(0, 7), own]


# 7 video tokens on 3 ranks, of which this one has 3 and 4; 2 text tokens behind.
JOINT, VIDEO = Extent(1, share_sizes(7, 3), 2), Extent(1, share_sizes(7, 3))


@pytest.mark.parametrize(
    ("lengths", "extent", "visible"),
    [
        (Lengths((7, 6)), VIDEO, [7, 6]),  # of whole samples
        (Lengths((7, 7), 7), VIDEO, None),
        (Lengths(None, queries=(7, 7)), VIDEO, None),
        (Lengths((2, 2), 2), VIDEO, None),  # packed, counted behind the split: nothing is padding
        (Lengths((9, 8), 9), JOINT, [9, 8]),  # one text token of the second is padding
        (Lengths((4, 3), 4), JOINT, [9, 8]),  # the same, counted behind the split
    ],
)
def test_lengths_become_a_mask_of_all_keys(lengths, extent, visible):
    found = MaskReader("attn").read(lengths, 2, extent, extent)
    if visible is None:
        assert found.keys is None
    else:
        whole = torch.arange(extent.num_whole) < torch.tensor(visible)[:, None]
        assert torch.equal(found.keys, extent.cut(whole, 1))


@pytest.mark.parametrize(
    ("lengths", "extent", "message"),
    [
        (Lengths((3, 2)), VIDEO, r"may be of whole samples of 7 tokens or of what one rank has"),
        (Lengths((7, 5), 7), VIDEO, r"padding attends to itself"),
        (Lengths((8, 8)), VIDEO, r"have 7, and this rank 2 of them"),
        (
            Lengths((7, 6), queries=(6, 6)),
            VIDEO,
            r"q_lens \[6, 6\], but samples have 7 queries, which must all be there",
        ),
        (Lengths(None, queries=(2, 2)), VIDEO, r"q_lens \[2, 2\], but samples have 7 queries"),
        (Lengths((5, 5), 5), JOINT, r"samples of \[5, 5\] of 5 tokens, but they have 9, and this rank 4"),
    ],
)
def test_lengths_that_cannot_be_told_are_refused(lengths, extent, message):
    with pytest.raises(ValueError, match=message):
        MaskReader("attn").read(lengths, 2, extent, extent)


def kernel(
    q,
    k,
    v,
    q_lens=None,
    k_lens=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    dtype=torch.bfloat16,
    version=None,
):
    raise AssertionError("the model's own is not called")


def led(*args, **kwargs):
    """What the kernel passes on, and its output."""
    seen = []

    def attend(q, k, v, dropout, **options):
        seen.append((q.dtype, tuple(q.shape), options["mask"]))
        return q

    out = redirect_flash_attn(kernel, lambda: attend)(*args, **kwargs)
    return seen[0], out


def test_a_kernel_casts_as_the_function_does():
    """Wan's own casts what is not half precision already, and casts its output back."""
    q = torch.randn(2, 5, 3, 4)
    (dtype, _, _), out = led(q, q, q)
    assert dtype == torch.bfloat16 and out.dtype == torch.float32
    (dtype, _, _), out = led(q.half(), q.half(), q.half(), version=2)
    assert dtype == torch.float16 and out.dtype == torch.float16
    (dtype, _, _), _ = led(q, q, q, dtype=None)
    assert dtype == torch.float32


def test_packed_queries_are_the_keys_tokens():
    q, ends = torch.randn(10, 3, 4), torch.tensor([0, 5, 10])
    (_, shape, lengths), out = led(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends)
    assert shape == (2, 5, 3, 4) and lengths == Lengths((5, 5), 5) and out.shape == q.shape
    with pytest.raises(ValueError, match="kernel got cu_seqlens_q that are not cu_seqlens_k"):
        led(q, q, q, cu_seqlens_q=torch.tensor([0, 4, 8]), cu_seqlens_k=ends)
    with pytest.raises(ValueError, match="without cu_seqlens_k"):
        led(q, q, q)
