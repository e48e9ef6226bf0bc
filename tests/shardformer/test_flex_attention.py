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


def test_a_share_that_needs_no_padding_is_kept_whole():
    """The code of a model cuts off what it padded, `[:, :, :-padded_length]`, which of nothing is all."""
    rng = torch.Generator().manual_seed(0)
    query = padded(rng).requires_grad_()
    kernel = redirected(lambda query, *_args, **_options: 2 * query, splits=(150, 256))
    out = kernel(query, query, query)
    padded_length = 0
    kept = out[:, :, :-padded_length]
    assert type(kept) is torch.Tensor and torch.equal(kept, 2 * query)
    # Whatever else is asked of it is as of any tensor.
    assert type(out[:, 1]) is type(out.transpose(1, 2)) is type(out + 1) is torch.Tensor
    assert torch.equal(out[:, 1], kept[:, 1]) and torch.equal(out[..., :3], kept[..., :3])
    kept.sum().backward()
    assert (query.grad == 2).all()
