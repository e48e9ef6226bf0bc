"""What a forward finds out about its tokens, what it makes once, and what of both a recomputation knows."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.checkpoint import preserve_state, with_preserved_state
from shardformer.engine.attentions import _decoder_attention, _extent, _joint_attention
from shardformer.policy.base import JointAttention
from shardformer.spread import Tokens
from tests.attention.reference import full_attention


class Group:
    """As much of a process group as counting takes."""

    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


@pytest.fixture
def tokens():
    """Of rank 1 of 3, in a forward."""
    tokens = Tokens(Group(1, 3))
    tokens.begin()
    return tokens


def test_shares_are_whole_units(tokens):
    tokens.state.unit = 4
    assert tokens.share(28, "x") == tokens.state.splits == (12, 8, 8)
    assert tokens.own_range((12, 8, 8)) == slice(12, 20)
    with pytest.raises(ValueError, match="y has 26 tokens, which are no frames of 4"):
        tokens.share(26, "y")


def test_the_size_of_a_frame_follows_from_the_first_tokens(tokens):
    tokens.state.num_frames = 4
    assert tokens.share(20, "x") == (10, 5, 5) and tokens.state.unit == 5


def test_tensors_of_different_lengths_are_refused(tokens):
    tokens.share(7, "x")
    with pytest.raises(ValueError, match=r"y has 8 tokens, but the tokens split before it were 7"):
        tokens.share(8, "y")


@pytest.mark.parametrize("rank", range(3))
def test_fewer_tokens_than_ranks_are_refused_on_every_rank(rank):
    """A rank without any fails inside of most models, and the others wait for it."""
    tokens = Tokens(Group(rank, 3))
    tokens.begin()
    with pytest.raises(ValueError, match="x has 2 tokens, fewer than the 3 ranks"):
        tokens.share(2, "x")


def test_outside_of_a_forward_nothing_is_noted(tokens):
    tokens.share(7, "x")
    tokens.end()
    assert tokens.share(8, "y") == (3, 3, 2) and tokens.state.splits is None
    tokens.begin()
    assert tokens.share(9, "z") == (3, 3, 3)


def test_a_forward_that_was_cut_off_leaves_nothing_to_the_next(tokens):
    """Not even by an interrupt, which runs no hooks."""
    x = torch.zeros(1)
    tokens.share(7, "x")
    first = tokens.once(x, (0,), lambda: x + 1)
    tokens.begin()
    assert tokens.state.splits is None and tokens.once(x, (0,), lambda: x + 1) is not first


def test_what_is_made_once_is_made_again_for_anything_else(tokens):
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    first = tokens.once(x, (0,), x.clone)
    assert tokens.once(x, (0,), x.clone) is first
    assert tokens.once(x, (1,), x.clone) is not first
    assert tokens.once(y, (0,), y.clone) is not first
    with torch.no_grad():
        assert not tokens.once(x, (0,), x.clone).requires_grad
    assert first.requires_grad and tokens.once(x, (0,), x.clone) is first


def test_tensors_that_come_and_go_are_told_apart(tokens):
    """A new tensor may be found where an old one was, if that was let go."""
    made = [tokens.once(x, (), lambda x=x: x + 1) for x in (torch.full((3,), float(i)) for i in range(20))]
    assert [share[0].item() for share in made] == list(range(1, 21))


@pytest.mark.parametrize("after", ["a forward", "a recomputation"])
def test_nothing_is_kept_after(tokens, after):
    x = torch.zeros(1)
    make = tokens.preserve(lambda: tokens.once(x, (), x.clone))
    kept = weakref.ref(make())
    tokens.end()
    if after == "a recomputation":
        kept = weakref.ref(make())
    gc.collect()
    assert kept() is None


def test_a_share_is_of_its_dim_and_kept_where_others_get_it_too(ranks):
    assert all(ranks(2, shares_of_a_square))


def shares_of_a_square():
    init_parallel(Plan(ulysses=2))
    tokens, x = Tokens(parallel_states.get_sequence_parallel_group()), torch.arange(16.0).view(4, 4)
    tokens.begin()
    rows, columns = (tokens.split(x, dim, (2, 2), is_shared=True) for dim in (0, 1))
    assert tokens.split(x, 0, (2, 2), is_shared=True) is rows
    assert tokens.split(x, 0, (2, 2), is_shared=False) is not rows
    own = tokens.own_range((2, 2))
    return torch.equal(rows, x[own]) and torch.equal(columns, x[:, own])


def test_a_recomputation_has_the_state_of_its_call(tokens):
    seen = []

    def block():
        seen.append((tokens.state.splits, tokens.state.spread, dict(tokens.state.sizes)))
        tokens.share(7, "x")
        tokens.state.spread, tokens.state.sizes["T"] = "S", 5

    tokens.state.spread, tokens.state.sizes = "T", {"S": 3}
    again = tokens.preserve(block)
    again()
    tokens.state.sizes["S"] = 4  # of a block that came later
    tokens.end()
    again()
    again()
    assert seen == [(None, "T", {"S": 3})] + [((3, 2, 2), "T", {"S": 3, "T": 5})] * 2
    assert tokens.state.splits is None and tokens.state.spread is None


def test_a_recomputation_that_fails_leaves_nothing(tokens):
    fails = []
    again = tokens.preserve(lambda: fails and 1 / 0)
    tokens.share(7, "x")
    again()
    tokens.end()
    fails.append(True)
    with pytest.raises(ZeroDivisionError):
        again()
    assert tokens.state.splits is None


def test_what_a_recomputation_checkpoints_has_the_state_too(tokens):
    """A checkpoint within a checkpoint is first called in the outer one's recomputation."""
    tokens.share(7, "x")
    inner = []

    def outer():
        inner.append(with_preserved_state(lambda: tokens.state.splits))
        return inner[-1]()

    with preserve_state(tokens.preserve):
        again = with_preserved_state(outer)
        again()
    tokens.end()
    again()
    assert inner[-1]() == (3, 2, 2)


