"""Masks as models pass them, read as padding where that is all they say."""

import pytest
import torch

from shardformer.modeling.masks import HIDDEN, Extent, MaskReader

# 7 video tokens on 3 ranks, of which this one has 3 and 4; 2 text tokens.
LAST = Extent(1, (3, 2, 2), 2)
FIRST = Extent(1, (3, 2, 2), 2, text_first=True)
VIDEO = Extent(1, (3, 2, 2))


def read(mask, extent=LAST, batch=2):
    return MaskReader("attn").read(mask, batch, extent, extent)


def test_no_mask_is_none():
    assert read(None).keys is None and read(None).bias is None


@pytest.mark.parametrize("extent", [LAST, FIRST], ids=["text last", "text first"])
def test_a_mask_over_all_tokens_becomes_this_ranks(extent):
    whole = torch.arange(18).view(2, 9) % 3 == 0
    video, text = (whole[:, 2:], whole[:, :2]) if extent.text_first else (whole[:, :7], whole[:, 7:])
    own = video[:, 3:5]
    expected = torch.cat([text, own] if extent.text_first else [own, text], 1)
    assert torch.equal(read(whole[:, None, None], extent).keys, expected)
    assert torch.equal(read(expected[:, None, None], extent).keys, expected)


def test_one_mask_for_the_whole_batch_is_repeated():
    assert read(torch.ones(1, 1, 1, 4, dtype=torch.bool)).keys.shape == (2, 4)


def test_a_bias_of_nothing_and_minus_ten_thousand_is_a_mask():
    keys = torch.tensor([[True, False, True, True], [True, True, True, False]])
    bias = ((~keys) * HIDDEN)[:, None, None].expand(2, 3, 1, 4)  # for every head
    assert torch.equal(read(bias).keys, keys)
    assert torch.equal(read(torch.where(bias == 0, 0, -torch.inf)).keys, keys)


@pytest.mark.parametrize("columns", [4, 9])
def test_padding_over_queries_and_keys_is_read_as_both(columns):
    visible = torch.rand(2, columns, generator=torch.Generator().manual_seed(0)) > 0.4
    found = read((visible[:, :, None] & visible[:, None])[:, None])
    expected = LAST.cut(visible, 1) if columns == 9 else visible
    assert torch.equal(found.keys, expected) and torch.equal(found.queries, expected)


def test_queries_without_keys_to_see_are_no_keys_less():
    """Of 3 queries and 5 keys; a rectangle, not a square."""
    queries, keys = (
        torch.tensor([[True, False]]),
        torch.tensor([[True, False, True, True, False, True, True]]),
    )
    found = MaskReader("attn").read((queries[:, :, None] & keys[:, None])[:, None], 1, Extent(0, (2,)), VIDEO)
    assert torch.equal(found.queries, queries) and torch.equal(found.keys, keys[:, 3:5])


@pytest.mark.parametrize("heads", [1, 3])
def test_anything_else_over_all_tokens_stays_as_it_is(heads):
    causal = torch.ones(1, heads, 9, 9, dtype=torch.bool).tril()
    assert torch.equal(read(causal).bias, LAST.cut(causal, 2))
    bias = torch.randn(2, heads, 1, 9)
    assert torch.equal(read(bias).bias, bias)


def test_keys_hidden_from_some_heads_are_no_padding():
    bias = torch.zeros(2, 3, 1, 9)
    bias[:, 1, :, 4] = HIDDEN
    assert torch.equal(read(bias).bias, bias) and torch.equal(read(bias == 0).bias, bias == 0)


def test_anything_else_over_this_ranks_tokens_is_refused():
    with pytest.raises(ValueError, match=r"more than padding .* pass one over all tokens"):
        read(torch.ones(1, 1, 4, 4, dtype=torch.bool).tril())


def test_a_mask_of_other_tokens_is_refused():
    with pytest.raises(
        ValueError, match=r"got a mask of \(2, 1, 1, 5\).*this rank's tokens, \[B, 1, 1 or 4, 4\]"
    ):
        read(torch.ones(2, 1, 1, 5, dtype=torch.bool))


def test_a_module_whose_masks_change_their_kind_is_told():
    reader = MaskReader("attn")
    reader.read(torch.zeros(2, 1, 1, 9), 2, LAST, LAST)
    with pytest.raises(RuntimeError, match="masks of two kinds"):
        reader.read(torch.randn(2, 1, 1, 9), 2, LAST, LAST)


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(2, 1, 1, 9),
        torch.randn(2, 3, 1, 9) > 0,
        torch.rand(2, 1, 9, 9) > 0.5,
        torch.rand(2, 1, 4, 9) > 0.5,
    ],
    ids=["a bias", "of every head", "of queries too", "of these queries"],
)
def test_masks_of_another_shape_or_dtype_may_be_of_another_kind(other):
    reader = MaskReader("attn")
    padding = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    assert reader.read(padding, 2, LAST, LAST).keys is not None
    assert reader.read(other, 2, LAST, LAST).bias is not None


def test_a_mask_over_this_ranks_tokens_is_another_than_one_over_all():
    reader = MaskReader("attn")
    assert reader.read(torch.zeros(2, 1, 1, 4), 2, LAST, LAST).keys is not None
    assert reader.read(torch.randn(2, 1, 1, 9), 2, LAST, LAST).bias is not None


def test_of_this_ranks_queries_and_all_keys_nothing_is_read():
    """Frames that see none later: a rank whose queries are one frame would find that the others' keys are padding."""
    first_frame = torch.zeros(1, 1, 4, 9, dtype=torch.bool)
    first_frame[..., :4] = True
    assert torch.equal(read(first_frame).bias, first_frame)


def test_all_queries_and_this_ranks_keys_are_refused():
    with pytest.raises(ValueError, match=r"all queries and this rank's keys, \(1, 1, 9, 4\); leave it whole"):
        read(torch.ones(1, 1, 9, 4, dtype=torch.bool))


def test_a_mask_that_hides_nothing_does_not_tell_the_next_ones_kind():
    """Frames that see none later are one frame in a short clip, and others in the next."""
    reader, causal = MaskReader("attn"), torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    for _ in range(2):
        assert reader.read(torch.ones_like(causal), 1, LAST, LAST).bias is None
    assert torch.equal(reader.read(causal, 1, LAST, LAST).bias, LAST.cut(causal, 2))


def test_masks_of_another_length_may_be_of_another_kind():
    reader, more = MaskReader("attn"), Extent(1, (4, 4, 1), 2)
    padding = torch.ones(9, dtype=torch.bool)
    padding[-1] = False
    assert reader.read(padding[:, None] & padding, 1, LAST, LAST).bias is None
    assert reader.read(torch.ones(11, 11, dtype=torch.bool).tril(), 1, more, more).bias is not None


def test_a_bias_that_is_learned_is_none_that_hides():
    """It may begin with zeros, and needs a gradient."""
    bias = torch.zeros(1, 1, 1, 9, requires_grad=True)
    assert read(bias).bias.requires_grad
    with pytest.raises(ValueError, match="more than padding"):
        read(torch.zeros(1, 1, 1, 4, requires_grad=True))


def test_a_bias_that_hides_all_keys_of_a_query_hides_none():
    bias = torch.zeros(2, 1, 1, 9)
    bias[1] = HIDDEN
    assert torch.equal(read(bias).bias, bias)
    assert torch.equal(read(bias == 0).keys[1], torch.zeros(4, dtype=torch.bool))
