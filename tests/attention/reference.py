"""Attention on one device, written out, and the shares of it that a rank should hold."""

import torch


def full_attention(q, k, v, mask=None, causal=False, seen=None):
    """softmax(q kᵀ / √D) v, [B, S, H, D]; grouped heads; 0 where a query sees no key. seen: bool [S_q, S_kv]."""
    repeats = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) / q.size(-1) ** 0.5
    allowed = torch.ones(q.size(0), 1, q.size(1), k.size(1), dtype=torch.bool)
    if mask is not None:
        allowed = allowed & mask[:, None, None, :]
    if seen is not None:
        allowed = allowed & seen
    if causal:
        allowed = allowed & torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril()
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return torch.einsum("bhst,bthd->bshd", weights, v)


def random_inputs(num_queries, num_keys, heads, kv_heads, masked, *, dtype=torch.float64, head_dim=8, seed=0):
    """q, k, v of two samples, and a key mask under which the second sample sees nothing at all."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, num_queries, heads, head_dim, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, num_keys, kv_heads, head_dim, generator=generator, dtype=torch.float64)
    mask = None
    if masked:
        mask = torch.rand(2, num_keys, generator=generator) > 0.4
        mask[0, :1] = True
        mask[1] = False
    return q.to(dtype), k.to(dtype), v.to(dtype), mask


def weights_like(tensor, seed=1):
    return torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(seed))


def worst_error(pairs):
    """Largest difference over the largest magnitude of the *whole* tensor: a rank may hold a few small numbers only.

    Over 1 where that is less, as for a gradient that cancels to 0; what goes in is of order 1.

    `pairs`: (found on this rank, expected on this rank, whole).
    """
    worst = 0.0
    for found, expected, whole in pairs:
        if found.shape != expected.shape or not torch.isfinite(found).all():
            return float("inf")
        if found.numel():
            scale = max(whole.abs().max().item(), 1.0)
            worst = max(worst, (found - expected).abs().max().item() / scale)
    return worst