def test_a_recomputation_that_brought_nothing_is_told(tokens):
    tokens.check_known("x")
    known = tokens.preserve(lambda: tokens.check_known("x"))
    known()
    tokens.end()
    known()
    with pytest.raises(ValueError, match="x is recomputed by a checkpoint that shardformer does not know of"):
        tokens.check_known("x")


def test_attention_to_fewer_tokens_than_were_split_is_refused(tokens):
    with pytest.raises(ValueError, match="spreads attn over the ranks, but splits no tokens before it"):
        _extent(tokens, 5, "attn")
    tokens.share(7, "x")
    assert _extent(tokens, 5, "attn").num_text == 3
    with pytest.raises(ValueError, match="attn attends to 1 tokens, fewer than this rank's 2"):
        _extent(tokens, 1, "attn")


def test_calls_that_are_no_joint_attention_are_refused(tokens):
    tokens.share(7, "x")
    two, four, five = (torch.randn(1, num_tokens, 2, 8) for num_tokens in (2, 4, 5))
    options = {"mask": None, "causal": False, "scale": None}
    joint = _joint_attention(tokens, None, JointAttention("attn", "last"), "attn")
    with pytest.raises(ValueError, match="is causal, which a sequence of text and video is not"):
        joint(five, five, five, **options | {"causal": True})
    with pytest.raises(ValueError, match=r"asks 5 keys with 4 queries, .* nor this rank's 2 of the video"):
        joint(four, five, five, **options)
    kernels = SimpleNamespace(spread=lambda *_, splits, kv_splits, **__: (splits, kv_splits))
    twice = _decoder_attention(tokens, kernels, "attn")
    assert twice(four, four, four, **options) == ((6, 4, 4), (6, 4, 4))
    for wrong in (two, five):
        with pytest.raises(ValueError, match=r"not to this rank's 2 twice"):
            twice(wrong, wrong, wrong, **options)
    with pytest.raises(ValueError, match="cannot be causal or have a mask there"):
        twice(four, four, four, **options | {"mask": torch.ones(1, 1, 1, 4, dtype=torch.bool)})


def test_text_alone_is_attended_to_as_on_one_device(tokens):
    q, k, v = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8)
    attention = _joint_attention(tokens, None, JointAttention("attn", "first", text_alone=True), "attn")
    expected = full_attention(q, k, v, causal=True)
    assert torch.allclose(attention(q, k, v, mask=None, causal=True, scale=None), expected, atol=1e-6)
    with pytest.raises(ValueError, match="a mask and is_causal"):
        attention(q, k, v, mask=torch.ones(1, 1, 5, 5, dtype=torch.bool), causal=True, scale=None)


def test_what_is_shared_is_let_go_and_seen_to_change(tokens):
    """A block's share outlives the whole tensor; one that a model changed in place is split again."""
    x = torch.zeros(3)
    whole, first = weakref.ref(x), tokens.once(x, (), x.clone)
    x += 1
    assert torch.equal(tokens.once(x, (), x.clone), x) and torch.equal(first, torch.zeros(3))
    del x
    gc.collect()
    assert whole() is None
