"""The stand-in for flash_attn: its layouts, its masks, and its place in the import system."""

import importlib.util
import sys

import pytest
import torch

from opensora_accel.flash_attn import flash_attn_func, flash_attn_stand_in, flash_attn_varlen_func


def tensors(queries, keys, heads=4, kv_heads=4):
    torch.manual_seed(0)
    sizes = ((2, queries, heads, 8), (2, keys, kv_heads, 8), (2, keys, kv_heads, 8))
    return [torch.randn(*size, dtype=torch.float64) for size in sizes]


def one_by_one(q, k, v, sees):
    """Every query by itself; `sees(i, j)`: whether query i sees key j."""
    out = torch.zeros_like(q)
    groups = q.size(2) // k.size(2)
    for i in range(q.size(1)):
        keys = [j for j in range(k.size(1)) if sees(i, j)]
        for head in range(q.size(2)):
            of = head // groups
            scores = torch.einsum("bd,bjd->bj", q[:, i, head], k[:, keys, of]) / q.size(-1) ** 0.5
            out[:, i, head] = torch.einsum("bj,bjd->bd", scores.softmax(-1), v[:, keys, of])
    return out


@pytest.mark.parametrize(
    ("queries", "keys", "kv_heads", "options", "sees"),
    [
        (5, 5, 4, {}, lambda i, j: True),
        (5, 7, 2, {}, lambda i, j: True),
        (5, 5, 4, {"causal": True}, lambda i, j: j <= i),
        (3, 7, 4, {"causal": True}, lambda i, j: j <= i + 4),
        (6, 6, 4, {"window_size": (1, 2)}, lambda i, j: -1 <= j - i <= 2),
        (6, 6, 4, {"window_size": (2, -1), "causal": True}, lambda i, j: -2 <= j - i <= 0),
    ],
)
def test_layouts_and_masks_are_flash_attns(queries, keys, kv_heads, options, sees):
    q, k, v = tensors(queries, keys, kv_heads=kv_heads)
    torch.testing.assert_close(flash_attn_func(q, k, v, **options), one_by_one(q, k, v, sees))


def test_sequences_behind_each_other_attend_apart():
    q, k, v = (each[0] for each in tensors(9, 9))
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, lengths, lengths, 5, 5, causal=True)
    parts = [
        flash_attn_func(q[None, s], k[None, s], v[None, s], causal=True)[0] for s in (slice(4), slice(4, 9))
    ]
    assert torch.equal(out, torch.cat(parts))


def test_the_log_sum_exp_is_given_where_it_is_asked_for():
    q, k, v = tensors(3, 5)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.size(-1) ** 0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    assert torch.equal(out, flash_attn_func(q, k, v))


def test_sequences_behind_each_other_have_their_log_sum_exp():
    q, k, v = (each[0] for each in tensors(8, 8))
    lengths = torch.tensor([0, 4, 8], dtype=torch.int32)
    out, lse, _ = flash_attn_varlen_func(q, k, v, lengths, lengths, 4, 4, return_attn_probs=True)
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, lengths, lengths, 4, 4))
    halves = [
        flash_attn_func(q[None, s], k[None, s], v[None, s], return_attn_probs=True)[1][0]
        for s in (slice(4), slice(4, 8))
    ]
    assert torch.equal(lse, torch.cat(halves, -1))


def test_an_option_without_a_stand_in_is_refused():
    q, k, v = tensors(3, 3)
    with pytest.raises(ValueError, match=r"softcap=2\.0 of flash_attn has no stand-in on a CPU"):
        flash_attn_func(q, k, v, softcap=2.0)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="the package itself is here")
def test_it_is_gone_afterwards():
    with flash_attn_stand_in():
        from flash_attn import flash_attn_func as imported
        from flash_attn.flash_attn_interface import flash_attn_varlen_func as nested

        assert importlib.util.find_spec("flash_attn") is not None
    assert imported is flash_attn_func and nested is flash_attn_varlen_func
    assert "flash_attn" not in sys.modules and importlib.util.find_spec("flash_attn") is None
