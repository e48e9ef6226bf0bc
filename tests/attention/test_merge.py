"""Merged partial attention is the whole attention, for any blocks, and no worse in bf16 for many of them."""

import math

import pytest
import torch

from opensora_accel.attention.blocks import attend, merge_
from opensora_accel.attention.kernels import Scores
from tests.tiers import some


def attention(q, k, v, mask=None):
    """Output [B, S, H, D] and log-sum-exp [B, S, H], in plain maths. Rows without a key: 0 and −inf."""
    scores = torch.einsum("bshd,bthd->bsht", q, k) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(nan=0.0)
    return torch.einsum("bsht,bthd->bshd", weights, v), lse


def blockwise(blocks, like, dtype):
    out = torch.zeros(like.shape, dtype=dtype)
    lse = torch.full(like.shape[:3], -math.inf, dtype=dtype)
    for block_out, block_lse in blocks:
        merge_(out, lse, block_out, block_lse)
    return out, lse


def inputs(tokens=24, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, tokens, 3, 16, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
        for _ in range(3)
    ]


@pytest.mark.parametrize("sizes", [(24,), (12, 12), (1, 22, 1), (5,) * 4 + (4,), (1,) * 24])
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_merged_blocks_are_the_whole(sizes, scale):
    q, k, v = inputs(scale=scale)
    expected = attention(q, k, v)
    blocks = [attention(q, *pair) for pair in zip(k.split(sizes, 1), v.split(sizes, 1), strict=True)]
    for order in (blocks, blocks[::-1]):
        for found, wanted in zip(blockwise(order, q, torch.float64), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_rows_without_a_key_are_zero_and_stay_out_of_the_way():
    q, k, v = inputs()
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0, :12] = mask[1] = False  # sample 0 sees nothing in the first blocks, sample 1 in none
    blocks = [attention(q, k[:, s : s + 6], v[:, s : s + 6], mask[:, s : s + 6]) for s in range(0, 24, 6)]
    out, lse = blockwise(blocks, q, torch.float64)
    expected, expected_lse = attention(q, k, v, mask)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    assert bool((out[1] == 0).all()) and bool((lse[1] == -math.inf).all())


def test_scores_beyond_the_range_of_exp():
    """exp(1000) is infinite in every dtype; the difference of two log-sum-exps is not."""
    q, k, v = inputs(scale=1.0)
    far = [(attention(q, k, v)[0], attention(q, k, v)[1] + shift) for shift in (1000.0, -1000.0, 999.0)]
    out, lse = blockwise(far, q, torch.float64)
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    torch.testing.assert_close(out, far[0][0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("num_blocks", some([64, 4, 16]))
def test_the_error_does_not_grow_with_the_number_of_blocks(num_blocks, scale):
    """bf16 blocks against one call of torch's own bf16 kernel, both against fp64: within 1.2 times the mean error."""
    q, k, v = inputs(tokens=1024, dtype=torch.bfloat16, scale=scale)
    exact, _ = attention(q.double(), k.double(), v.double())

    def error(out):
        return (out.bfloat16().double() - exact).abs().mean()

    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    single, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first)
    blocks = []
    for pair in zip(k.chunk(num_blocks, 1), v.chunk(num_blocks, 1), strict=True):
        out, lse = attend(q, *pair, Scores(q.size(-1) ** -0.5))
        blocks.append((out, lse.transpose(1, 2)))
    assert error(blockwise(blocks, q, torch.float32)[0]) < 1.2 * error(single.transpose(1, 2))


def test_accumulating_in_bf16_is_refused():
    q, k, v = inputs(dtype=torch.bfloat16)
    out, lse = attention(q, k, v)
    with pytest.raises(
        ValueError, match=r"accumulated in fp32 or fp64; got out in torch.bfloat16, use out.float"
    ):
        merge_(out, lse, out, lse)
