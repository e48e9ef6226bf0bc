"""Attention of rows one behind the other under a dense mask: the plain maths of stand-ins for kernels."""

import torch


def seen_by(num_queries, num_keys, kind):
    """[S_q, S_kv], bool: full, or a triangle with its corner at the last query and key, the first ones, or both."""
    diagonals = torch.arange(num_keys) - torch.arange(num_queries)[:, None]
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if kind in ("causal", "band"):
        seen &= diagonals <= num_keys - num_queries
    if kind in ("inverse causal", "band"):
        seen &= diagonals >= 0
    return seen


def forward(q, k, v, scale, seen):
    """q: [S_q, H, D]; k, v: [S_kv, H_kv, D]; seen: [S_q, S_kv] → [S_q, H, D], log-sum-exp [H, S_q], −inf for no key."""
    k, v = (tensor.repeat_interleave(q.size(1) // k.size(1), 1) for tensor in (k, v))
    scores = (torch.einsum("shd,thd->hst", q, k) * scale).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return torch.einsum("hst,thd->shd", weights, v), lse


def backward(grad, q, k, v, out, lse, scale, seen):
    """Gradients of q, k and v, given the whole rows' output [S_q, H, D] and log-sum-exp [H, S_q]."""
    heads, groups = k.size(1), q.size(1) // k.size(1)
    k, v = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
    scores = (torch.einsum("shd,thd->hst", q, k) * scale).masked_fill(~seen, -torch.inf)
    weights = (scores - lse[..., None]).exp()
    row = (grad * out).sum(-1).t()[..., None]
    grad_scores = weights * (torch.einsum("shd,thd->hst", grad, v) - row) * scale
    grad_k = torch.einsum("hst,shd->thd", grad_scores, q).unflatten(1, (heads, groups)).sum(2)
    grad_v = torch.einsum("hst,shd->thd", weights, grad).unflatten(1, (heads, groups)).sum(2)
    return torch.einsum("hst,thd->shd", grad_scores, k), grad_k, grad_v


def samples(q_starts, k_starts, longest_q, longest_k, num_rows, num_keys):
    """Rows and keys of each sample; what a kernel that is told lengths wants of them."""
    for starts, longest, total in ((q_starts, longest_q, num_rows), (k_starts, longest_k, num_keys)):
        assert starts.dtype == torch.int32 and starts.is_contiguous() and type(longest) is int
        sizes = starts.diff()
        assert starts[0] == 0 and bool((sizes >= 0).all()) and starts[-1] == total
        assert bool((sizes <= longest).all())
    assert len(q_starts) == len(k_starts)
    # flash-attn 2 takes it that each sample has one query where the longest has one.
    assert longest_q > 1
    ends = (zip(starts.tolist(), starts.tolist()[1:], strict=False) for starts in (q_starts, k_starts))
    return [tuple(slice(*end) for end in pair) for pair in zip(*ends, strict=True)]


def varlen_forward(q, k, v, given, scale, causal, lse_of_none):
    """Sample by sample; what is written of rows without keys: 0 and `lse_of_none`."""
    assert all(tensor.stride(-1) == 1 and tensor.dim() == 3 for tensor in (q, k, v))
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.size(1), q.size(0)), torch.nan)
    for rows, keys in samples(*given, q.size(0), k.size(0)):
        seen = seen_by(rows.stop - rows.start, keys.stop - keys.start, "causal" if causal else "full")
        if keys.start == keys.stop:
            out[rows], lse[:, rows] = 0, lse_of_none
        else:
            out[rows], lse[:, rows] = forward(q[rows], k[keys], v[keys], scale, seen)
    return out, lse


def varlen_backward(grad, q, k, v, out, lse, given, scale, causal):
    """Sample by sample; what lies in a gap is not written."""
    assert all(tensor.stride(-1) == 1 for tensor in (grad, q, k, v, out)) and lse.is_contiguous()
    assert lse.shape == (q.size(1), q.size(0)) and bool(lse.isfinite().all())
    grads = [torch.full_like(tensor, torch.nan) for tensor in (q, k, v)]
    for rows, keys in samples(*given, q.size(0), k.size(0)):
        if rows.start < rows.stop and keys.start < keys.stop:
            seen = seen_by(rows.stop - rows.start, keys.stop - keys.start, "causal" if causal else "full")
            part = backward(grad[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], scale, seen)
            grads[0][rows], grads[1][keys], grads[2][keys] = part
    return grads
