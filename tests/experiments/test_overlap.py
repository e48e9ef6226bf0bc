"""Ulysses with its transfers under compute: the plain exchange's bits, and how much of the transfers hides."""

import pytest
import torch
import torch.distributed as dist

from opensora_accel import attention
from opensora_accel.communications import share_sizes
from opensora_accel.experiments import overlap
from tests.attention.reference import random_inputs, weights_like


def both_ways(heads, tokens, batch, dtype, options):
    """Output and gradients on this rank, of the plain exchange (which is compared with one device) and overlapped."""
    group = dist.group.WORLD
    shares = [share_sizes(total, group.size()) for total in tokens]
    own = [slice(sum(s[: group.rank()]), sum(s[: group.rank() + 1])) for s in shares]
    q, k, v, mask = random_inputs(*tokens, *heads, options.get("masked", False), dtype=dtype)
    inputs = [tensor[:batch, rows].clone() for tensor, rows in ((q, own[0]), (k, own[1]), (v, own[1]))]
    mask = None if mask is None else mask[:batch, own[1]]
    weight = torch.eye(8, dtype=dtype).requires_grad_()
    found = []
    for ulysses_attention in (attention.ulysses_attention, overlap.ulysses_attention):
        q, k, x = (tensor.clone().requires_grad_() for tensor in inputs)
        # v is projected while q and k travel, or is there already.
        is_late = options.get("late", True) and ulysses_attention is overlap.ulysses_attention
        v = (lambda x=x: x @ weight) if is_late else x @ weight
        out = ulysses_attention(
            q, k, v, group, mask=mask, causal=options.get("causal", False),
            splits=shares[0], kv_splits=shares[1],
        )  # fmt: skip
        found.append([out, *torch.autograd.grad(out, [q, k, x, weight], weights_like(out))])
    return found


@pytest.mark.parametrize(
    ("num_ranks", "heads", "tokens", "options"),
    [
        (2, (4, 4), (11, 11), {}),  # two groups of a head, and shares that differ
        (2, (12, 4), (8, 8), {"masked": True}),
        (2, (4, 2), (9, 9), {"causal": True, "late": False}),
        (3, (9, 9), (7, 4), {}),
        (4, (8, 8), (3, 3), {"masked": True}),  # a rank without tokens
        (2, (3, 3), (7, 7), {}),  # heads that do not divide take the plain exchange
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("batch", [1, 2])
def test_it_is_the_plain_exchange_to_the_last_bit(ranks, num_ranks, heads, tokens, options, dtype, batch):
    for plain, overlapped in ranks(num_ranks, both_ways, heads, tokens, batch, dtype, options):
        for expected, found in zip(plain, overlapped, strict=True):
            assert torch.equal(expected, found)
