"""`flex_attention` as a rank of several calls it: what of its tokens is attended to, and what is refused."""

import pytest
import torch

from shardformer.modeling import redirect_flex_attention

SPLITS = (150, 140)


def original(*_args, **_kwargs):
    return "torch's"


def redirected(attend, rank=1, splits=SPLITS):
    return redirect_flex_attention(original, lambda: attend, lambda: splits, rank)


def padded(generator, length=256):
    """[B, H, S, D], with noise in the place of padding."""
    return torch.randn(2, 3, length, 4, generator=generator)


def test_a_ranks_own_tokens_are_attended_to_and_padding_gets_zeros():
    calls = []

    def attend(query, key, value, dropout_p, **options):
        calls.append((query, key, value, dropout_p, options))
        return query + 2 * key + 3 * value

    rng = torch.Generator().manual_seed(0)
    query, key, value = (padded(rng) for _ in range(3))
    block_mask = object()
    kernel = redirected(attend)
    out = kernel(query, key=key, value=value, block_mask=block_mask, scale=0.3)
    ((own_query, own_key, own_value, dropout_p, options),) = calls
    for own, given in ((own_query, query), (own_key, key), (own_value, value)):
        assert torch.equal(own, given[:, :, :140].transpose(1, 2))  # rank 1 of 150 and 140, as [B, S/P, H, D]
    assert dropout_p == 0.0 and options == {"mask": block_mask, "causal": False, "scale": 0.3}
    assert out.shape == query.shape
    assert torch.equal(out[:, :, :140], (query + 2 * key + 3 * value)[:, :, :140])
    assert (out[:, :, 140:] == 0).all()


def test_outside_of_a_models_attention_it_is_torchs():
    assert redirected(None)(1, 2, 3, score_mod=len) == "torch's"


@pytest.mark.parametrize(
    "option",
    [{"score_mod": lambda score, *_: score}, {"return_lse": True}, {"return_aux": object()}],
    ids=list,
)
def test_what_slices_do_not_say_is_refused(option):
    query = padded(torch.Generator())
    (name,) = option
    kernel = redirected(lambda *_args, **_options: pytest.fail("it was attended by"))
    with pytest.raises(
        ValueError, match=f"flex_attention got {name}, which sequence-parallel attention does not"
    ):
        kernel(query, query, query, **option)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("splits", [(128, 127, 127), (130, 129, 256)])
def test_shares_that_need_no_padding_are_refused_on_all_ranks(rank, splits):
    """`x[:, :, :-0]` of the model's own code would leave nothing of them."""
    query = padded(torch.Generator())
    kernel = redirected(lambda *_args, **_options: pytest.fail("it was attended by"), rank, splits)
    with pytest.raises(
        ValueError, match=r"multiple of 128 needs no padding.*another number of sequence ranks"
    ):
        kernel(query, query, query)
