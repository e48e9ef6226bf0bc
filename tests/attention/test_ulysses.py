"""Ulysses against attention on one device: output and every input gradient, whatever the sizes."""

import itertools

import pytest
import torch
import torch.distributed as dist

from opensora_accel.attention import local_attention, ulysses_attention
from opensora_accel.communications import share_sizes
from tests.tolerances import RELATIVE, relative_error


def reference(q, k, v, mask, causal):
    """Plain softmax attention, written out."""
    repeats = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) / q.size(-1) ** 0.5
    allowed = torch.ones(q.size(0), 1, q.size(1), k.size(1), dtype=torch.bool)
    if mask is not None:
        allowed = allowed & mask[:, None, None, :]
    if causal:
        allowed = allowed & torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril()
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return torch.einsum("bhst,bthd->bshd", weights, v)


def inputs(num_queries, num_keys, heads, kv_heads, dtype, masked):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, num_queries, heads, 8, generator=generator, dtype=dtype)
    k, v = torch.randn(2, 2, num_keys, kv_heads, 8, generator=generator, dtype=dtype)
    mask = None
    if masked:
        mask = torch.rand(2, num_keys, generator=generator) > 0.4
        mask[0, 0] = True
        mask[1] = False  # a sample whose text is empty: no key at all
    return q, k, v, mask


def compared(num_queries, num_keys, heads, kv_heads, dtype, masked, causal, given):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    *full, mask = inputs(num_queries, num_keys, heads, kv_heads, dtype, masked)
    full = [t.requires_grad_() for t in full]
    expected = reference(*full, mask, causal)
    weight = torch.randn(expected.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    (expected * weight).sum().backward()

    mine = [t.detach().tensor_split(num_ranks, 1)[rank].clone().requires_grad_() for t in full]
    splits = {
        "splits": share_sizes(num_queries, num_ranks),
        "kv_splits": share_sizes(num_keys, num_ranks),
    }
    out = ulysses_attention(
        *mine,
        dist.group.WORLD,
        mask=None if mask is None else mask.tensor_split(num_ranks, 1)[rank],
        causal=causal,
        **(splits if given else {}),
    )
    (out * weight.tensor_split(num_ranks, 1)[rank]).sum().backward()
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, full, strict=True))]
    # Relative to the whole tensor's scale: a rank may hold a few small numbers only.
    return max(
        relative_error(actual, whole.tensor_split(num_ranks, 1)[rank])
        if actual.numel() == 0
        else ((actual - whole.tensor_split(num_ranks, 1)[rank]).abs().max() / whole.abs().max()).item()
        for actual, whole in pairs
    )


CASES = list(
    itertools.product(
        [1, 2, 3, 4],  # ranks
        [(12, 12), (7, 7), (12, 7), (5, 3)],  # tokens
        [(12, 12), (5, 5), (2, 2), (12, 4), (6, 2)],  # heads, some grouped
        [None, "key", "causal", "both"],
    )
)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ulysses_matches_full_attention(ranks, num_ranks):
    for case in CASES:
        if case[0] != num_ranks:
            continue
        _, tokens, heads, kind = case
        causal = kind in ("causal", "both")
        if causal and tokens[0] != tokens[1]:
            continue
        arguments = (*tokens, *heads, torch.float64, kind in ("key", "both"), causal, tokens == (12, 7))
        errors = ranks(num_ranks, compared, *arguments)
        assert max(errors) < RELATIVE[torch.float64], f"{case}: {errors}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ulysses_in_lower_precision(ranks, dtype):
    errors = ranks(3, compared, 7, 5, 4, 2, dtype, True, False, False)
    assert max(errors) < RELATIVE[dtype]


def counted():
    calls = []
    original = dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    try:
        q, k, v = (torch.randn(1, 4, 4, 8, requires_grad=True) for _ in range(3))
        ulysses_attention(q, k, v, dist.group.WORLD).sum().backward()
    finally:
        dist.all_to_all_single = original
    return len(calls)


def test_four_collectives_forward_and_backward(ranks):
    assert ranks(2, counted) == [4, 4]


def refused():
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 3, 6, 8)
    group, messages = dist.group.WORLD, []
    for call in (
        lambda: ulysses_attention(q[0], k[0], k[0], group),
        lambda: ulysses_attention(q, k[:, :, :4], k[:, :, :4], group),
        lambda: ulysses_attention(q, k, k[:, :2], group),
        lambda: ulysses_attention(q, k[:1], k[:1], group),
        lambda: ulysses_attention(q, k.double(), k.double(), group),
        lambda: ulysses_attention(q, k, k, group, mask=torch.ones(2, 3)),
        lambda: ulysses_attention(q, k, k, group, mask=torch.ones(2, 4, dtype=torch.bool)),
        lambda: ulysses_attention(q, k, k, group, causal=True),
        lambda: ulysses_attention(q, k, k),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_bad_input_is_refused_with_the_remedy(ranks):
    parts = [
        "must be [B, S, H, D]",
        "repeat the key heads",
        "agree in batch, tokens and heads",
        "agree in batch and head dim",
        "share one dtype",
        "got torch.float32 (2, 3)",
        "bool key mask [B, S_kv] = (2, 3)",
        "as many queries as keys; got 8 and 6",
        "init_parallel(plan)",
    ]
    for messages in ranks(2, refused):
        for part, message in zip(parts, messages, strict=True):
            assert part in message


def test_local_attention_of_a_row_without_keys_is_zero():
    q, k, v, mask = inputs(5, 7, 2, 2, torch.float32, True)
    q.requires_grad_()
    out = local_attention(q, k, v, mask=mask)
    out.sum().backward()
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(q.grad[1], torch.zeros_like(q.grad[1]))
